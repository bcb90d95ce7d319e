"""Native calls that fail: each is told why, soon and exactly once, though no thread waits in the engine."""

from __future__ import annotations

import os
import signal

import pytest

from ..ranks import run_ranks, start_ranks
from ..waiting import until
from . import native_programs
from .faults import WITHIN, ready, send, soon, stop

SOON = 1.0  # seconds within which a call is told that a rank has left
LIMIT = 2.0  # the stall limit, where one is set


@pytest.mark.slow
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_rank_that_left_is_noticed_at_once(size: int) -> None:
    cases = [
        (victim, name, before)
        for victim in sorted({0, 1, size - 1})
        for name in ("known", "new", "failed")
        for before in (True, False)
    ]
    finished = run_ranks(size, native_programs.leaving, cases)
    for rank, values in enumerate(finished.values):
        for (victim, name, before), value in zip(cases, values, strict=True):
            if rank == victim:
                continue
            about = f"rank {rank}, {victim} left, {name}, before: {before}: {value}"
            assert value["status"] == "FAILED_WORLD" and value["times"] == 1, about
            assert value["text"].startswith(f"RankLeftError: rank {victim} left"), about
            assert f"'{name}' was not " in value["text"], about
            soon(value["late"], SOON, about)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("size", "victim"), [(2, 0), (3, 1)])
def test_a_killed_rank(size: int, victim: int) -> None:
    with start_ranks(size, native_programs.disturbed, victim) as job:
        ready(job)
        died = send(job, victim, signal.SIGKILL)
        until(lambda: not os.path.exists(f"/proc/{job.pid(victim)}/exe"), "the victim is dead")
        finished = job.finish(check=False)
    for rank, values in enumerate(finished.values):
        for value in values if rank != victim else []:
            assert value["status"] == "FAILED_WORLD" and value["times"] == 1, value
            assert value["text"].startswith(f"RankDiedError: rank {victim} died"), value
            soon(value["at"] - died, WITHIN, value)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("size", "victim"), [(2, 0), (3, 1)])
def test_a_stopped_rank(size: int, victim: int) -> None:
    settings = {"ENGINE_STALL_LIMIT": str(LIMIT), "ENGINE_STALL_WARNING": "0.4"}
    with start_ranks(size, native_programs.disturbed, victim, env=settings) as job:
        ready(job)
        stopped = stop(job, victim)
        job.wait_for(*(f"../value.{rank}" for rank in range(size) if rank != victim))
        send(job, victim, signal.SIGKILL)
        finished = job.finish(check=False)
    for rank, values in enumerate(finished.values):
        for value in values if rank != victim else []:
            assert value["status"] == "FAILED_WORLD" and value["times"] == 1, value
            assert value["text"].startswith(f"RankStalledError: rank {victim} stalled"), value
            soon(value["at"] - stopped, LIMIT + WITHIN, value)


@pytest.mark.slow
def test_a_call_that_another_rank_does_not_make() -> None:
    finished = run_ranks(2, native_programs.withheld, LIMIT, check=False)
    for name, value in zip(("known", "new"), finished.values[0], strict=True):
        assert value["status"] == "FAILED_WORLD" and value["text"].startswith("RankStalledError: rank 1 "), value
        assert f"'{name}'" in value["text"] and value["late"] > LIMIT / 2, value
        soon(value["late"], LIMIT + WITHIN, value)
        assert f"'{name}' (allreduce) has waited" in finished.ranks[0].stderr, finished
    assert [value["type"] for value in finished.values[1]] == ["RankStalledError"] * 2


@pytest.mark.slow
def test_a_rank_that_ends_the_world() -> None:
    finished = run_ranks(2, native_programs.raised, check=False)
    for values in finished.values:
        for value in values:
            assert value["status"] == "FAILED_WORLD" and value["times"] == 1, value
            assert value["text"].startswith("RankRaisedError: rank 1 failed: bad batch 17"), value


def test_shutdown_tells_every_call_before_it_returns() -> None:
    for rank, worlds in enumerate(run_ranks(2, native_programs.shut_down, 3).values):
        for took, values, known, placed in worlds:
            assert took < 9 and known == "OK" and placed == 5
            assert len(values) == (2001 + 600 + 1 if rank == 0 else 0) + 2
            for value in values:
                assert value["times"] == 1 and value["status"] in ("NOT_INITIALIZED", "FAILED_WORLD"), value
                assert value["text"].split(":")[0] in ("NotInitializedError", "RankLeftError"), value
            for value in values[-2:]:
                assert value["status"] == "NOT_INITIALIZED", value
                soon(value["late"], SOON, value)


@pytest.mark.slow
def test_shutdown_waits_for_dones() -> None:
    for took, finished, values in run_ranks(2, native_programs.shut_down_beside_a_done).values:
        assert took > 0.4 and finished == [1] * 7
        soon(took, 4)
        assert [value["status"] for value in values] == [*["OK"] * 6, "NOT_INITIALIZED"]


def test_calls_that_race_with_shutdown() -> None:
    for worlds in run_ranks(2, native_programs.racing, 6, 3000).values:
        for statuses in worlds:
            assert set(statuses) <= {"OK", "NOT_INITIALIZED", "FAILED_WORLD"}, worlds


@pytest.mark.slow
def test_forked_children_are_refused() -> None:
    finished = run_ranks(2, native_programs.forked, 6)
    for said, right, first, after in finished.values:
        assert said == [repr([("FORKED", "ForkedError", 1)] * 4)] * 6
        assert right and first == "OK" and after == "NOT_INITIALIZED"
    assert not finished.files


@pytest.mark.slow
def test_signals_are_for_the_main_thread() -> None:
    for seen, signals in run_ranks(2, native_programs.interrupted).values:
        assert max(seen) < 15 and signals <= {0}


@pytest.mark.slow
def test_a_crash_in_a_done_is_shown_by_pythons_faulthandler() -> None:
    """Fault signals are not blocked on the engine's threads: the kernel would run no handler then."""
    finished = run_ranks(1, native_programs.crashing, check=False)
    assert finished.code == 128 + signal.SIGSEGV, finished
    assert "Fatal Python error: Segmentation fault" in finished.ranks[0].stderr, finished


@pytest.mark.slow
def test_without_a_thread_calls_fail_on_every_rank() -> None:
    refused, met = (values for values in run_ranks(2, native_programs.without_threads).values)
    for mine, other in zip(refused[:2], met[:2], strict=True):
        assert mine["status"] == "NO_MEMORY" and "no thread" in mine["text"], mine
        assert other["status"] == "MISMATCH" and "rank 0 failed before it was submitted" in other["text"], other
    assert [value["status"] for value in (*refused[2:], *met[2:])] == ["OK"] * 4


@pytest.mark.slow
def test_calls_behind_failures_are_given_up_together() -> None:
    settings = {"ENGINE_STALL_LIMIT": str(LIMIT), "ENGINE_STALL_WARNING": "0.4"}
    values = run_ranks(2, native_programs.given_up, 40, env=settings).values[0]
    assert {status for status, _, _ in values} == {"DUPLICATE"} and "other ranks have not" in values[0][1], values
    ended = [at for _, _, at in values]
    assert max(ended) - min(ended) < 5 * LIMIT, f"one after the other they take 40 times the limit: {ended}"
