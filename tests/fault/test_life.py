"""Use of the engine without a world, in forked children, from several threads, and in many worlds."""

from __future__ import annotations

import pytest

from ..ranks import run_ranks
from . import life_programs


@pytest.mark.slow
def test_outside_a_world_calls_are_refused() -> None:
    for seen in run_ranks(2, life_programs.no_world).values:
        assert set(seen.values()) == {"NotInitializedError"}, seen


@pytest.mark.slow
def test_shutdown_beside_waiting_threads() -> None:
    finished = run_ranks(2, life_programs.shutdown_beside_a_waiting_thread, check=False)
    took, types = finished.values[1]
    assert took < 8 and types == ["NotInitializedError"] * 3, finished.values


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_many_threads_may_wait_for_one_handle(size: int) -> None:
    assert run_ranks(size, life_programs.one_handle_for_many_threads, 200).values == [[]] * size


def test_a_forked_child_is_refused_and_disturbs_nothing() -> None:
    finished = run_ranks(2, life_programs.forked)
    for rank, seen in enumerate(finished.values):
        assert seen == [repr((["ForkedError"] * 6, float(rank + step), 1.0)) for step in range(5)]
    assert not finished.files


def test_a_fork_while_operations_are_in_flight() -> None:
    finished = run_ranks(2, life_programs.forked_in_an_operation)
    assert finished.values == [True, True] and not finished.files


def test_pools_of_forked_workers_come_and_go() -> None:
    finished = run_ranks(2, life_programs.multiprocessing_fork)
    assert finished.values == [True, True] and not finished.files


@pytest.mark.slow
def test_data_loading_workers_that_touch_gradients() -> None:
    pytest.importorskip("torch")
    finished = run_ranks(2, life_programs.data_loader)
    for with_workers, without in finished.values:
        assert with_workers == without and len(without) == 12
    assert not finished.files


@pytest.mark.slow
def test_many_short_worlds_leave_nothing_in_the_process() -> None:
    for first, last in run_ranks(2, life_programs.many_worlds, 50).values:
        for what in ("descriptors", "threads"):
            assert last[what] == first[what], (first, last)
        assert abs(last["mappings"] - first["mappings"]) < 10, (first, last)
        assert last["KiB"] - first["KiB"] < 2048, (first, last)
