"""A rank is killed: every rank that is in a call, or enters one, is told whose death it was within 2 s."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from ..ranks import run_ranks, start_ranks
from ..waiting import until
from . import programs
from .faults import WITHIN, named, others, ready, send, soon


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("size", "victim", "moment"),
    [
        pytest.param(2, 1, "blocked", marks=pytest.mark.slow),
        (2, 0, "blocked"),
        (3, 0, "blocked on a new name"),
        (3, 2, "blocked on a new name"),
        (4, 2, "blocked"),
        (2, 1, "computing"),
        (3, 0, "computing"),
        pytest.param(2, 0, "streaming", marks=pytest.mark.slow),
        pytest.param(2, 1, "streaming", marks=pytest.mark.slow),
        (3, 1, "streaming"),
        (4, 0, "streaming"),
    ],
)
def test_everybody_learns_whose_death_it_was(size: int, victim: int, moment: str) -> None:
    with start_ranks(size, programs.killed, victim, moment) as job:
        ready(job)
        died = send(job, victim, signal.SIGKILL)
        until(lambda: not os.path.exists(f"/proc/{job.pid(victim)}/exe"), "the victim is dead")
        (job.directory / "dead").touch()
        finished = job.finish(check=False)
    named(finished, others(finished, victim), victim, "RankDiedError", died)
    assert finished.code == 128 + signal.SIGKILL
    assert f"first failure: rank {victim} " in finished.err and "SIGKILL" in finished.err
    for rank in range(size):
        assert (f"rank.{rank}/failure.json" in finished.files) == (rank != victim)


@pytest.mark.sample(1)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_forked_child_that_lives_on_hides_nothing(victim: int) -> None:
    with start_ranks(3, programs.killed_beside_child, victim) as job:
        ready(job)
        died = send(job, victim, signal.SIGKILL)
        finished = job.finish(check=False)
    named(finished, others(finished, victim), victim, "RankDiedError", died)


@pytest.mark.slow
def test_two_deaths_at_once() -> None:
    with start_ranks(4, programs.killed, 1, "streaming") as job:
        ready(job)
        died = send(job, 1, signal.SIGKILL)
        send(job, 0, signal.SIGKILL)
        finished = job.finish(check=False)
    named(finished, others(finished, 0, 1), (0, 1), "RankDiedError", died)


@pytest.mark.sample(1)
@pytest.mark.parametrize("victim", [0, 1])
def test_death_while_the_ranks_gather(victim: int) -> None:
    with start_ranks(3, programs.killed_in_init, victim, 2, options=["--grace-period", "20"]) as job:
        ready(job)

        def pidfds(rank: int) -> int:
            found = 0
            for each in os.listdir(f"/proc/{job.pid(rank)}/fd"):
                with contextlib.suppress(FileNotFoundError):  # closed in the meantime
                    found += "pidfd" in os.readlink(f"/proc/{job.pid(rank)}/fd/{each}")
            return found

        # Ranks 0 and 1 hold each other's pidfd: they have met, and wait for rank 2.
        until(lambda: pidfds(0) >= 2 and pidfds(1) >= 1, "ranks 0 and 1 have met")
        died = send(job, victim, signal.SIGKILL)
        survivor = 1 - victim
        job.wait_for(f"ready.{survivor}")
        until(lambda: (job.home / f"value.{survivor}").exists(), "the survivor was told")
        job.process.send_signal(signal.SIGTERM)  # rank 2 would wait for a world that has ended
        finished = job.finish(check=False)
    value = finished.values[survivor]
    assert value["type"] == "RendezvousError" and f"rank {victim} (pid " in value["text"], value
    soon(value["at"] - died, WITHIN, value)


def test_death_before_a_rank_came_to_the_gathering() -> None:
    """Rank 0 cannot notice the death; the launcher does, and ends the job."""
    with start_ranks(2, programs.killed_in_init, 1, 1, options=["--grace-period", "1"]) as job:
        ready(job)
        send(job, 1, signal.SIGKILL)
        finished = job.finish(check=False)
    assert finished.code == 128 + signal.SIGKILL and "first failure: rank 1 " in finished.err
    assert finished.seconds < 50, "start_timeout is 60 s"


@pytest.mark.slow
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_every_waiting_thread_is_told(size: int) -> None:
    victim = size - 1
    with start_ranks(size, programs.many_threads, victim, 8) as job:
        ready(job)
        died = send(job, victim, signal.SIGKILL)
        finished = job.finish(check=False)
    for seen in others(finished, victim).values():
        assert len(seen) == 8
        named(finished, seen, victim, "RankDiedError", died)


def test_what_is_not_fatal_leaves_a_working_engine() -> None:
    finished = run_ranks(3, programs.goes_on)
    assert finished.values == [
        ["MismatchError", "DuplicateNameError"] * 20,
        ["MismatchError"] * 20,
        ["MismatchError"] * 20,
    ]
    assert not finished.files
