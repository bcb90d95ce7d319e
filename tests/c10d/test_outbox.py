"""Messages that a group waits for before it ends."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import EngineError

pytest.importorskip("torch")

from engine.c10d.outbox import Outbox


class _SentMessage:
    """Message whose receiver comes in time, or has left."""

    done = False

    def __init__(self, error: EngineError | None) -> None:
        self.error = error
        self.awaited = False

    def wait_within(self, _seconds: float) -> bool:
        self.awaited = True
        if self.error is not None:
            raise self.error
        return True


def test_a_message_that_has_failed_does_not_end_the_wait_for_others() -> None:
    outbox = Outbox()
    messages: list[Any] = [_SentMessage(error) for error in (None, EngineError("rank 1 has left"), None)]
    for each in messages:
        outbox.add_message(each, 8, None)
    outbox.await_receivers(1.0)
    assert [each.awaited for each in messages] == [True] * 3
