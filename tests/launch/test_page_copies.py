"""Copies of pages of counters: an agent sends them, and the launcher keeps them."""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from engine.launch.hosts.channel import Channel, ChannelError, Message
from engine.launch.hosts.page_copies import CLOCKS, Copies, Pages
from engine.metrics import page

from ..metrics.written_pages import content, words_of

DAY = 86_400 * 10**9


class Sent(Channel):
    """Channel that records the messages sent."""

    def __init__(self) -> None:
        self.messages_sent: list[Message] = []

    def send(self, kind: str, body: bytes = b"", /, **head: Any) -> None:
        self.messages_sent.append(Message(kind, head, body))


@pytest.fixture
def pages() -> Iterator[list[int]]:
    made = [page.make() for _ in range(6)]
    yield made
    for each in made:
        os.close(each)


def write(descriptor: int, **fields: int | list[int]) -> None:
    os.pwrite(descriptor, content(**fields), 0)  # type: ignore[arg-type]


def read(descriptor: int) -> page.Snapshot:
    found = page.read(descriptor)
    assert isinstance(found, page.Snapshot)
    return found


def on_a_host_that_booted_earlier(message: Message) -> Message:
    """Message as if its host's monotonic clock were ten days ahead, and its Unix time an hour behind."""
    monotonic, unix = (message.get_number(name, *CLOCKS) for name in ("monotonic", "unix"))
    ahead = {"monotonic": monotonic + 10 * DAY, "unix": unix - 3600 * 10**9}
    return Message(message.kind, message.head | ahead, message.body)


def test_copies_tell_times_by_the_launchers_clocks(pages: list[int]) -> None:
    """The sending host's monotonic clock is ten days ahead, its Unix time an hour behind."""
    channel, now, unix = Sent(), time.monotonic_ns(), time.time_ns()
    name = words_of("node1")
    times = {"last_ns": now + 10 * DAY, "started_ns": unix - 3600 * 10**9}
    write(pages[0], state=1, pid=os.getpid(), rank=4, size=6, hosts=2, host=1, host_name=name, **times)
    Pages({4: pages[0], 5: pages[1]}).send(channel)
    copies = Copies([pages[2]] * 4 + pages[3:5], [4, 5])
    copies.write_pages(on_a_host_that_booted_earlier(channel.messages_sent[0]))
    copy = read(pages[3])
    assert copy.host == "node1" and copy["rank"] == 4 and chr(copy["copied_state"]) in "RSD"
    assert abs(copy["last_ns"] - now) < 60e9 and abs(copy["started_ns"] - unix) < 60e9
    assert abs(copy["copied_ns"] - now) < 60e9 and copy["tuner_changed_ns"] == 0
    assert page.read(pages[4]) is None, "nobody has written to that page"
    assert page.read(pages[2]) is None, "that is another host's"


def test_only_what_has_changed_is_sent_and_all_is_dated(pages: list[int]) -> None:
    channel = Sent()
    for rank in (0, 1):
        write(pages[rank], state=1, pid=os.getpid(), rank=rank, steps=1)
    sender, copies = Pages({0: pages[0], 1: pages[1]}), Copies(pages[2:4], [0, 1])
    sender.send(channel)
    write(pages[1], state=2, pid=2**22, rank=1, steps=2)
    sender.send(channel)
    first, second = channel.messages_sent
    assert (first.head["changed"], second.head["changed"]) == ([0, 1], [1])
    assert len(first.body) < 2000, "a page is mostly empty"
    copies.write_pages(first)
    before = [read(descriptor)["copied_ns"] for descriptor in pages[2:4]]
    copies.write_pages(second)
    after = [read(descriptor) for descriptor in pages[2:4]]
    assert [each["steps"] for each in after] == [1, 2]
    assert all(each["copied_ns"] > then for each, then in zip(after, before, strict=True))
    assert chr(after[1]["copied_state"]) == "X", "there is no such process"


@pytest.mark.parametrize(
    "damage",
    [
        {"body": b"no compressed pages"},
        {"body": zlib.compress(bytes(page.BYTES - 8))},
        {"body": zlib.compress(bytes(10 * page.BYTES))},
        {"changed": [7]},
        {"states": [[7, "S"]]},
        {"monotonic": "now"},
        {"monotonic": 1 << 70},
        {"changed": [0, 0], "body": zlib.compress(bytes(2 * page.BYTES))},
        {"changed": None},
        {"changed": [[0]]},
        {"states": 5},
        {"states": [[0]]},
    ],
    ids=str,
)
def test_what_no_agent_sends_is_refused(pages: list[int], damage: dict[str, Any]) -> None:
    channel = Sent()
    write(pages[0], state=1, rank=0)
    Pages({0: pages[0]}).send(channel)
    [message] = channel.messages_sent
    body = damage.pop("body", message.body)
    with pytest.raises(ChannelError):
        Copies(pages[2:3], [0]).write_pages(Message("pages", message.head | damage, body))


def test_a_page_that_has_come_to_another_host_is_written_by_that_one_alone(pages: list[int]) -> None:
    """A slot's number may move to another host while the old host's agent still has a page of it."""
    channel = Sent()
    for steps, descriptor in enumerate(pages[:3]):
        write(descriptor, state=1, pid=os.getpid(), steps=steps)
    old, new = Copies(pages[3:5], [0, 1]), Copies(pages[3:5], [0, 1])
    Pages({0: pages[0], 1: pages[1]}).send(channel)
    Pages({1: pages[2]}).send(channel)
    of_old, of_new = channel.messages_sent
    new.write_pages(of_new, [1])
    before = read(pages[4])
    old.write_pages(of_old, [0])
    assert read(pages[4]) == before and before["steps"] == 2
    assert read(pages[3])["steps"] == 0


def test_a_damaged_page_is_damaged_in_its_copy(pages: list[int]) -> None:
    channel = Sent()
    os.pwrite(pages[0], struct.pack("=8sQ", b"ENGCNTR1", 99), 0)
    Pages({0: pages[0]}).send(channel)
    Copies(pages[2:3], [0]).write_pages(channel.messages_sent[0])
    with pytest.raises(page.PageError, match="is of version 99"):
        page.read(pages[2])


def test_times_that_no_clock_has_are_copied_as_the_nearest_there_are(pages: list[int]) -> None:
    """The sending host's clock is behind by more than its page's times leave, or its page lies."""
    for ahead, written, copied in ((DAY, 2**64 - 5, 2**64 - 1), (-DAY, 5, 1)):
        page.write_copy(pages[0], content(state=1, last_ns=written, started_ns=written), ahead, ahead)
        found = read(pages[0])
        assert (found["last_ns"], found["started_ns"]) == (copied, copied)
