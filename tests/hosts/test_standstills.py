"""A rank is stopped, or late, on one of several hosts: the others wait for it or name it, and no other rank or host."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..netns import Hosts, need_hosts
from ..waiting import let_pass, until
from .standstill_program import IDLE
from .test_failures import CREWS, HOST_OF, SIZE, Job

need_hosts()

LATE = [1, 2, 3]  # not rank 0: one on its host, the leader of another host, and another rank there
STOPPED = (2, 4)  # the leader of a host, and a rank that is alone on its host
SETTLED = 0.3  # seconds until ranks that can go on without them have done so
ASLEEP = 0.1  # share of a processor that a sleeping rank stays below
SILENT = 7.0  # seconds; a silent host is taken for lost after 4 s by its trunk, 6 s by a lane
NAMES = 17_000  # more than there are IDs
RECORD = 2048  # bytes that rank 0 may need for a name: its submitters and its description


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(len(CREWS)) as made:
        yield made


def start(hosts: Hosts, mode: str, home: Path, warning: float = 0.6, limit: float = 0.0, **environ: str) -> Job:
    limits = {"ENGINE_STALL_WARNING": str(warning), "ENGINE_STALL_LIMIT": str(limit)}
    return Job(hosts, "standstill_program", mode, SEEN=str(home), **limits, **environ)


def stop(job: Job, *ranks: int) -> None:
    for rank in ranks:
        job.hosts.kill(HOST_OF[rank], job.pids[rank], "STOP")


def resume(job: Job, *ranks: int) -> None:
    """Resume ranks, and the processes that have entered their hosts, which stop together with them."""
    for rank in ranks:
        job.hosts.kill(HOST_OF[rank], job.pids[rank], "CONT")
        job.processes[rank].send_signal(signal.SIGCONT)


def log(home: Path, rank: int) -> str:
    return (home / f"{rank}.log").read_text()


def busy(job: Job) -> dict[int, float]:
    """Processor time in seconds that each rank has used."""
    stats = {rank: job.hosts.run(HOST_OF[rank], "cat", f"/proc/{pid}/stat") for rank, pid in job.pids.items()}
    fields = {rank: text.rpartition(") ")[2].split() for rank, text in stats.items()}
    return {rank: (int(each[11]) + int(each[12])) / os.sysconf("SC_CLK_TCK") for rank, each in fields.items()}


@pytest.mark.slow
def test_ranks_that_are_stopped_for_longer_than_a_silent_host_are_waited_for(hosts: Hosts, tmp_path: Path) -> None:
    """Carriers stop inside large entries of several kinds, for a moment and then for long; those that wait sleep."""
    job = start(hosts, "large", tmp_path)
    assert {job.line(rank) for rank in range(SIZE)} == {"works\n"}
    for rank in random.Random(2).choices(range(SIZE), k=8):
        stop(job, rank)
        let_pass(0.1)
        resume(job, rank)
    stop(job, *STOPPED)
    let_pass(SETTLED)
    before = busy(job)
    let_pass(SILENT)
    used = {rank: after - before[rank] for rank, after in busy(job).items()}
    (tmp_path / "stop").touch()
    resume(job, *STOPPED)
    assert job.told() == dict.fromkeys(range(SIZE), "done")
    told = re.findall(r"schedule entry \d+ \('.*'\) has stood still for \d+ s for rank (\d)", log(tmp_path, 0))
    assert told and set(told) <= set(map(str, STOPPED)), log(tmp_path, 0)
    assert max(used.values()) < ASLEEP * SILENT, used


def test_in_reports_of_stalls_nobody_else_is_named(hosts: Hosts, tmp_path: Path) -> None:
    """Ranks are late with a known name and with a new one; a host reports its own ranks, or asks rank 0.

    Before that, idle ranks use no processor time on any host, rank 0's included.
    """
    ended = {rank: text.split() for rank, text in start(hosts, "late", tmp_path, LATE=json.dumps(LATE)).told().items()}
    assert {done for _, done in ended.values()} == {"done"}
    assert max(float(used) for used, _ in ended.values()) < ASLEEP * IDLE, ended
    for rank in range(SIZE):
        waits = (
            r"'(known|new)\.(\d)' \(allreduce\) has waited \d s for (ranks? \d[\d, -]*\d|rank \d|ranks unknown here)"
        )
        told = re.findall(waits, log(tmp_path, rank))
        for late in LATE:
            for kind in ("known", "new"):
                named = {whom for what, turn, whom in told if (what, int(turn)) == (kind, late)}
                sees = rank == 0 or (kind == "known" and (HOST_OF[rank] == 0 or HOST_OF[rank] == HOST_OF[late]))
                expected = {f"rank {late}"} if sees else {"ranks unknown here"}
                assert named == (expected if rank != late else set()), (rank, late, kind, log(tmp_path, rank))


@pytest.mark.slow
def test_of_a_standoff_one_account_is_told_on_all_hosts(hosts: Hosts, tmp_path: Path) -> None:
    """The report names both groups, each with all of its ranks, whichever host the odd rank is on."""
    told = start(hosts, "standoff", tmp_path, limit=1.0, LATE=json.dumps(LATE)).told()
    accounts = list(zip(*map(json.loads, told.values()), strict=True))
    assert len(accounts) == len(LATE)
    for odd, texts in zip(LATE, accounts, strict=True):
        [text] = {text.removesuffix(" (rank 0 noticed it first)") for text in texts}
        others = {1: "ranks 0, 2-4", 2: "ranks 0, 1, 3, 4", 3: "ranks 0-2, 4"}[odd]
        assert f"rank {odd} waits for 'odd', which {others} have not submitted" in text
        assert f"{others} wait for 'even', which rank {odd} has not submitted" in text


def test_new_names_wait_for_a_stopped_leader_in_bounded_memory(hosts: Hosts, tmp_path: Path) -> None:
    """Rank 0 keeps one record of each name, and nothing for the host that does not read."""

    def resident() -> int:
        status = hosts.run(0, "cat", f"/proc/{job.pids[0]}/status")
        return 1024 * int(re.findall(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)[0])

    job = start(hosts, "names", tmp_path, warning=0.0, NAMES=str(NAMES))
    assert job.line(0) == job.line(2) == "waits\n"
    before = resident()
    stop(job, 2)
    try:
        (tmp_path / "bring").touch()
        assert job.line(1) == job.line(4) == "brought\n"
        until(lambda: resident() - before > 100 * NAMES, "rank 0 has the names", 30)
        let_pass(1.0)
        full = resident()
        let_pass(1.0)
        assert resident() - full < 1 << 20, "flat"
        assert full - before < RECORD * NAMES
    finally:
        resume(job, 2)
        (tmp_path / "go").touch()
    assert {text.split()[-1] for text in job.told().values()} == {"done"}
