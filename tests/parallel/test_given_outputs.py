"""Results of allgather and alltoall in memory that the caller gives, and notification of whoever asks for it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import engine
from engine.native import core

from ..on_ranks import on_ranks
from ..waiting import until

pytestmark = on_ranks(1, 2, 3)


def native() -> core.Engine:
    return engine.session.runtime.current_engine()


@pytest.mark.parametrize("count", [0, 1, 5, 100_000])
def test_a_result_goes_into_an_output_of_its_size(count: int, rank: int, size: int) -> None:
    output = np.full(count * size, -1.0)
    handle = native().allgather(np.full(count, rank + 1.0), None, False, None, output)
    handle.wait()
    data, rows = handle.gathered
    assert rows == (count,) * size
    assert (output == np.repeat(np.arange(size) + 1.0, count)).all()
    assert data is None or count == 0


def test_a_rank_s_own_rows_may_lie_where_they_go(rank: int, size: int) -> None:
    output = np.zeros((size, 1000))
    output[rank] = rank + 1
    native().allgather(output[rank], None, True, None, output.reshape(-1)).wait()
    assert (output == np.arange(1, size + 1)[:, None]).all()


def test_an_output_of_another_size_stays_as_it_is(rank: int, size: int) -> None:
    output = np.full(3 * size + 1, -1.0)
    handle = native().allgather(np.full(3, rank + 1.0), None, False, None, output)
    handle.wait()
    data, _ = handle.gathered
    assert (output == -1).all()
    assert (np.frombuffer(data, np.float64) == np.repeat(np.arange(size) + 1.0, 3)).all()


def test_ranks_of_which_one_gives_an_output_get_the_same(rank: int, size: int) -> None:
    output = np.zeros(4 * size) if rank == 0 else None
    handle = native().allgather(np.full(4, rank + 1.0), None, False, None, output)
    handle.wait()
    data, _ = handle.gathered
    result = output if data is None else np.frombuffer(data, np.float64)
    assert (result == np.repeat(np.arange(size) + 1.0, 4)).all()


@pytest.mark.parametrize("each", [0, 1, 30_000])
@pytest.mark.parametrize("fits", [True, False])
def test_an_alltoall_goes_into_an_output_of_its_size(each: int, fits: bool, rank: int, size: int) -> None:
    """Rank r sends s + 1 times `each` rows to rank s."""
    rows = np.concatenate([np.full(each * (to + 1), 10.0 * rank + to) for to in range(size)])
    expected = np.concatenate([np.full(each * (rank + 1), 10.0 * source + rank) for source in range(size)])
    output = np.full(len(expected) + (not fits), -1.0)
    handle = native().alltoall(rows, [each * (to + 1) for to in range(size)], None, False, None, output)
    handle.wait()
    data, counts = handle.gathered
    assert counts == (each * (rank + 1),) * size
    if fits and each:
        assert data is None
        assert (output == expected).all()
    elif not fits:
        assert (np.frombuffer(data, np.float64) == expected).all()
        assert (output == -1).all()


def test_an_output_that_cannot_take_the_result_is_refused() -> None:
    readonly = np.zeros(6)
    readonly.flags.writeable = False
    for output, message in (
        (np.zeros(6, np.int32), "another dtype"),
        (np.zeros((3, 4))[:, ::2], "contiguous|dense|layout"),
        (readonly, "read-only"),
    ):
        with pytest.raises(ValueError, match=message):
            native().allgather(np.zeros(3), None, False, None, output)


def test_whoever_asks_is_notified_once_of_the_end(rank: int, size: int) -> None:
    told: list[int] = []
    handles = [native().allreduce(x, x, None, engine.Sum, 1.0, 1.0) for x in (np.ones(10), np.ones(100_000))]
    for number, handle in enumerate(handles):
        handle.notify(lambda number=number: told.append(number))
    until(lambda: sorted(told) == [0, 1], "both are told")
    for handle in handles:
        assert handle.done
        handle.wait()
        handle.notify(lambda: told.append(2))
    assert sorted(told) == [0, 1, 2, 2]


def test_a_notification_may_wait_for_other_operations(size: int) -> None:
    """All the threads that notify may wait at once: another takes over."""
    ended, first = threading.Event(), np.ones(8)
    chain = 6
    last: list[float] = []

    def go_on(left: int, before: np.ndarray) -> None:
        if left == 0:
            last.append(before[0])
            ended.set()
            return
        handle = native().allreduce(before, before, f"link {left}", engine.Sum, 1.0, 1.0)
        done = threading.Event()
        handle.notify(done.set)
        assert done.wait(30)
        handle.wait()
        go_on(left - 1, before)

    start = native().allreduce(first, first, "first", engine.Sum, 1.0, 1.0)
    start.notify(lambda: go_on(chain, first))
    assert ended.wait(60)
    assert last == [size ** (chain + 1)]


def test_a_handle_may_be_dropped_before_it_notifies(size: int) -> None:
    told = threading.Event()
    tensor = np.ones(50_000)
    native().allreduce(tensor, tensor, None, engine.Sum, 1.0, 1.0).notify(told.set)
    assert told.wait(30)
    assert (tensor == size).all()
