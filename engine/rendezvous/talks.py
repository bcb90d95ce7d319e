"""Event loop for conversations with other hosts: many at once in one thread, none of which blocks another.

A conversation is a generator. To wait, it yields a `Wait`; it is resumed with True when its socket is ready, and with
False when its patience has run out.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

from ..host.patience import STEP, Patience

Told = TypeVar("Told")


@dataclass(eq=False)
class Wait:
    """Condition that a conversation waits for: a ready socket or the end of its patience, whichever comes first."""

    patience: Patience | None = None
    connection: socket.socket | None = None
    events: int = selectors.EVENT_READ


Steps = Generator[Wait, bool, Told]


class Talks:
    """The active conversations. An exception of one propagates to the caller that resumed it."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._waits: dict[Steps[None], Wait] = {}

    def fileno(self) -> int:
        """Return a descriptor that is readable when one of the sockets is ready."""
        return self._selector.fileno()

    def __contains__(self, steps: object) -> bool:
        """Return whether a conversation is active."""
        return steps in self._waits

    def begin(self, steps: Steps[None]) -> None:
        """Start a conversation."""
        self._go_on(steps, None)

    def end(self, steps: Steps[None]) -> None:
        """Close a conversation, if it is still active."""
        if steps in self._waits:
            self._forget(steps)
            steps.close()

    def wait(self) -> float:
        """Return the seconds that may pass before `turn` must be called again."""
        waits = [wait.patience.wait() for wait in self._waits.values() if wait.patience is not None]
        return min(waits, default=STEP / 2)

    def sleep(self, seconds: float) -> None:
        """Wait until one of the sockets is ready, for at most `seconds`."""
        self._selector.select(seconds)

    def turn(self) -> None:
        """Resume the conversations whose socket is ready, then those whose patience has run out.

        Sockets come first: a late conversation may look late only because this process was.
        """
        late = [
            (steps, wait)
            for steps, wait in self._waits.items()
            if wait.patience is not None and not wait.patience.left()
        ]
        for key, _ in self._selector.select(0):
            steps, wait = key.data
            if self._waits.get(steps) is wait:  # Another conversation may just have ended it.
                self._go_on(steps, True)
        for steps, wait in late:
            if self._waits.get(steps) is wait:
                self._go_on(steps, False)

    def close(self) -> None:
        """Close all conversations."""
        for steps in list(self._waits):
            self.end(steps)
        self._selector.close()

    def _go_on(self, steps: Steps[None], answer: bool | None) -> None:
        if answer is not None:
            self._forget(steps)
        try:
            wait = next(steps) if answer is None else steps.send(answer)
        except StopIteration:
            return
        self._waits[steps] = wait
        if wait.connection is not None:
            self._selector.register(wait.connection, wait.events, (steps, wait))

    def _forget(self, steps: Steps[None]) -> None:
        wait = self._waits.pop(steps)
        if wait.connection is not None:
            self._selector.unregister(wait.connection)
