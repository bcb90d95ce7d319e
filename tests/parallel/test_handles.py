"""Barriers wait, poll does not, and handles may be waited for twice and keep their tensors alive."""

from __future__ import annotations

import time

import numpy as np

import engine

from ..on_ranks import on_ranks, spare
from ..waiting import be_late, until

pytestmark = on_ranks(1, 2, 3, spare(4))


def test_a_barrier_waits_for_the_last(rank: int, size: int) -> None:
    for late in range(size):
        if rank == late:
            be_late(0.1)
        arrived = time.monotonic_ns()
        engine.barrier(f"barrier {late}")
        left = time.monotonic_ns()
        times = engine.allgather(np.array([[arrived, left]], np.int64))
        assert times[:, 1].min() >= times[:, 0].max(), "somebody left before all had arrived"


def test_unnamed_barriers() -> None:
    for _ in range(300):
        engine.barrier()


def test_poll(rank: int, size: int) -> None:
    # Rank 0's operation cannot complete before rank 1 submits its own, which waits for rank 0's poll.
    mine = np.full(5, rank, np.float32)
    if rank == 0:
        handle = engine.allreduce_async(mine, engine.Sum, "polled")
        assert size == 1 or not engine.poll(handle)
        assert size == 1 or "in flight" in repr(handle)
        engine.barrier("polled it")
    else:
        engine.barrier("polled it")
        handle = engine.allreduce_async(mine, engine.Sum, "polled")
    until(lambda: engine.poll(handle), "done, as every rank has brought it: nobody waits, but the cycle ends")
    assert "done" in repr(handle)
    first = engine.synchronize(handle)
    assert engine.synchronize(handle) is first and handle.wait() is first
    assert first.tolist() == [size * (size - 1) / 2] * 5


def test_a_handle_keeps_its_tensors(rank: int, size: int) -> None:
    handles = [engine.allreduce_async_(np.full(10_000, rank + k, np.float64), engine.Sum) for k in range(50)]
    for k, handle in enumerate(handles):
        assert engine.synchronize(handle)[9_999] == size * (size - 1) / 2 + size * k


@on_ranks(1, 2, 3, 4, world={"cycle_time_ms": 10_000})
def test_a_blocking_call_waits_for_no_cycle(size: int) -> None:
    for k in range(20):
        start = time.monotonic()
        engine.allreduce(np.ones(3), engine.Sum, "blocking")
        engine.allreduce(np.ones(3), engine.Sum)
        engine.synchronize(engine.broadcast_async(np.ones(3), k % size))
        assert time.monotonic() - start < 9
