"""Event loop of coroutines in one thread: a connection that waits never blocks another.

A coroutine is a generator. To wait, it yields a `Wait`; it is resumed with True when its socket is ready, and with
False when its patience has run out.
"""

from __future__ import annotations

import select
import selectors
import socket
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar, cast

from ..host.patience import STEP, Patience

Result = TypeVar("Result")


@dataclass(eq=False)
class Wait:
    """Condition that a coroutine waits for: a ready socket or the end of its patience, whichever comes first."""

    patience: Patience | None = None
    connection: socket.socket | int | None = None
    events: int = selectors.EVENT_READ


Coroutine = Generator[Wait, bool, Result]


class CoroutineLoop:
    """Active coroutines. An exception of one propagates to the caller that resumed it."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._waits: dict[Coroutine[None], Wait] = {}

    def fileno(self) -> int:
        """Return a descriptor that is readable when one of the sockets is ready."""
        return self._selector.fileno()

    def __contains__(self, coroutine: object) -> bool:
        """Return whether a coroutine is active."""
        return coroutine in self._waits

    def start(self, coroutine: Coroutine[None]) -> None:
        """Start a coroutine."""
        self._resume(coroutine, None)

    def cancel(self, coroutine: Coroutine[None]) -> None:
        """Close a coroutine, if it is still active."""
        if coroutine in self._waits:
            self._remove_wait(coroutine)
            coroutine.close()

    def next_timeout(self) -> float:
        """Return the seconds that may pass before `run_ready` must be called again."""
        waits = [wait.patience.wait() for wait in self._waits.values() if wait.patience is not None]
        return min(waits, default=STEP / 2)

    def poll(self, seconds: float) -> None:
        """Wait until one of the sockets is ready, for at most `seconds`."""
        self._selector.select(seconds)

    def run_ready(self) -> None:
        """Resume the coroutines whose socket is ready, then those whose patience has run out.

        Sockets come first: a late coroutine may look late only because this process was.
        """
        late = [
            (coroutine, wait)
            for coroutine, wait in self._waits.items()
            if wait.patience is not None and not wait.patience.seconds_left()
        ]
        for key, _ in self._selector.select(0):
            coroutine, wait = key.data
            if self._waits.get(coroutine) is wait:  # Another coroutine may just have ended it.
                self._resume(coroutine, True)
        for coroutine, wait in late:
            if self._waits.get(coroutine) is wait:
                self._resume(coroutine, False)

    def close(self) -> None:
        """Close all coroutines."""
        for coroutine in list(self._waits):
            self.cancel(coroutine)
        self._selector.close()

    def _resume(self, coroutine: Coroutine[None], answer: bool | None) -> None:
        if answer is not None:
            self._remove_wait(coroutine)
        try:
            wait = next(coroutine) if answer is None else coroutine.send(answer)
        except StopIteration:
            return
        self._waits[coroutine] = wait
        if wait.connection is not None:
            self._selector.register(wait.connection, wait.events, (coroutine, wait))

    def _remove_wait(self, coroutine: Coroutine[None]) -> None:
        wait = self._waits.pop(coroutine)
        if wait.connection is not None:
            self._selector.unregister(wait.connection)


def run(coroutine: Coroutine[Result]) -> Result:
    """Run one coroutine to its end in the calling thread, without a descriptor of its own, and return its result."""
    try:
        wait = next(coroutine)
        while True:
            wait = coroutine.send(_wait_alone(wait))
    except StopIteration as end:
        return cast("Result", end.value)
    finally:
        coroutine.close()


def _wait_alone(wait: Wait) -> bool:
    """Wait for one condition, and return whether the socket is ready."""
    poll = select.poll()
    if wait.connection is not None:
        reads, writes = wait.events & selectors.EVENT_READ, wait.events & selectors.EVENT_WRITE
        poll.register(wait.connection, (select.POLLIN if reads else 0) | (select.POLLOUT if writes else 0))
    while not poll.poll(1000 * (STEP / 2 if wait.patience is None else wait.patience.wait())):
        if wait.patience is not None and not wait.patience.seconds_left():
            return False
    return True
