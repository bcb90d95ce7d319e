"""Parts of messages that need no other rank: late handles, places that are put back, and waits in the store."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from engine.errors import CollectiveError, RendezvousError

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from engine.c10d import meeting as meetings  # noqa: E402
from engine.c10d import point_to_point  # noqa: E402
from engine.c10d.pairs import LateMessage, Pair, Posting  # noqa: E402

from ..waiting import until  # noqa: E402


class FullEngine:
    """Engine whose memory is used up."""

    def receive_bytes(self, output: Any, name: str) -> Any:
        raise MemoryError(f"no memory for {name}")


class LateMeeting:
    """Meeting in which the other rank comes as `come` is set, or the store breaks."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.come, self.error, self.key = threading.Event(), error, "0"

    def meet_aside(self, *_: object) -> Any:
        self.come.wait(30)
        if self.error is not None:
            raise self.error
        return SimpleNamespace(key="0", exchange_texts=None)


class ApartSets:
    """Registry of two hosts, which forms sets of one engine."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def are_on_one_host(self, ranks: tuple[int, ...]) -> bool:
        return False

    def form_among(self, *_: object, **__: object) -> Any:
        return self.engine


def late_pair(engine: Any, meeting: LateMeeting) -> Pair:
    pair = Pair(ApartSets(engine), SimpleNamespace(failure=None), (0, 1), "pair 0 and 1")  # type: ignore[arg-type]
    pair.form_pair(meeting, 0)  # type: ignore[arg-type]
    return pair


def test_every_late_message_hears_that_there_is_no_memory() -> None:
    meeting, told = LateMeeting(), list[int]()
    pair = late_pair(FullEngine(), meeting)
    messages = [pair.receive(None, f"message {number}") for number in range(3)]
    messages[2].notify(lambda: told.append(2))
    meeting.come.set()
    for message in messages:
        with pytest.raises(MemoryError, match="no memory for message"):
            message.wait_within(30.0)
    until(lambda: told == [2], "the last is notified")


@pytest.mark.parametrize("error", [OSError("no route"), ValueError("no number"), RuntimeError("no store")])
def test_messages_hear_why_their_pair_is_not_formed(error: Exception) -> None:
    meeting = LateMeeting(error)
    pair = late_pair(FullEngine(), meeting)
    message = pair.receive(None, "message")
    meeting.come.set()
    with pytest.raises(RendezvousError, match=f"pair 0 and 1 was not formed: {type(error).__name__}: {error}"):
        message.wait_within(30.0)
    for _ in range(2):
        with pytest.raises(RendezvousError):
            pair.receive(None, "message")


class EndlessEngine:
    """Group of four ranks of which one cannot be received from."""

    rank, size, numbers = 0, 4, (0, 1, 2, 3)


def test_places_that_were_posted_before_a_failure_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    messenger = point_to_point.Messenger(EndlessEngine(), None, 60.0)  # type: ignore[arg-type]
    broken = [3]

    class OnePair:
        def receive(self, output: Any, name: str) -> LateMessage:
            return LateMessage(name, output, False)

    def find_pair(sender: int, receiver: int) -> OnePair:
        if sender in broken:
            raise CollectiveError("rank 3 has left their process set")
        return OnePair()

    monkeypatch.setattr(messenger, "_find_pair", find_pair)
    with pytest.raises(dist.DistBackendError, match="rank 3 has left"):
        messenger.receive_from_any(torch.zeros(1), 5)
    broken.clear()
    postings = messenger.post_to_all(5)
    assert {sender: posting.number for sender, posting in postings.items()} == {1: 0, 2: 0, 3: 0}


def test_a_work_that_has_ended_hears_nothing_of_a_place_that_it_gave_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message comes while the work still asks the other places: the next work is told of theirs."""
    messages = {sender: LateMessage("message", None, False) for sender in (1, 2, 3)}
    postings = {sender: Posting(message, 0) for sender, message in messages.items()}
    given: dict[int, Posting] = {}
    told: list[str] = []

    class Others:
        limit = 60.0

        def post_to_all(self, tag: int) -> dict[int, Posting]:
            return dict(postings)

        def put_back(self, tag: int, left: dict[int, Posting]) -> None:
            given.update(left)
            for posting in left.values():  # the next work takes them at once
                posting.notify(lambda: told.append("next"))

    asked, went_on = threading.Event(), threading.Event()
    former = Posting.notify

    def notify(posting: Posting, function: Any) -> None:
        if posting is postings[2] and threading.current_thread() is threading.main_thread() and not asked.is_set():
            asked.set()
            went_on.wait(0.5)  # another thread of the engine takes the first rank's message if nothing keeps it
        former(posting, function)

    monkeypatch.setattr(Posting, "notify", notify)
    monkeypatch.setattr(point_to_point, "_take_message", lambda *_: None)
    monkeypatch.setattr(Posting, "wait", lambda _: None)

    def arrive() -> None:
        asked.wait(30)
        messages[1].let_go_on(None)
        went_on.set()

    thread = threading.Thread(target=arrive)
    messages[1]._handle = SimpleNamespace(notify=lambda function: function())  # type: ignore[assignment]
    thread.start()
    work = point_to_point._AnySource(Others(), torch.zeros(1), 5)  # type: ignore[arg-type]
    thread.join()
    assert work.is_completed() and work.source == 1 and sorted(given) == [2, 3]
    messages[2]._handle = messages[1]._handle
    messages[2].let_go_on(None)
    assert told == ["next"]


def test_long_waits_ask_the_store_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now, asked = 0.0, 0

        def monotonic(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            self.now += seconds
            self.asked += 1

    clock = Clock()
    monkeypatch.setattr(meetings, "time", clock)
    monkeypatch.setattr("engine.host.patience.time", clock)
    with pytest.raises(RendezvousError, match="waited 60 s"):
        meetings.StoreMeeting(dist.HashStore(), 0, 2, 60.0).exchange_texts(b"")
    assert clock.asked < 250
