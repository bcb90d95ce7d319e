"""A suspended job goes on when it is resumed; a rank that leaves in the middle of an entry is named."""

from __future__ import annotations

import os
import signal
import time

import pytest

from ..ranks import Job, start_ranks
from ..waiting import until
from . import suspend_programs
from .faults import WITHIN, named, ready, send, stop, stop_in_the_middle

LIMIT = 3.0  # seconds; more than a busy machine adds to the shorter delay of rank 1


def suspend(job: Job, ranks: tuple[int, ...]) -> None:
    """Stop the launcher and some ranks for longer than the limit, and resume them."""
    os.kill(job.process.pid, signal.SIGSTOP)
    for rank in ranks:
        stop(job, rank)
    passed(LIMIT * 1.25)
    for rank in ranks:
        send(job, rank, signal.SIGCONT)
    os.kill(job.process.pid, signal.SIGCONT)


def passed(seconds: float) -> None:
    """Let time pass that the job shall see or not see."""
    end = time.monotonic() + seconds
    until(lambda: time.monotonic() >= end, "time passes", seconds + 5)


@pytest.mark.slow
def test_a_job_suspended_for_longer_than_the_limit_goes_on_and_a_rank_stopped_alone_is_named() -> None:
    with start_ranks(2, suspend_programs.suspended, LIMIT, timeout=90) as job:
        for number in range(3):
            job.wait_for(f"suspend.{number}")
            suspend(job, (0, 1))
            passed(0.4 * LIMIT)  # rank 1 is late, but rank 0 has seen less than the limit pass
            (job.directory / f"brought.{number}").touch()
        ready(job, 1)
        stopped = stop(job, 1)
        until((job.home / "value.0").exists, "rank 0 was told")
        (job.directory / "alone").touch()
        send(job, 1, signal.SIGCONT)
        finished = job.finish(check=False)
    named(finished, finished.values, 1, "RankStalledError", stopped, LIMIT + WITHIN)
    assert finished.values[0]["at"] - min(stopped, finished.values[0]["begun"]) > LIMIT / 2


@pytest.mark.sample(1)
@pytest.mark.parametrize(("leaver", "waited"), [(0, True), (1, True), (1, False)])
def test_who_leaves_in_the_middle_of_an_entry_is_named_at_once_without_any_limit(leaver: int, waited: bool) -> None:
    other = 1 - leaver
    with start_ranks(2, suspend_programs.left_in_the_middle, leaver, waited) as job:
        ready(job)
        stop_in_the_middle(job, other, main=waited)
        (job.directory / "leave").touch()
        until((job.home / f"value.{leaver}").exists, "the rank has left")
        send(job, other, signal.SIGCONT)
        resumed = time.monotonic()
        finished = job.finish(check=False)
    named(finished, {other: finished.values[other]}, leaver, "RankLeftError", resumed)
    assert "'long' was " in finished.values[other]["text"], finished.values[other]
