"""Programs of ranks for the tests of failures in process sets and in joins; like `programs`."""

from __future__ import annotations

import os
import resource
from typing import Any

import engine

from ..waiting import be_late, linger, until
from .programs import linger_until_failure, observe, ones, stream, touch, wait_for


def in_a_set(victim: int, moment: str) -> Any:
    """Use a set of ranks 1 and 2 of three; the test kills or stops one of them, or it withholds a tensor."""
    engine.init()
    rank = engine.rank()
    part = engine.add_process_set([1, 2])
    if part.included():
        engine.allreduce(ones(), name="known", process_set=part)
    engine.barrier()
    if rank == victim:
        touch(f"ready.{rank}")
        if moment == "withheld":
            be_late(1.5)
            return observe(engine.barrier)
        linger()
    if rank == 0:
        touch(f"ready.{rank}")
        be_late(1.5 if moment == "withheld" else 0.0)  # The set's operation is overdue first.
        return observe(engine.barrier)
    waiting = engine.allreduce_async(ones(), name="known", process_set=part)
    touch(f"ready.{rank}")
    if moment == "polled":  # by a thread that never waits in the engine
        seen = observe(lambda: until(lambda: engine.poll(waiting), "done"))
        return {**observe(lambda: engine.synchronize(waiting)), "begun": seen["begun"]}
    return observe(lambda: engine.synchronize(waiting))


def joining(victim: int, moment: str) -> Any:
    """Join: `victim` has joined when the test kills or stops it (`alone`: another has too), or the others have joined.

    In the latter case `victim` leaves or does nothing.
    """
    engine.init()
    rank = engine.rank()
    engine.allreduce(ones(), name="known")
    if moment in ("leaves", "nothing"):
        if rank == victim:
            touch(f"ready.{rank}")
            linger_until_failure() if moment == "nothing" else None
            return {"type": "left"}
        touch(f"ready.{rank}")
        return observe(engine.join)
    if rank == victim or (moment == "alone" and rank == 1):
        touch_when_joined(f"ready.{rank}")
        return observe(engine.join)
    if moment == "alone":  # Later than rank 1, whose wait exceeds the limit first.
        touch(f"ready.{rank}")
        wait_for("stopped")
        return observe(lambda: engine.allreduce(ones(), name="known"))
    return observe(lambda: stream(f"ready.{rank}"))


def touch_when_joined(name: str) -> None:
    """Start a thread that makes a file when this rank has joined."""
    import threading

    def look() -> None:
        until(lambda: engine.session.runtime.current_engine().joined, "joined")
        touch(name)

    threading.Thread(target=look, daemon=True).start()


def without_a_thread() -> Any:
    """Fail to start a set's engine on rank 1: no rank gets the set, and the next one has the same number everywhere."""
    engine.init()
    rank, superuser = engine.rank(), os.geteuid() == 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NPROC, (0, hard))
        if superuser:  # not subject to the limit
            os.setresuid(65534, 65534, 0)
    refused = observe(lambda: engine.add_process_set([0, 1]))
    if rank == 1:
        if superuser:
            os.setresuid(0, 0, 0)
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
    later = engine.add_process_set([0, 1])
    total = engine.allreduce(ones(), engine.Sum, process_set=later) if rank < 2 else ones() * 2
    return refused, later.process_set_id, float(total[0])
