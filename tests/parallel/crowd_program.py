"""Program of ranks that share one processor, as `on_ranks` runs it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

import engine

from ..waiting import until

SMALL, LARGE = 1024, 1 << 18  # elements of float32: 4 KiB and 1 MiB
WITHIN = 20.0


def crowd() -> dict[str, Any]:
    """Run small and large blocking calls, and one for which the last rank is late; return yields and sleeps of each."""
    engine.init()
    rank, last = engine.rank(), engine.size() - 1
    native = engine.session.runtime.current_engine()
    seen: dict[str, Any] = {"session": os.getsid(0), "group": os.getpgrp(), "pid": os.getpid()}

    def counted(what: str, count: int, elements: int) -> None:
        value = np.empty(elements, np.float32)
        before = native.counters()
        for k in range(count):
            value[:] = rank + k
            engine.allreduce_(value, engine.Sum, what)
            assert (value == sum(range(last + 1)) + (last + 1) * k).all()
        after = native.counters()
        seen[what] = {name: after[name] - before[name] for name in ("yields", "sleeps", "late_wakes")}

    counted("warm", 3, SMALL)
    counted("large", 5, LARGE)
    before = native.counters()["yields"]
    for _ in range(3):
        engine.alltoall(np.ones(LARGE - LARGE % engine.size(), np.float32), name="exchange")
    seen["exchange"] = native.counters()["yields"] - before
    counted("small", 200, SMALL)
    Path(f"pid.{rank}").write_text(str(os.getpid()))
    if rank == last:
        _until_others_sleep(last)
    counted("late", 1, SMALL)
    engine.shutdown()
    return seen


def _until_others_sleep(count: int) -> None:
    """Return when the main threads of the first `count` ranks are all asleep at once."""
    pids = [Path(f"pid.{other}") for other in range(count)]

    def asleep() -> bool:
        if not all(path.exists() and path.read_text() for path in pids):
            return False
        states = [Path(f"/proc/{path.read_text()}/stat").read_text().rpartition(") ")[2][0] for path in pids]
        return states == ["S"] * count

    until(asleep, "the other ranks sleep in a call that this one is late for", WITHIN, pause=0)
