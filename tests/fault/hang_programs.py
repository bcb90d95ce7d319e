"""Programs of ranks that hang in one of several ways, for the tests of what is recorded of a hang."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

import engine

from ..waiting import linger
from .programs import ones, touch, wait_for

SETS = ((1, 2), (0, 2), (0, 1, 2))  # ranks of the process sets, of which each rank is in some


def hang(kind: str, victim: int, before: int, where: int) -> None:
    """Make `before` operations, and then hang, as `kind` says, for what rank `victim` does or does not.

    `where` is -1 for the world, or the place of a process set in `SETS` that has the victim.
    """
    engine.init()
    rank = engine.rank()
    sets = [engine.add_process_set(list(ranks)) for ranks in SETS if len(ranks) < engine.size()]
    options: dict[str, Any] = {} if where < 0 else {"process_set": sets[where]}
    for step in range(before):
        engine.allreduce(ones(), name=f"layer.{step % 3}")
        for number, part in enumerate(sets):
            if part.included():
                engine.allgather(ones(4 + rank), name=f"part.{number}", process_set=part)
    engine.barrier()
    inside = where < 0 or sets[where].included()
    if not inside:
        touch(f"ready.{rank}")
        linger()
    if rank == victim:
        touch(f"ready.{rank}")
        others = [each for each in (range(engine.size()) if where < 0 else SETS[where]) if each != victim]
        if kind in ("killed", "raised", "stopped"):
            wait_for(*(f"ready.{each}" for each in others))
        misbehave(kind, options)
    name = "layer.0" if kind == "known" and where < 0 else "next"
    waiting = engine.allreduce_async(ones(), name=name, **options)
    touch(f"ready.{rank}")
    engine.synchronize(waiting)
    engine.barrier(**options)
    linger()


def misbehave(kind: str, options: dict[str, Any]) -> None:
    """Do what makes the other ranks hang, or fail together."""
    if kind in ("absent", "known"):
        linger()
    elif kind == "shape":
        engine.allreduce(ones(7), name="next", **options)
    elif kind == "dtype":
        engine.allreduce(np.ones(1000, np.float64), name="next", **options)
    elif kind == "reduction":
        engine.allreduce(ones(), engine.Max, name="next", **options)
    elif kind == "operation":
        engine.allgather(ones(), name="next", **options)
    elif kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "raised":
        raise ValueError("a fault of this rank alone")
    elif kind == "another name":
        engine.allreduce(ones(), name="other", **options)
    else:
        raise AssertionError(kind)


def stop_inside(victim: int) -> None:
    """Make large operations until rank `victim` has stopped itself in the middle of one, from another thread."""
    engine.init()
    rank, values = engine.rank(), ones(1 << 22)
    for step in range(1000):
        if rank == victim and step == 4:
            import threading

            threading.Timer(0.005, lambda: os.kill(os.getpid(), signal.SIGSTOP)).start()
        engine.allreduce_(values, engine.Average, name="large")
        if step == 3:
            touch(f"ready.{rank}")
