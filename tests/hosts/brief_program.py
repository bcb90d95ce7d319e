"""One rank of many short worlds, one after the other. In each, rank 0 leaves right after the first barrier.

WORLDS is the number of worlds. In every second one the other ranks go on until they are told that rank 0 has left. The
program prints each unexpected error, one line per world, and the resources that leaked in this process; last, `done`.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

import engine

from ..waiting import until

ENDING = 5.0  # seconds within which threads of the last world must be gone
SLACK = 8  # mappings that an allocator may add; a leak of one per world would exceed it


def held() -> dict[str, int]:
    """Number of descriptors, mappings and threads of this process."""
    held = {what: len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")}
    return held | {"maps": len(Path("/proc/self/maps").read_text().splitlines())}


def main() -> None:
    """Begin and end worlds."""
    print(os.getpid(), flush=True)
    worlds = int(os.environ["WORLDS"])
    for number in range(worlds):
        if number == worlds // 4:
            before = held()
            before["maps"] += SLACK
        step = "init"
        try:
            engine.init()
            step = "barrier"
            engine.barrier()
            step = "after"
            while number % 2 and engine.rank():
                engine.allreduce(np.ones(1000, np.float32), engine.Sum, "loop")
        except engine.errors.EngineError as error:
            if step != "after" or not isinstance(error, engine.errors.RankLeftError) or error.rank != 0:
                print(f"world {number}, {step}: {type(error).__name__}: {error}", flush=True)
        engine.shutdown()
    try:
        until(lambda: all(held()[what] <= most for what, most in before.items()), "threads have ended", ENDING)
    except AssertionError:
        print(f"from {before} to {held()}", flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main()
