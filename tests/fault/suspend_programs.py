"""Programs of ranks that the test stops: all of them, as when a job is suspended, or one alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine
from engine.config.config import read_environment
from engine.config.world import detect_world

from ..waiting import until
from .programs import BIG, LONG, observe, ones, touch, touch_when_pending, wait_for


def suspended(limit: float) -> Any:
    """Let the test suspend the job when `suspend.N` is there, and make `brought.N` a while after it resumes."""
    rank_alone = Path("alone")
    if detect_world(read_environment()).rank == 1:
        touch("suspend.0")
        wait_for("brought.0")
    engine.init(start_timeout=limit, stall_limit=limit, stall_warning=limit / 2)
    rank = engine.rank()
    engine.allreduce(ones(), name="known")
    if rank == 0:
        touch_when_pending("suspend.1", 2)
    else:
        wait_for("brought.1")
    for handle in [engine.allreduce_async(ones(), name=name) for name in ("known", "new")]:
        engine.synchronize(handle)
    if rank == 0:
        touch("suspend.2")
    else:
        wait_for("brought.2")
    assert engine.join() == 1
    handle = engine.allreduce_async(ones(BIG), engine.Sum, name="streaming")
    assert engine.synchronize(handle)[0] == 2
    if rank == 1:
        touch("ready.1")
        until(rank_alone.exists, "this rank was stopped alone", LONG)
    return observe(lambda: engine.allreduce(ones(), name="known"))


def left_in_the_middle(leaver: int, waited: bool) -> Any:
    """Shut down on `leaver` in the middle of an entry that another rank, which the test stops, holds up."""
    engine.init(stall_limit=0, stall_warning=0, shutdown_timeout=0.05)
    rank = engine.rank()
    native = engine.session.runtime.current_engine()
    # Long, so that a rank is rarely stopped at the end of an entry, where no other rank needs it.
    long = ones(4 * BIG)
    step = 0

    def stream() -> None:
        nonlocal step
        while True:
            handle = engine.allreduce_async_(long, engine.Max, name="long")
            if rank != leaver and not waited:
                until(
                    lambda: native.failure is not None or not native.pending(),
                    "an end, for which no thread waits",
                    LONG,
                )
            if rank == leaver:
                until(lambda: Path("leave").exists() or not native.pending(), "an end, or the word to leave", LONG)
                if Path("leave").exists():
                    break
            engine.synchronize(handle)
            step += 1
            if step == 3:
                touch(f"ready.{rank}")

    if rank != leaver:
        return observe(stream)
    stream()
    engine.shutdown()
    touch("left")
    return {"type": None}
