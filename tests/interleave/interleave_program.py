"""Short programs of ranks that are threads, under the scheduler of schedule.c. Run by interleave.py, in its own build.

A seed chooses the program, who goes on at every step, and how often that changes. A hang ends the process with the last
steps on stderr.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "parallel"), str(HERE.parent)]

TOO_LONG = 50_000_000  # ns: a wait that only the tick of 100 ms ends is a lost wake-up
ROOM = 1 << 20
SWITCHES = (20, 100, 300, 700, 1000)  # of 1000 steps, after how many another thread may go on
MANNERS = ("blocking", "waiting", "waiting", "later")


def rank_program(rank: int, seed: int) -> None:
    """Some allreduces by few names, one after the other on all ranks, each rank in its own manner."""
    import numpy as np

    import engine

    native = engine.runtime.engine()
    ours, mine = random.Random(seed), random.Random(seed * 31 + rank)
    size = native.size
    later: dict[str, tuple[Any, Any, int]] = {}

    def land(handle: Any, tensor: Any, turn: int) -> None:
        handle.wait()
        assert (tensor == sum(range(size)) + size * turn).all(), (rank, turn, tensor)

    for turn in range(ours.randint(1, 5)):
        name = ours.choice("ab")
        elements = ours.choice((1, 1, 9000))
        if name in later:
            land(*later.pop(name))
        tensor = np.full(elements, rank + turn, np.float64)
        manner = mine.choice(MANNERS)
        handle = native.allreduce(tensor, tensor, name, engine.Sum, 1.0, 1.0, manner == "blocking")
        if manner == "later":
            later[name] = handle, tensor, turn
        else:
            land(handle, tensor, turn)
    for flight in later.values():
        land(*flight)
    native.close(1.0)


class Scheduler:
    """The library, which has to be there before the engine is."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        self.library.schedule_end.restype = ctypes.c_uint64

    def run(self, seed: int, size: int, order: bytes = b"") -> bytes:
        """Who went on at each step, in a program of `size` ranks; `order` comes before what the seed chooses."""
        from thread_world import ThreadWorld

        dice = random.Random(seed)
        library = self.library
        library.schedule_begin(
            ctypes.c_uint64(seed),
            ctypes.c_uint64(dice.choice(SWITCHES)),
            ctypes.c_uint64(TOO_LONG),
            order,
            ctypes.c_uint64(len(order)),
        )
        world = ThreadWorld(size, cycle_time_ms=dice.choice((0.0, 0.0, 1.0)), stall_limit=0.0)

        def wrap(rank: int, work: Callable[[int], None]) -> Callable[[int], None]:
            number = library.schedule_enrol(f"rank {rank}".encode())
            if rank == size - 1:
                library.schedule_go()

            def scheduled(rank: int) -> None:
                library.schedule_enter(number)
                try:
                    work(rank)
                finally:
                    library.schedule_leave()

            return scheduled

        world.run(rank_program, seed, wrap=wrap)
        taken = (ctypes.c_uint8 * ROOM)()
        steps = library.schedule_end(taken, ctypes.c_uint64(ROOM))
        world.close()
        return bytes(taken[: min(steps, ROOM)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--library", required=True)
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args()
    scheduler = Scheduler(options.library)
    steps = 0
    whole = hashlib.blake2b(digest_size=8)
    for seed in range(options.first, options.first + options.count):
        print(f"seed {seed}", file=sys.stderr, flush=True)
        order = scheduler.run(seed, options.size)
        if seed == options.first and scheduler.run(seed, options.size, order) != order:
            raise AssertionError(f"seed {seed} does not replay")
        steps += len(order)
        whole.update(order)
    print(f"{options.count} schedules, {steps} steps, {whole.hexdigest()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
