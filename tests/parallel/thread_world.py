"""A world whose ranks are threads of this process, over one control segment: nothing native is a singleton.

Nothing can die here, so no monitor runs. What such a world is for: a sanitizer that sees all ranks at once, a scheduler
that decides which of them goes on, and a test that starts in milliseconds.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from engine import runtime
from engine.metrics import page
from engine.native import core, setup
from engine.process_sets import global_process_set

SETTINGS: dict[str, Any] = {
    "stall_warning": 0.0,
    "stall_limit": 60.0,
    "spin_us": 0.0,
}
KNOBS: dict[str, Any] = {
    "fusion_threshold": 64 << 20,
    "cycle_time_ms": 1.0,
    "stores": "auto",
    "chunk_bytes": 512 << 10,
    "compression": "none",
}
CALLS = 1000  # native calls find rank r's engine by this number + r
_generations = itertools.count(1)


class ThreadWorld:
    """`size` engines in this process. As a context manager, they are closed at its end.

    Parameters
    ----------
    size : int
    **settings
        Of the engines, instead of `SETTINGS` and `KNOBS`.
    """

    def __init__(self, size: int, **settings: Any) -> None:
        self.size = size
        self.engines: list[core.Engine] = []
        self.pages = [page.make() for _ in range(size)]
        control = setup.create_segment(size, next(_generations))
        arena = setup.create_arena()
        try:
            for rank in range(size):
                peers = [os.pidfd_open(os.getpid()) for _ in range(size)]
                knobs = {name: settings.get(name, value) for name, value in KNOBS.items()}
                chosen = {name: value for name, value in settings.items() if name not in KNOBS}
                about = {**SETTINGS, "counters": self.pages[rank], "knobs": knobs, "calls": CALLS + rank, **chosen}
                engine = core.Engine(rank, size, os.dup(control), os.dup(arena), peers, **about)
                self.engines.append(engine)
        finally:
            os.close(control)
            os.close(arena)

    def run(self, function: Callable[..., Any], *args: Any, wrap: Callable[[int, Any], Any] | None = None) -> list[Any]:
        """What `function(rank, *args)` returns on each rank; it calls `engine` as in a process of its own.

        The first exception of a rank is raised when all have ended. `wrap` may change what a thread runs.
        """
        results: list[Any] = [None] * self.size
        errors: list[BaseException | None] = [None] * self.size

        def work(rank: int) -> None:
            try:
                with self.as_rank(rank):
                    results[rank] = function(rank, *args)
            except BaseException as error:
                errors[rank] = error
                self.engines[rank].abort(repr(error))

        targets = [work if wrap is None else wrap(rank, work) for rank in range(self.size)]
        threads = [threading.Thread(target=target, args=(rank,)) for rank, target in enumerate(targets)]
        original, interval = runtime.engine, sys.getswitchinterval()
        runtime.engine = lambda: _here.engine
        everybody: Any = type(global_process_set)  # the operations' default
        everybody.engine = property(lambda self: _here.engine)
        sys.setswitchinterval(1e-4)  # a rank that comes out of the engine waits that long for one that computes
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            runtime.engine = original
            del everybody.engine
            sys.setswitchinterval(interval)
        raised = [error for error in errors if error is not None]
        if raised:
            first = next((error for error in raised if not isinstance(error, runtime.EngineError)), raised[0])
            raise first
        return results

    @contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        """Within, while `run` lasts, the calling thread is one of this rank's."""
        _here.engine = self.engines[rank]
        try:
            yield
        finally:
            del _here.engine

    def close(self, timeout: float = 5.0) -> None:
        """Close all engines, at once, as ranks do; by then their pages agree on what was done."""
        self.run(lambda rank: self.engines[rank].close(timeout))
        descriptors, self.pages = self.pages, []
        snapshots = [page.read(descriptor) for descriptor in descriptors]
        for descriptor in descriptors:
            os.close(descriptor)
        assert all(each is not None and each["submitted"] == each["completed"] for each in snapshots)

    def __enter__(self) -> ThreadWorld:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_here = threading.local()
