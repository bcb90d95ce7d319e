"""Failures in process sets, and of ranks that have joined: all ranks are told, by the rank's number in the world."""

from __future__ import annotations

import re
import signal

import pytest

from ..ranks import run_ranks, start_ranks
from ..waiting import let_pass
from . import set_programs
from .faults import WITHIN, named, others, ready, send, stop

LIMIT = 2.0
STALL = {"ENGINE_STALL_LIMIT": str(LIMIT)}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("victim", "moment"), [(1, "blocked"), (2, "blocked"), (2, "polled")])
def test_a_death_in_a_set(victim: int, moment: str) -> None:
    with start_ranks(3, set_programs.in_a_set, victim, moment) as job:
        ready(job)
        died = send(job, victim, signal.SIGKILL)
        finished = job.finish(check=False)
    named(finished, others(finished, victim), victim, "RankDiedError", died)


@pytest.mark.sample(1)
@pytest.mark.parametrize("victim", [1, 2])
def test_a_stop_in_a_set(victim: int) -> None:
    with start_ranks(3, set_programs.in_a_set, victim, "blocked", env=STALL) as job:
        ready(job)
        stopped = stop(job, victim)
        finished_when = LIMIT + WITHIN
        job.wait_for(*(f"../value.{rank}" for rank in range(3) if rank != victim))
        send(job, victim, signal.SIGKILL)
        finished = job.finish(check=False)
    named(finished, others(finished, victim), victim, "RankStalledError", stopped, finished_when)


@pytest.mark.slow
def test_what_is_withheld_in_a_set_ends_the_world_when_its_limit_is_over() -> None:
    with start_ranks(3, set_programs.in_a_set, 2, "withheld", env=STALL) as job:
        ready(job)
        finished = job.finish(check=False)
    for value in finished.values:
        assert value["type"] == "RankStalledError" and value["rank"] == 2, value
        told = "in the process set of ranks 1, 2: rank 1 waits for 'known', which rank 2 has not submitted"
        assert f"{told}; rank 2 waits in the world, or in another set" in value["text"], value


@pytest.mark.sample(1)
@pytest.mark.parametrize("victim", [0, 1])
def test_the_death_of_a_rank_that_has_joined(victim: int) -> None:
    with start_ranks(3, set_programs.joining, victim, "killed") as job:
        ready(job)
        died = send(job, victim, signal.SIGKILL)
        finished = job.finish(check=False)
    named(finished, others(finished, victim), victim, "RankDiedError", died)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_the_stop_of_a_rank_that_has_joined(victim: int) -> None:
    with start_ranks(3, set_programs.joining, victim, "stopped", env=STALL) as job:
        ready(job)
        stopped = stop(job, victim)
        job.wait_for(*(f"../value.{rank}" for rank in range(3) if rank != victim))
        send(job, victim, signal.SIGKILL)
        finished = job.finish(check=False)
    named(finished, others(finished, victim), victim, "RankStalledError", stopped, LIMIT + WITHIN)


def test_who_waits_is_not_blamed_for_not_joining() -> None:
    with start_ranks(3, set_programs.joining, 0, "alone", env=STALL) as job:
        ready(job)
        stopped = stop(job, 0)
        let_pass(LIMIT / 4)  # so that rank 1 has waited longer at the limit
        (job.directory / "stopped").touch()
        job.wait_for("../value.1", "../value.2")
        send(job, 0, signal.SIGKILL)
        finished = job.finish(check=False)
    named(finished, others(finished, 0), 0, "RankStalledError", stopped, LIMIT + LIMIT / 4 + WITHIN)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("moment", "kind"), [("leaves", "RankLeftError"), ("nothing", "RankStalledError")])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_does_not_join(victim: int, moment: str, kind: str) -> None:
    with start_ranks(3, set_programs.joining, victim, moment, env={**STALL, "ENGINE_STALL_WARNING": "0.5"}) as job:
        finished = job.finish(check=False)
    for rank, value in enumerate(finished.values):
        if moment == "nothing" and rank != victim:
            waited = rf"join has waited \d s for rank {victim}, and nothing was submitted"
            assert re.search(waited, finished.ranks[rank].stderr), finished
        assert rank == victim or (value["type"] == kind and value["rank"] == victim), value


@pytest.mark.slow
def test_a_set_that_one_rank_cannot_form_is_formed_by_none() -> None:
    for refused, number, total in run_ranks(3, set_programs.without_a_thread).values:
        assert refused["type"] == "EngineError" and "on rank 1: " in refused["text"], refused
        assert number == 1 and total == 2.0
