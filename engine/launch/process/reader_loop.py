"""Event loop of one thread: one selector, whose descriptors each have a function that is called when they are ready.

The launcher and each agent have one, to watch agents (`hosts.event_loop`) or processes (`supervisor`). It never blocks
on a slow receiver: while a destination of output is full, the loop does not take further output.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from .outgoing import Outgoing
from .writer import LOOK, Writer


class ReaderLoop:
    """Event loop of the descriptors that a process reads; `sinks` are the destinations of output."""

    def __init__(self, sinks: Iterable[Outgoing | Writer] = ()) -> None:
        self.woken_at = 0.0  # time at which the latest events were found: seconds, CLOCK_REALTIME
        self._sinks = list(sinks)
        self._selector = selectors.DefaultSelector()
        self._urgent: set[int] = set()
        self._holders: list[Callable[[bool], None]] = []
        self._calls: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()  # guards `_bell`, which is used by threads that may outlive this object
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.add_reader(self._bell, self._make_calls)

    def add_reader(self, descriptor: int, act: Callable[[], object], urgent: bool = False) -> None:
        """Call `act`, which reads the descriptor and must not block, whenever it is readable.

        One that is `urgent` is called before all others that are ready at the same time.
        """
        self._selector.register(descriptor, selectors.EVENT_READ, act)
        if urgent:
            self._urgent.add(descriptor)

    def has_reader(self, descriptor: int) -> bool:
        """Return whether a descriptor is registered."""
        return descriptor in self._selector.get_map()

    def remove_reader(self, descriptor: int) -> None:
        """Unregister a descriptor, which is about to be closed; do nothing if it is not registered, or no longer."""
        self._urgent.discard(descriptor)
        with contextlib.suppress(KeyError):
            self._selector.unregister(descriptor)

    def hold_by(self, hold: Callable[[bool], None]) -> None:
        """Call `hold` in each step with whether a sink is full, so that a source of output pauses while one is."""
        self._holders.append(hold)

    def wake(self, act: Callable[[], None]) -> None:
        """Call `act` in the loop's thread. Any thread may call this; nothing happens once the loop is closed."""
        with self._lock:
            if self._bell >= 0:
                self._calls.append(act)
                os.eventfd_write(self._bell, 1)

    def step(self, seconds: float) -> None:
        """Wait for events once, for at most `seconds` (infinity: no limit), and handle them."""
        self._watch_room()
        full = [sink for sink in self._sinks if sink.is_full()]  # calls is_full() of all of them, which has effects
        for hold in self._holders:
            hold(bool(full))
        if full:
            seconds = min(seconds, LOOK)
        ready = [key for key, _ in self._selector.select(None if seconds == math.inf else seconds)]
        self.woken_at = time.time()
        registered = self._selector.get_map()
        for key in sorted(ready, key=lambda key: key.fd not in self._urgent):
            if registered.get(key.fd) == key:  # else an earlier one of these events has unregistered it
                key.data()

    def close(self) -> None:
        """Close the selector; a second call does nothing."""
        with self._lock:
            if self._bell >= 0:
                self._selector.close()
                os.close(self._bell)
                self._bell = -1

    def _list_outputs(self) -> Iterator[Outgoing]:
        """Yield the buffers whose data is written as soon as their readers have room."""
        yield from (sink for sink in self._sinks if isinstance(sink, Outgoing))

    def _watch_room(self) -> None:
        """Register those outputs for writing that have data waiting, and no others."""
        registered = self._selector.get_map()
        for out in self._list_outputs():
            if out.descriptor < 0:  # it is closed
                continue
            if out.waiting and out.descriptor not in registered:
                self._selector.register(out.descriptor, selectors.EVENT_WRITE, out.write_available)
            elif not out.waiting and out.descriptor in registered:
                self._selector.unregister(out.descriptor)

    def _make_calls(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        while self._calls:
            self._calls.popleft()()
