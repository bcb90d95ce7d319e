"""Meetings in torch's store: who is waited for, for how long, and what ends the wait."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest

from engine.errors import RankDiedError, RendezvousError

dist = pytest.importorskip("torch.distributed")

from engine.c10d import meeting as meetings  # noqa: E402

LONG = 600.0  # seconds that no test may last


def test_a_rank_that_does_not_come_is_named() -> None:
    meeting = meetings.StoreMeeting(dist.HashStore(), 0, 3, 0.7)
    with pytest.raises(RendezvousError, match=r"rank 0 of the group has waited 0\.7 s.* ranks 1 and 2|ranks 1, 2"):
        meeting.exchange_texts(b"")


def test_a_wait_for_other_ranks_can_be_interrupted() -> None:
    meeting = meetings.StoreMeeting(dist.HashStore(), 0, 2, LONG)
    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # a library of another test may have left its own
    try:
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            meeting.exchange_texts(b"")
        timer.join()
    finally:
        signal.signal(signal.SIGINT, former)
    assert time.monotonic() - begun < LONG / 10


def test_a_failure_of_the_world_ends_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    class FailedEngine:
        failure: Any = None

    engine = FailedEngine()
    monkeypatch.setattr(meetings.runtime, "is_initialized", lambda: True)
    monkeypatch.setattr(meetings.runtime, "current_engine", lambda: engine)
    meeting = meetings.StoreMeeting(dist.HashStore(), 0, 2, LONG)
    timer = threading.Timer(0.5, setattr, (engine, "failure", RankDiedError("rank 1 died", 1)))
    timer.start()
    with pytest.raises(RankDiedError, match="rank 1 died"):
        meeting.exchange_texts(b"")
    timer.join()
