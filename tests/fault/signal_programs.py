"""Programs of ranks for the tests of signal handlers that shut the engine down."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path
from typing import Any

import engine
from engine.config.config import read_environment
from engine.config.world import detect_world

from ..waiting import until
from .programs import ones, touch, touch_when_pending, wait_for

SPOKEN = 5.0  # seconds that a shutdown waits for what another rank never submits


def shut_down(number: int, frame: object) -> None:
    """Shut down in a program's handler, as for preemption; make `handling.N` before and `handled.N` after."""
    count = len(list(Path().glob("handling.*")))
    touch(f"handling.{count}")
    engine.shutdown()
    touch(f"handled.{count}")


def interrupted() -> Any:
    """Get SIGTERM on rank 0, in `init` and twice in `shutdown`; rank 1 comes late, and then never."""
    rank = detect_world(read_environment()).rank
    if rank == 0:
        signal.signal(signal.SIGTERM, shut_down)
        touch("in.init")
    else:
        wait_for("handled.0")
    engine.init()
    after_init = engine.is_initialized()
    if rank == 1:
        engine.shutdown()
    engine.init(shutdown_timeout=SPOKEN)
    engine.barrier()
    if rank == 1:
        wait_for("handled.1")
        return {"after_init": after_init}
    touch_when_pending("in.flight")
    with contextlib.suppress(engine.errors.EngineError):
        engine.allreduce(ones(), name="never")
    until(lambda: not engine.is_initialized(), "the handler has shut the engine down")
    return {"after_init": after_init, "ended": time.monotonic()}


def handlers() -> list[str]:
    """Return the signals whose handlers `init` changes."""
    numbers = sorted(signal.valid_signals())
    before = {number: signal.getsignal(number) for number in numbers}
    engine.init()
    changed = [number for number in numbers if signal.getsignal(number) != before[number]]
    return [f"SIGRTMIN+{number - signal.SIGRTMIN}" if number >= signal.SIGRTMIN else str(number) for number in changed]
