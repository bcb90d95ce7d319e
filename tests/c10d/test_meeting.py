"""Meetings in torch's store: who is waited for, for how long, and what ends the wait."""

from __future__ import annotations

import concurrent.futures
import functools
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


def _meet_on_threads(calls: list[Any]) -> list[Any]:
    """Call functions at the same time, and return their results."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [each.result(LONG / 10) for each in [pool.submit(call) for call in calls]]


def test_groups_of_other_sizes_and_worlds_may_use_one_store() -> None:
    store = dist.HashStore()
    for size, world in ((3, "first"), (2, "first"), (2, "second"), (3, "first")):
        meetings_ = [meetings.StoreMeeting(store, rank, size, 20.0, world=world) for rank in range(size)]
        told = _meet_on_threads([functools.partial(each.exchange_texts, str(each.rank).encode()) for each in meetings_])
        assert told == [[str(rank).encode() for rank in range(size)]] * size
        lonely = meetings.StoreMeeting(store, 0, size, 0.1, world="lost")  # one rank alone, whose world has failed
        with pytest.raises(RendezvousError):
            lonely.exchange_texts(b"")


def test_survivors_meet_after_a_try_in_vain() -> None:
    store = dist.HashStore()
    for _ in range(2):
        with pytest.raises(
            RendezvousError, match=r"rank 3 of the group .* for ranks 0, 2 to shrink .* to ranks 0, 2, 3"
        ):
            meetings.SurvivorMeeting(store, 3, [0, 2, 3], 0.2)
    trials = [functools.partial(meetings.SurvivorMeeting, store, rank, [0, 2, 3], 1.0 + rank) for rank in (0, 3)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # the first gives up while the other waits for rank 2 alone
        for error in [each.exception(LONG / 10) for each in [pool.submit(call) for call in trials]]:
            assert "for rank 2 to shrink" in str(error)
    found = _meet_on_threads([lambda r=r: meetings.SurvivorMeeting(store, r, [0, 2, 3], 20.0) for r in (3, 0, 2)])
    assert len({each.key for each in found}) == 1
    assert [each.rank for each in found] == [2, 0, 1]
    told = _meet_on_threads([functools.partial(each.exchange_texts, str(each.rank).encode()) for each in found])
    assert told == [[b"0", b"1", b"2"]] * 3


def test_survivors_meet_after_one_has_heard_another_in_vain() -> None:
    """Two had met when one of them gave up; it comes again before the other gives up, too."""
    store, left = dist.HashStore(), [0, 2]
    first, second = _meet_on_threads([lambda r=r: meetings.SurvivorMeeting(store, r, left, 20.0) for r in left])
    with pytest.raises(RendezvousError, match="for rank 2 to shrink"):
        first.exchange_texts(b"", 0.1)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        again = pool.submit(meetings.SurvivorMeeting, store, 0, left, 20.0)
        second._exchanges += 1  # rank 0 has said nothing that is heard here
        with pytest.raises(RendezvousError, match="for rank 0 to shrink"):
            second.exchange_texts(b"", 0.3)
        late = pool.submit(meetings.SurvivorMeeting, store, 2, left, 20.0)
        found = [each.result(LONG / 10) for each in (again, late)]
    assert found[0].key == found[1].key
    told = _meet_on_threads([functools.partial(each.exchange_texts, str(each.rank).encode()) for each in found])
    assert told == [[b"0", b"1"]] * 2
