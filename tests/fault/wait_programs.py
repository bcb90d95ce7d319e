"""Programs of ranks for the tests of who waits for whom; like `programs`."""

from __future__ import annotations

from typing import Any

import numpy as np

import engine

from .programs import linger_until_failure, observe, ones, touch, wait_for


def unwaited(victim: int, name: str, among: list[int] | None) -> Any:
    """Submit a tensor and never wait for it; the victim never submits it."""
    engine.init()
    rank = engine.rank()
    part = engine.add_process_set(among) if among else engine.global_process_set
    if part.included():
        for known in ("known", "other"):
            engine.allreduce(ones(), name=known, process_set=part)
    engine.barrier()
    touch(f"ready.{rank}")
    if part.included() and rank != victim:
        handle = engine.allreduce_async(ones(), name=name, process_set=part)
        linger_until_failure()
        return observe(lambda: engine.synchronize(handle))
    linger_until_failure()
    return observe(engine.barrier)


def early() -> Any:
    """Submit tensors on rank 0 long before the others do: nothing fails."""
    engine.init()
    rank = engine.rank()
    for _ in range(2):
        if rank != 0:
            wait_for("warned")
        values = [np.full(9, rank + k, np.float32) for k in range(5)]
        handles = [engine.allreduce_async(value, engine.Sum, f"early.{k}") for k, value in enumerate(values)]
        wait_for("warned")
        for k, handle in enumerate(handles):
            expected = sum(other + k for other in range(engine.size()))
            assert (engine.synchronize(handle) == expected).all()
    return engine.session.runtime.current_engine().failure
