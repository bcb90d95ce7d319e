"""A world whose ranks are threads of this process, since no native state is a singleton.

They share one control segment or, as if on several hosts, have one for each host, and socket pairs between them.
No rank can die here, so no monitor runs. Such a world serves a sanitizer that sees all ranks at once, a scheduler
that decides which of them runs, and tests that start in milliseconds.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from engine.collectives.process_sets import global_process_set
from engine.errors import EngineError
from engine.metrics import page
from engine.native import core, setup
from engine.net.rendezvous.layout import Layout
from engine.session import runtime

from ..waiting import SLOWNESS

SETTINGS: dict[str, Any] = {
    "stall_warning": 0.0,
    "stall_limit": 60.0 * SLOWNESS,
    "spin_us": 0.0,
}
KNOBS: dict[str, Any] = {
    "fusion_threshold": 64 << 20,
    "cycle_time_ms": 1.0,
    "stores": "auto",
    "chunk_bytes": 512 << 10,
    "between_hosts": "auto",
    "compression": "none",
    "sockets_per_lane": 1,
}
CALLS = 1000  # native calls find rank r's engine by this number + r
_generations = itertools.count(1)


def connections(
    hosts: Sequence[int], connect: Callable[[], tuple[socket.socket, socket.socket]], sockets: int = 1
) -> list[dict[str, Any]]:
    """Connections given to each rank's engine: trunks between leaders, and lanes of `sockets` between carriers."""
    size = len(hosts)
    crews = [[rank for rank in range(size) if hosts[rank] == host] for host in range(max(hosts) + 1)]
    given: list[dict[str, Any]] = [{"hosts": tuple(hosts), "lanes": {}, "trunks": {}} for _ in range(size)]

    def joined() -> tuple[int, int]:
        one, other = connect()
        one.setblocking(False)
        other.setblocking(False)
        return one.detach(), other.detach()

    carriers = {
        frozenset({rank, crew[crews[hosts[rank]].index(rank) % len(crew)]})
        for rank in range(size)
        for host, crew in enumerate(crews)
        if host != hosts[rank]
    }
    for one, other in sorted(map(sorted, carriers)):
        ends = [joined() for _ in range(sockets)]
        given[one]["lanes"][other], given[other]["lanes"][one] = map(list, zip(*ends, strict=True))
    layout = Layout(tuple(hosts))
    for leader in (crew[0] for crew in crews[1:]):
        (keeper,) = layout.trunk_ranks(leader)
        given[keeper]["trunks"][leader], given[leader]["trunks"][keeper] = joined()
    return given


class ThreadWorld:
    """A world of `size` engines in this process. As a context manager, it closes them at its end."""

    def __init__(
        self,
        size: int,
        hosts: Sequence[int] | None = None,  # number of each rank's host, 0 for rank 0; None: one host
        connect: Callable[[], tuple[socket.socket, socket.socket]] = socket.socketpair,  # makes two connected sockets
        carriers: Sequence[object] | None = None,  # provider of carriers of each rank
        **settings: Any,  # replace those of `SETTINGS` and `KNOBS`
    ) -> None:
        self.size = size
        self.engines: list[core.Engine] = []
        self.pages = [page.make() for _ in range(size)]
        places = list(hosts or [0] * size)
        generation = next(_generations)
        files = [(setup.create_segment(size, generation), setup.create_arena()) for _ in set(places)]
        sockets = settings.get("sockets_per_lane", 1)
        links = connections(places, connect, sockets) if hosts is not None else [{} for _ in range(size)]
        try:
            for rank in range(size):
                control, arena = files[places[rank]]
                peers = [os.pidfd_open(os.getpid()) for _ in range(size)]
                knobs = {name: settings.get(name, value) for name, value in KNOBS.items()}
                chosen = {name: value for name, value in settings.items() if name not in KNOBS} | links[rank]
                chosen |= {} if carriers is None else {"carrier": carriers[rank]}
                about = {**SETTINGS, "counters": self.pages[rank], "knobs": knobs, "calls": CALLS + rank, **chosen}
                engine = core.Engine(rank, size, os.dup(control), os.dup(arena), peers, **about)
                self.engines.append(engine)
        except BaseException:
            self.end(0.0)
            raise
        finally:
            for descriptor in itertools.chain(*files):
                os.close(descriptor)

    def run(self, function: Callable[..., Any], *args: Any, wrap: Callable[[int, Any], Any] | None = None) -> list[Any]:
        """Run `function(rank, *args)` on each rank, with `engine` as in a process of its own; return the results.

        The first exception of a rank is raised when all have ended. `wrap` may change the function that a thread runs.
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
        original, interval = runtime.current_engine, sys.getswitchinterval()
        runtime.current_engine = lambda: _here.engine
        everybody: Any = type(global_process_set)  # class of the operations' default process set
        everybody.engine = property(lambda self: _here.engine)
        # The longest that a rank leaving the engine waits for a computing one. Each of those that wait wakes so often,
        # too: many ranks get more time, or 64 of them would do little else.
        sys.setswitchinterval(1e-4 * self.size)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            runtime.current_engine = original
            del everybody.engine
            sys.setswitchinterval(interval)
        raised = [error for error in errors if error is not None]
        if raised:
            first = next((error for error in raised if not isinstance(error, EngineError)), raised[0])
            raise first
        return results

    @contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        """Make the calling thread one of this rank's, while `run` lasts."""
        _here.engine = self.engines[rank]
        try:
            yield
        finally:
            del _here.engine

    def close(self, timeout: float = 5.0) -> None:
        """Close all engines at once, as ranks do; check that their pages count all submissions as completed."""
        self.run(lambda rank: self.engines[rank].close(timeout))
        descriptors, self.pages = self.pages, []
        snapshots = [page.read(descriptor) for descriptor in descriptors]
        for descriptor in descriptors:
            os.close(descriptor)
        assert all(each is not None and each["submitted"] == each["completed"] for each in snapshots)

    def end(self, timeout: float, patience: float | None = None) -> bool:
        """Close all engines of a world that may have failed, each in a thread; return whether all ended in time."""
        closing = [threading.Thread(target=each.close, args=(timeout,), daemon=True) for each in self.engines]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(patience)
        descriptors, self.pages = self.pages, []
        for descriptor in descriptors:
            os.close(descriptor)
        return not any(thread.is_alive() for thread in closing)

    def __enter__(self) -> ThreadWorld:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_here = threading.local()
