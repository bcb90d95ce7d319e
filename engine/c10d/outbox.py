"""Messages that were sent and may not have been received yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from ..errors import EngineError
from ..host.patience import Patience
from .pairs import Message
from .work import EngineWork

KEPT = 1 << 20  # bytes of received messages that stay until the next is sent; what is beyond goes as it is received
ENTRY = 1024  # bytes that a message takes beside what it carries


class SentMessage(NamedTuple):
    """Message that was sent, the bytes that it keeps, and its work if that waits for the receiver."""

    message: Message
    nbytes: int
    work: EngineWork | None


class Outbox:
    """Messages of a rank that a group has to wait for before it ends. Each is kept until it was received.

    The last ones are looked at as the next is sent, which costs nothing. When they are many or large, a thread of the
    engine takes each away as it ends. Callers of `add_message` hold the group's lock.
    """

    def __init__(self) -> None:
        self._recent: deque[SentMessage] = deque()
        self._recent_bytes = 0
        self._watched: set[Message] = set()

    def add_message(self, message: Message, nbytes: int, work: EngineWork | None) -> Sequence[SentMessage]:
        """Keep a message that was sent; return messages for `watch_messages`, which holds no lock.

        A work calls `remove_message` when it is concluded.
        """
        recent = self._recent
        while recent and recent[0].message.done:
            self._recent_bytes -= recent.popleft().nbytes
        recent.append(SentMessage(message, nbytes + ENTRY, work))
        self._recent_bytes += nbytes + ENTRY
        return self._sort_recent() if self._recent_bytes > KEPT else ()

    def watch_messages(self, messages: Sequence[SentMessage]) -> None:
        """Have messages taken away as they end. A callback of a program may run in here."""
        for each in messages:
            if each.work is not None:
                each.work.watch_end()
            else:
                each.message.notify(partial(self.remove_message, each.message))

    def remove_message(self, message: object) -> None:
        """Let go of a message that has ended."""
        self._watched.discard(message)

    def await_receivers(self, seconds: float) -> None:
        """Wait until all messages were received, at most so many seconds."""
        patience = Patience(seconds)
        messages = [*(each.message for each in self._recent), *self._watched.copy()]
        for message in reversed(messages):
            with suppress(EngineError):  # the world has failed, or the receiver has left: nobody waits for it
                if not message.wait_within(patience.seconds_left()):
                    break

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of messages that nobody takes away as they end, received or not."""
        return self._recent_bytes

    @property
    def watched_count(self) -> int:
        """Return the number of messages that are taken away as they end."""
        return len(self._watched)

    def _sort_recent(self) -> Sequence[SentMessage]:
        """Let go of messages that have ended; return the others if they are many, to be watched."""
        self._recent = deque(each for each in self._recent if not each.message.done)
        self._recent_bytes = sum(each.nbytes for each in self._recent)
        if self._recent_bytes <= KEPT // 2:  # so each message is looked at here only once in a while
            return ()
        recent, self._recent, self._recent_bytes = self._recent, deque(), 0
        self._watched.update(each.message for each in recent)
        return recent
