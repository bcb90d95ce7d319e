"""Short programs of ranks that are threads, under the scheduler of schedule.c. Run by interleave.py, in its own build.

A seed chooses the program, the thread that runs at every step, and how often that changes. A hang ends the process with
the last steps on stderr.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

TOO_LONG = 50_000_000  # ns: a wait that only the tick of 100 ms ends is a lost wake-up
ROOM = 1 << 20
SWITCHES = (20, 100, 300, 700, 1000)  # chances in 1000 that another thread may run after a step
MANNERS = ("blocking", "waiting", "polling", "polling", "later")


class Line:
    """Sequence of allreduces with few names, the same on all ranks; each rank handles them in its own manner."""

    def __init__(self, rank: int, seed: int, names: str, rest: Callable[[], None]) -> None:
        self.rank, self.names, self.rest = rank, names, rest
        self.ours, self.mine = random.Random(f"{seed}.{names}"), random.Random(f"{seed}.{names}.{rank}")
        self.later: dict[str, tuple[Any, Any, int]] = {}
        self.ended = False

    def run(self) -> None:
        import numpy as np

        import engine

        native = engine.session.runtime.current_engine()
        for turn in range(self.ours.randint(1, 5)):
            name = self.ours.choice(self.names)
            elements = self.ours.choice((1, 1, 9000))
            if name in self.later:
                self.land(*self.later.pop(name))
            tensor = np.full(elements, self.rank + turn, np.float64)
            manner = self.mine.choice(MANNERS)
            handle = native.allreduce(tensor, tensor, name, engine.Sum, 1.0, 1.0, manner == "blocking")
            if manner == "later":
                self.later[name] = handle, tensor, turn
            else:
                while manner == "polling" and not handle.done:
                    self.rest()
                self.land(handle, tensor, turn)
        for flight in self.later.values():
            self.land(*flight)
        self.ended = True

    def land(self, handle: Any, tensor: Any, turn: int) -> None:
        import engine

        handle.wait()
        size = engine.session.runtime.current_engine().size
        assert (tensor == sum(range(size)) + size * turn).all(), (self.rank, turn, tensor)


class Scheduler:
    """The library of the scheduler, which must be loaded before the engine."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        self.library.schedule_end.restype = ctypes.c_uint64

    def run(self, seed: int, size: int, order: bytes = b"") -> bytes:
        """Run a program of `size` ranks; return the thread of each step. `order` precedes the seed's choices."""
        import engine

        from ..parallel.thread_world import ThreadWorld

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
        lines = ("ab", "cd") if dice.random() < 0.4 else ("ab",)

        def rank_program(rank: int) -> None:
            native = engine.session.runtime.current_engine()
            mine = [Line(rank, seed, names, library.schedule_rest) for names in lines]

            def beside() -> None:
                with world.as_rank(rank):
                    mine[1].run()

            others = [threading.Thread(target=self.enrolled(f"rank {rank} too", beside)) for _ in mine[1:]]
            for thread in others:
                thread.start()
            mine[0].run()
            while not all(line.ended for line in mine):
                library.schedule_rest()
            native.close(1.0)

        def wrap(rank: int, work: Callable[[int], None]) -> Callable[[int], None]:
            scheduled = self.enrolled(f"rank {rank}", work)
            if rank == size - 1:
                library.schedule_go()
            return scheduled

        world.run(rank_program, wrap=wrap)
        taken = (ctypes.c_uint8 * ROOM)()
        steps = library.schedule_end(taken, ctypes.c_uint64(ROOM))
        world.close()
        return bytes(taken[: min(steps, ROOM)])

    def enrolled(self, name: str, work: Callable[..., None]) -> Callable[..., None]:
        """Wrap a new thread's function so that the thread runs only when it is scheduled."""
        number = self.library.schedule_enrol(name.encode())

        def scheduled(*args: Any) -> None:
            self.library.schedule_enter(number)
            try:
                work(*args)
            finally:
                self.library.schedule_leave()

        return scheduled


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
