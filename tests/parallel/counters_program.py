"""Programs of ranks with counters, and the content of their pages."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import engine
from engine.metrics import names, page

from ..waiting import be_late, linger, until, until_files

Fields = dict[str, list[int]]


def pages() -> list[Path]:
    """Pages of counters that this process holds."""
    links = Path("/proc/self/fd").iterdir()
    return [link for link in links if os.path.lexists(link) and f"memfd:{page.NAME}" in os.readlink(link)]


def snapshot() -> page.Snapshot:
    (path,) = pages()
    found = page.read(path)
    assert found is not None
    return found


def own() -> Fields:
    return snapshot().fields


def every_kind() -> dict[str, Any]:
    """Run each collective a different number of times, so that its counts are recognizable."""
    engine.init(metrics=True, cycle_time_ms=0)
    before = own()
    rank, size = engine.rank(), engine.size()
    for _ in range(2):
        engine.allreduce(np.ones(1 << 18, np.float32), name="large")
    for _ in range(3):
        engine.allreduce(np.ones(4, np.float64), name="small")
    for _ in range(4):
        engine.broadcast(np.ones(10, np.int32), 0, name="sent")
    for _ in range(5):
        engine.allgather(np.ones((rank + 1, 2), np.float32), name="gathered")
    for _ in range(6):
        engine.alltoall(np.ones(size * 3, np.float32), name="exchanged")
    for _ in range(7):
        engine.reducescatter(np.ones((size * 2, 5), np.float32), name="scattered")
    for _ in range(8):
        engine.barrier()
    rows = [row for row in engine.session.runtime.current_engine().history() if row["type"] == "batch"]
    history = dict(Counter(f"{row['kind']}, {row['algorithm']}" for row in rows))
    return {"before": before, "after": own(), "counters": engine.counters(), "history": history}


def late(slow: int, delay: float, steps: int) -> Fields:
    """Submit the tensors of rank `slow` `delay` seconds after the others."""
    engine.init(metrics=True)
    for _ in range(steps):
        engine.barrier()
        if engine.rank() == slow:
            be_late(delay)
        engine.allreduce(np.ones(100, np.float32), name="tensor")
    return own()


def late_without_names(slow: int, delay: float, steps: int) -> Fields:
    """Same as `late`, with a new name in each step."""
    engine.init(metrics=True)
    for step in range(steps):
        if engine.rank() == slow:
            be_late(delay)
        engine.allreduce(np.ones(100, np.float32), name=f"step.{step}")
    return own()


def steps(count: int, seconds: float) -> dict[str, Any]:
    """Run optimizer steps of a known length, half of which is spent in the engine."""
    engine.init(metrics=True)
    native = engine.session.runtime.current_engine()
    engine.barrier()
    began = time.monotonic()
    native.mark_step()
    for _ in range(count):
        be_late(seconds / 2)
        if engine.rank() == 0:
            be_late(seconds / 2)
        engine.allreduce(np.ones(1000, np.float32), name="tensor")
        native.mark_step()
    return {"fields": own(), "seconds": time.monotonic() - began}


def off() -> tuple[int, int]:
    """Number of pages without metrics and, in a second world, with metrics."""
    engine.init()
    engine.allreduce(np.ones(3, np.float32))
    without = len(pages())
    engine.shutdown()
    engine.init(metrics=True)
    engine.allreduce(np.ones(3, np.float32))
    return without, len(pages())


def worlds() -> Fields:
    """Run two worlds, one after the other, with a process set in the second."""
    for number in range(2):
        engine.init(metrics=True)
        engine.allreduce(np.ones(3, np.float32), name=f"world.{number}")
        if number == 0:
            engine.shutdown()
    pair = engine.add_process_set([0, 1])
    if pair.included():
        for _ in range(10):
            engine.allreduce(np.ones(5, np.float32), name="set", process_set=pair)
    engine.barrier()
    return own()


def mismatch() -> Fields:
    engine.init(metrics=True)
    for _ in range(3):
        try:
            engine.allreduce(np.ones(2 + engine.rank(), np.float32), name="tensor")
        except engine.errors.MismatchError:
            continue
        raise AssertionError("no mismatch")
    return own()


def stalled() -> list[Fields]:
    """Withhold a tensor on rank 1 until it is overdue; return rank 0's counters meanwhile and afterwards."""
    engine.init(metrics=True, stall_warning=0.5)
    engine.allreduce(np.ones(2, np.float32), name="tensor")
    found = []
    if engine.rank() == 1:
        until_files("overdue")
        engine.allreduce(np.ones(2, np.float32), name="tensor")
    else:
        handle = engine.allreduce_async(np.ones(2, np.float32), name="tensor")
        until(lambda: own()["stalled"][0] and own()["stall_warnings"][0], "something is counted as stalled")
        found.append(own())
        Path("overdue").touch()
        engine.synchronize(handle)
    until(lambda: not own()["stalled"][0], "nothing is counted as stalled")
    found.append(own())
    return found


def given_up() -> Fields:
    """Withhold a tensor on rank 1 for longer than the limit; the other rank's process lives on."""
    engine.init(metrics=True, stall_warning=0.5, stall_limit=4)
    engine.barrier()
    if engine.rank() == 1:
        until_files("given up")
        return {}
    try:
        engine.allreduce(np.ones(2, np.float32), name="tensor")
    except engine.errors.WorldError:
        Path("given up").touch()
        return own()
    raise AssertionError("the tensor came")


def joined() -> Fields:
    """Submit three tensors on rank 0 and one on the other ranks, and join."""
    engine.init(metrics=True)
    for _ in range(3 if engine.rank() == 0 else 1):
        engine.allreduce(np.ones(4, np.float32), name="tensor")
    engine.join()
    return own()


def bereaved() -> None:
    """Wait for a rank that is killed; one rank reads all pages, then and afterwards."""
    engine.init(metrics=True)
    engine.allreduce(np.ones(4, np.float32), name="tensor")
    Path(f"ready.{engine.rank()}").touch()
    if engine.rank() == 1:
        linger()
    try:
        engine.allreduce(np.ones(4, np.float32), name="tensor")
    except engine.errors.WorldError:
        fields = own()
        assert fields["state"] == [names.STATES.index("failed")]
        assert fields["cause"] == [names.CAUSES.index("died")] and fields["culprit"] == [2]
        assert fields["submitted"] == fields["completed"]
        Path(f"known.{engine.rank()}").touch()
        raise
