"""A rank dies, or a cable is cut: every other rank gets an error that names the lost rank, before the stall limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..netns import Hosts, need_hosts, rest
from ..waiting import let_pass

need_hosts()

ROOT = Path(__file__).parents[2]
CREWS = [[0, 1], [2, 3], [4]]
SIZE = 5
HOST_OF = {rank: host for host, crew in enumerate(CREWS) for rank in crew}
FIRST = 2.5  # seconds by which one host loses rank 0's before the other; below every detection time


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as made:
        yield made


class Job:
    """Ranks that have all begun to reduce on three hosts; or to run another program in one of its modes."""

    def __init__(self, hosts: Hosts, program: str = "failure_program", mode: str = "", **environ: str) -> None:
        self.hosts, self.program, self.environ = hosts, program, {"MODE": mode, **environ}
        job = uuid.uuid4().hex
        self.processes = {rank: self._start(job, rank) for rank in range(SIZE)}
        self.pids = {rank: int(self.line(rank)) for rank in self.processes}

    def _start(self, job: str, rank: int) -> subprocess.Popen[str]:
        host = HOST_OF[rank]
        place, crew = CREWS[host].index(rank), len(CREWS[host])
        numbers = {"RANK": rank, "SIZE": SIZE, "LOCAL_RANK": place, "LOCAL_SIZE": crew, "CROSS_RANK": host}
        environ = {f"ENGINE_{name}": str(number) for name, number in numbers.items()}
        environ |= {"ENGINE_JOB": job, "ENGINE_HUB": "node0:4712", "ENGINE_SECRET": "a secret of tests"} | self.environ
        command = [sys.executable, "-m", f"tests.hosts.{self.program}"]
        return self.hosts.start(
            host, command, cwd=ROOT, env={**os.environ, **environ}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def line(self, rank: int) -> str:
        stdout = self.processes[rank].stdout
        assert stdout is not None
        return stdout.readline()

    def told(self, *lost: int) -> dict[int, str]:
        """Last words of the ranks that are not `lost`, once they have ended."""
        return {rank: rest(process, 90).strip() for rank, process in self.processes.items() if rank not in lost}


@pytest.mark.sample(2)
@pytest.mark.parametrize("victim", range(SIZE))
def test_a_killed_rank_is_named_on_every_host(hosts: Hosts, victim: int) -> None:
    job = Job(hosts)
    hosts.kill(HOST_OF[victim], job.pids[victim])
    for rank, text in job.told(victim).items():
        assert text.startswith(f"RankDiedError: rank {victim} died: "), (rank, text)


@pytest.mark.sample(1)
@pytest.mark.parametrize("host", [0, 1])
def test_who_is_behind_a_cut_cable_is_named(hosts: Hosts, host: int) -> None:
    """Rank 0 and the ranks that still reach it name the first rank of the cut-off host; that host names rank 0."""
    job = Job(hosts)
    hosts.cut(host)
    try:
        told = job.told()
    finally:
        hosts.restore(host)
    for rank, text in told.items():
        named = (2, 4) if host == 0 else (CREWS[host][0],)
        if (HOST_OF[rank] == host) != (host == 0):
            named = (0,)
        whole = tuple(f"RankLostError: rank {each} cannot be reached: its connection is silent" for each in named)
        assert text.startswith(whole), (rank, text)


@pytest.mark.slow
def test_who_hears_late_that_rank_0_is_gone_believes_who_has_heard(hosts: Hosts) -> None:
    """Rank 4 loses rank 0's host first and ends for that reason; ranks 2 and 3 do not take its end for a death."""
    job = Job(hosts, "drawn_program", "", MOMENT="idle")
    assert [job.line(rank) for rank in range(SIZE)] == SIZE * ["there\n"]
    hosts.part(0, 2)
    try:
        let_pass(FIRST)
        hosts.cut(0)
        hosts.run(0, "sh", "-c", f"kill -s KILL {job.pids[0]} {job.pids[1]}")
        told = job.told(0, 1)
    finally:
        hosts.restore(0)
        hosts.rejoin(0, 2)
    for rank, text in told.items():
        assert json.loads(text)["culprit"] == 0, (rank, text)


def test_a_stopped_leader_is_named_by_all(hosts: Hosts) -> None:
    """Its host mate's later submissions reach no other host; that rank is not named as late, nor rank 0 as silent."""
    job = Job(hosts, "stopped_program", "stopped", ENGINE_STALL_LIMIT="2", ENGINE_STALL_WARNING="1")
    try:
        told = job.told(2)
    finally:
        hosts.kill(HOST_OF[2], job.pids[2])
    for rank, text in told.items():
        assert text.startswith("RankStalledError: rank 2 stalled: "), (rank, text)


@pytest.mark.sample(1)
@pytest.mark.parametrize("victim", [0, 2, 3, 4])
def test_a_stopped_rank_is_named_by_all(hosts: Hosts, victim: int) -> None:
    """The rank is stopped in the middle of entries: the leader of a host, or another rank."""
    job = Job(hosts, ENGINE_STALL_LIMIT="2", ENGINE_STALL_WARNING="1")
    hosts.kill(HOST_OF[victim], job.pids[victim], "STOP")
    try:
        told = job.told(victim)
    finally:
        hosts.kill(HOST_OF[victim], job.pids[victim])
    for rank, text in told.items():
        assert text.startswith(f"RankStalledError: rank {victim} stalled: "), (rank, text)


@pytest.mark.slow
def test_a_rank_that_submits_nothing_is_named_by_all(hosts: Hosts) -> None:
    """The rank is named although its process runs."""
    job = Job(hosts, "stopped_program", "late", ENGINE_STALL_LIMIT="2", ENGINE_STALL_WARNING="1")
    for rank, text in job.told().items():
        assert text.startswith("RankStalledError: rank 3 stalled: "), (rank, text)


def test_a_leader_that_leaves_early_still_speaks_for_its_host(hosts: Hosts) -> None:
    """Rank 2 has returned, rank 3 of its host works on in a process set, and rank 4 dies."""
    job = Job(hosts, "leaving_program", "set")
    assert job.line(2) == "left\n"
    assert [job.line(rank) for rank in (1, 3, 4)] == 3 * ["works\n"]
    hosts.kill(HOST_OF[4], job.pids[4])
    for rank, text in job.told(4, 2).items():
        assert text.startswith("RankDiedError: rank 4 died: "), (rank, text)


def test_a_clean_exit_of_rank_0_is_no_death(hosts: Hosts) -> None:
    """The other ranks get `RankLeftError`, not `RankDiedError`."""
    for rank, text in Job(hosts, "leaving_program", "zero").told(0).items():
        assert text.removeprefix("works\n").startswith("RankLeftError: rank 0 left"), (rank, text)


def test_who_leaves_first_takes_nothing_back_that_is_on_its_way(hosts: Hosts) -> None:
    """Data that has left rank 0, but not reached the others, still arrives after rank 0 has finished."""
    hosts.slow(0, "20mbit")
    try:
        told = Job(hosts, "leaving_program", "last").told()
    finally:
        hosts.run(0, "tc", "qdisc", "del", "dev", "eth0", "root")
    assert told == dict.fromkeys(range(SIZE), "has it")


@pytest.mark.slow
def test_who_cannot_hear_rank_0_is_told_the_cause_by_others(hosts: Hosts) -> None:
    """It does not take for the cause a rank that ends because of the failure and has said so."""
    job = Job(hosts, "leaving_program", "fails")
    assert [job.line(rank) for rank in range(SIZE)] == SIZE * ["works\n"]
    hosts.part(0, 2)
    try:
        hosts.kill(0, job.pids[0], "USR2")
        told = job.told()
    finally:
        hosts.rejoin(0, 2)
    for rank, text in told.items():
        assert text.startswith("RankRaisedError: rank 0 failed: as it was told"), (rank, text)


@pytest.mark.parametrize("worlds", [16, pytest.param(80, marks=pytest.mark.slow)])
def test_no_rank_fails_in_what_all_took_part_in(hosts: Hosts, worlds: int) -> None:
    """Rank 0 leaves after the first barrier, and a fast rank ends the world; ranks in that barrier must not fail."""
    for rank, text in Job(hosts, "brief_program", WORLDS=str(worlds)).told().items():
        assert text == "done", (rank, text)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [2, 3])
def test_a_dead_rank_is_named_though_its_workers_hold_its_sockets(hosts: Hosts, victim: int) -> None:
    """The victim is the leader of a host, or another rank."""
    job = Job(hosts, "leaving_program", "workers")
    for rank in range(SIZE):
        assert job.line(rank) == "works\n"
    try:
        hosts.kill(HOST_OF[victim], job.pids[victim])
        for rank, text in job.told(victim).items():
            assert text.startswith(f"RankDiedError: rank {victim} died: "), (rank, text)
    finally:
        for host in range(3):
            hosts.run(
                host, "sh", "-c", "kill -s KILL $(grep -al '[l]eaving_program' /proc/[0-9]*/cmdline | cut -d/ -f3)"
            )
