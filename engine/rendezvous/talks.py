"""Conversations with other hosts: many at once in one thread, none of which can hold up another.

A conversation is a generator. Where it has to wait, it yields a `Wait`, and is resumed with True when its socket is
ready, and with False when its patience is over.
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
    """What a conversation waits for: a socket, or the end of its patience, or whichever comes first."""

    patience: Patience | None = None
    connection: socket.socket | None = None
    events: int = selectors.EVENT_READ


Steps = Generator[Wait, bool, Told]


class Talks:
    """The conversations that are under way. What one of them raises ends whoever lets them go on."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._waits: dict[Steps[None], Wait] = {}

    def fileno(self) -> int:
        """A descriptor that is readable when one of the sockets is ready."""
        return self._selector.fileno()

    def __contains__(self, steps: object) -> bool:
        """Whether a conversation is under way."""
        return steps in self._waits

    def begin(self, steps: Steps[None]) -> None:
        """Begin a conversation."""
        self._go_on(steps, None)

    def end(self, steps: Steps[None]) -> None:
        """Break a conversation off, if it is still under way."""
        if steps in self._waits:
            self._forget(steps)
            steps.close()

    def wait(self) -> float:
        """The seconds that may be waited before the next look at what they wait for."""
        waits = [wait.patience.wait() for wait in self._waits.values() if wait.patience is not None]
        return min(waits, default=STEP / 2)

    def sleep(self, seconds: float) -> None:
        """Wait until one of the sockets is ready, at most so long."""
        self._selector.select(seconds)

    def turn(self) -> None:
        """Let those go on that can. Whoever is late is heard once more, in case that only we are."""
        late = [
            (steps, wait)
            for steps, wait in self._waits.items()
            if wait.patience is not None and not wait.patience.left()
        ]
        for key, _ in self._selector.select(0):
            steps, wait = key.data
            if self._waits.get(steps) is wait:  # Not if another one, a moment ago, has ended it.
                self._go_on(steps, True)
        for steps, wait in late:
            if self._waits.get(steps) is wait:
                self._go_on(steps, False)

    def close(self) -> None:
        """Break all conversations off."""
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
