"""What members of worlds do, for `tests/elastic/test_worlds.py`: functions of a `Member`."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import numpy as np

import engine
from tests.elastic.member import Member


def resources() -> dict[str, int]:
    """What this process holds: descriptors, threads, maps."""
    with open("/proc/self/maps") as maps:
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "maps": len(maps.readlines()),
        }


def counting(member: Member) -> None:
    """Reduce until the world fails, under names that each world counts anew."""
    engine.init()

    def body(member: Member) -> Any:
        gc.collect()
        member.say("resources", **resources())
        first = engine.allreduce(np.array([float(engine.rank())]), engine.Sum)
        member.say("reduced", value=float(first[0]), size=engine.size(), rank=engine.rank())
        while True:
            engine.allreduce(np.ones(8), engine.Sum)

    member.run(body)
