"""Jobs are found through /proc, and their pages are read while they run and after they have ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.host.processes import list_processes
from engine.metrics import page
from engine.metrics.page import PageError, Snapshot
from engine.metrics.report.find_jobs import Attached, RunningJob, by_rank, find_jobs

from ..waiting import measured, until
from .watched_jobs import ENVIRONMENT
from .written_pages import snapshot

ALONE = """
import os, sys, time
from tests.metrics.written_pages import fill
from engine.metrics import page
fill(page.make(), state=1, pid=os.getpid(), rank=int(os.environ.get("RANK", 0)), size=int(sys.argv[1]), worlds=1)
if "fork" in sys.argv and os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print("ready", flush=True)
sys.stdin.read()
"""
Starter = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def alone() -> Iterator[Starter]:
    """Start ranks without our launcher, each with a page of its own."""
    started: list[subprocess.Popen[str]] = []

    def start(size: int, *options: str, **variables: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", ALONE, str(size), *options]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, env=ENVIRONMENT | variables, **pipes)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.communicate(timeout=60)


def found(pid: int) -> list[RunningJob]:
    """Jobs to which a process belongs; others may run on this machine."""
    return [job for job in find_jobs() if pid in job.members]


def test_a_launchers_job_is_found_with_all_its_ranks(fake_job: Any) -> None:
    fake = fake_job(3, "by-name")
    (job,) = found(fake.pid)
    assert (job.run, job.pid, job.launched, len(job.pages)) == ("by-name", fake.pid, True, 3)
    assert job.members == {fake.pid, *fake.ranks}
    with Attached(job) as attached:
        reading = attached.read()
        assert sorted(reading.snapshots) == [0, 1, 2]
        assert [reading.snapshots[rank]["pid"] for rank in range(3)] == fake.ranks
        assert set(attached.read_process_states(reading).values()) <= {"S", "R", "D"}


def test_two_jobs_are_two(fake_job: Any) -> None:
    one, two = fake_job(1), fake_job(2)
    assert [(job.pid, len(job.pages)) for job in found(one.pid) + found(two.pid)] == [(one.pid, 1), (two.pid, 2)]


def test_pages_can_be_read_after_the_job_has_ended(fake_job: Any) -> None:
    fake = fake_job(2)
    with Attached(found(fake.pid)[0]) as attached:
        assert attached.runs
        fake.process.communicate(timeout=60)
        assert not attached.runs
        assert [each.state for each in attached.read().snapshots.values()] == ["ended", "ended"]
        assert attached.read_process_states(attached.read()) == {0: "X", 1: "X"}
    assert found(fake.pid) == []


def test_pages_that_cannot_be_read_are_told_by_rank(fake_job: Any) -> None:
    fake = fake_job(4)
    for command, rank in (("junk", 1), ("version", 2), ("clear", 3)):
        fake.tell(command, rank)
    with Attached(found(fake.pid)[0]) as attached:
        pages = attached.read().pages
    assert isinstance(pages[0], Snapshot) and pages[3] is None
    assert "damaged" in str(pages[1]) and "version 7" in str(pages[2])


@pytest.mark.slow
def test_agents_of_a_launcher_that_is_here_are_no_jobs_of_their_own() -> None:
    options = ["-H", "a:2,b:1", "--launch-agent", "env HOST={host}", "--network-interface", "lo"]
    command = [sys.executable, "-m", "engine.launch", "-np", "3", *options, "sh", "-c", "echo ready; exec sleep 60"]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as launcher:
        try:
            assert launcher.stdout is not None
            assert [launcher.stdout.readline().partition(":")[2] for _ in range(3)] == ["ready\n"] * 3
            agents = {process.pid for process in list_processes() if process.parent == launcher.pid}
            jobs = [job for job in find_jobs() if job.pid in {launcher.pid, *agents}]
        finally:
            launcher.terminate()
    assert len(agents) >= 2 and [(job.pid, len(job.pages)) for job in jobs] == [(launcher.pid, 3)]
    assert len(jobs[0].members) == 4


def test_ranks_of_another_launcher_are_one_job(alone: Starter) -> None:
    own = f"test-{os.getpid()}"  # which no other job of this machine has
    torchrun = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "TORCHELASTIC_RUN_ID": own}
    ranks = [alone(3, RANK=str(rank), **torchrun) for rank in (2, 0)]
    other = alone(2, RANK="0", **torchrun | {"MASTER_PORT": "29512"})
    (job,) = found(ranks[0].pid)
    assert job.members == {rank.pid for rank in ranks} and not job.launched and job.pid == ranks[1].pid
    assert found(other.pid)[0].members == {other.pid}
    with Attached(job) as attached:
        assert sorted(attached.read().snapshots) == [0, 2]
        late = alone(3, RANK="1", **torchrun)
        assert attached.read().snapshots[1]["pid"] == late.pid
        for rank in ranks:
            rank.communicate(timeout=60)
        assert attached.runs, "one of three is left"
        late.communicate(timeout=60)
        assert not attached.runs and sorted(attached.read().snapshots) == [0, 1, 2]


@pytest.mark.slow
def test_single_processes_are_jobs_of_their_own(alone: Starter) -> None:
    one, two = alone(1), alone(1)
    assert [len(found(each.pid)) for each in (one, two)] == [1, 1]
    assert found(one.pid) != found(two.pid)


def test_a_forked_worker_is_no_rank(alone: Starter) -> None:
    rank = alone(1, "fork")
    (job,) = found(rank.pid)
    assert len(job.pages) == 1 and len(job.members) == 2 and [each.pid for each in job.processes] == [rank.pid]


def test_a_job_that_does_not_count_is_known(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import os, subprocess, sys; os.environ['ENGINE_JOB'] = f'{os.getpid()}-abc'\n"
               "with subprocess.Popen(['cat'], stdout=1) as rank: print(rank.pid, flush=True)"]  # fmt: skip
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        rank = int(process.stdout.readline())
        # A process that executes a program shows no variables for a moment.
        (job,) = until(lambda: found(rank), "the variables of the rank")
        process.stdin.close()
    assert (job.pid, job.pages, job.launched) == (process.pid, (), True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_jobs_of_other_users_are_not_found() -> None:
    code = ALONE.replace("fill(", "os.setuid(65534)\nfill(", 1)
    command = [sys.executable, "-c", code, "1"]
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        assert found(process.pid) == []
        process.communicate(timeout=60)


def test_pages_without_a_rank_have_the_places_that_are_left() -> None:
    two, three = snapshot(state=1, rank=2), snapshot(state=1, rank=3)
    error = PageError("is damaged")
    assert by_rank([None, error, two, three]) == {0: None, 1: error, 2: two, 3: three}
    assert by_rank([three, None]) == {1: None, 3: three}
    again = snapshot(state=1, rank=2, pid=9)
    assert by_rank([two, again, None]) == {0: two, 2: again, 3: None}


def test_looking_for_jobs_is_quick(fake_job: Any) -> None:
    fake_job(3)

    def measure() -> None:
        begun = time.monotonic()
        find_jobs()
        assert time.monotonic() - begun < 5

    measured(measure)


def test_a_page_of_nobody_is_empty() -> None:
    descriptor = page.make()
    try:
        assert page.read(descriptor) is None
    finally:
        os.close(descriptor)
