"""The channel between the launcher and an agent, at its edges."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from engine.frames import UNPROVEN, wrap
from engine.launch.channel import Channel, ChannelError, Seal, pack


@pytest.fixture
def ends() -> Iterator[tuple[Channel, int]]:
    """A channel, and the descriptor by which the other side writes to it."""
    reading, writing = os.pipe()
    null = os.open(os.devnull, os.O_WRONLY)
    with closing(Channel(reading, null)) as channel:
        yield channel, writing
        os.close(writing)


def test_what_has_come_with_a_message_is_there_for_whoever_reads_on(ends):
    """An agent that is told to start its ranks reads on elsewhere: no message may lie there until the next comes."""
    channel, writing = ends
    os.write(writing, pack("start") + pack("launch", worker=0) + pack("launch", worker=1))
    first = next(channel.messages())
    assert first.kind == "start"
    assert [message.number("worker") for message in channel.receive()] == [0, 1]
    assert list(channel.receive()) == [] and not channel.ended


def test_a_message_may_come_byte_by_byte(ends):
    channel, writing = ends
    found = []
    for byte in pack("output", b"\0\xff", rank=1):
        os.write(writing, bytes([byte]))
        found += channel.receive()
    assert [(each.kind, each.head, each.body) for each in found] == [("output", {"rank": 1}, b"\0\xff")]


@pytest.mark.parametrize("head", [b"[" * 50_000, b"5", b"\xff", b'["kind"]', b"[1, {}]", b'["kind", 5]'], ids=len)
def test_a_damaged_head_is_refused_as_such(ends, head):
    channel, writing = ends
    os.write(writing, wrap(len(head).to_bytes(4, "big") + head))
    with pytest.raises(ChannelError, match="the head of a message is damaged"):
        list(channel.receive())


def test_a_long_message_of_somebody_unproven_is_refused_by_its_length_alone(ends):
    channel, writing = ends
    channel.restrict(UNPROVEN, UNPROVEN)
    os.write(writing, (60 << 20).to_bytes(4, "big"))
    with pytest.raises(ChannelError):
        list(channel.receive())


def test_a_head_beyond_its_limit_is_refused_unparsed(ends, monkeypatch):
    channel, writing = ends
    channel.restrict(1 << 20, UNPROVEN)
    monkeypatch.setattr("engine.frames.parse_json", None)
    os.write(writing, pack("say", line="x" * UNPROVEN))
    with pytest.raises(ChannelError, match="the head of a message is damaged: it has"):
        list(channel.receive())


@pytest.fixture
def sealed(ends) -> tuple[Channel, int, Seal]:
    """A channel whose messages are sealed, how the other side writes to it, and how that seals its messages."""
    channel, writing = ends
    channel.seal(Seal(b"key", "driver", "task"))
    return channel, writing, Seal(b"key", "task", "driver")


def content_of(kind: str) -> bytes:
    return pack(kind)[4:]


def test_sealed_messages_come_in_their_order(sealed):
    channel, writing, seal = sealed
    os.write(writing, wrap(seal.close(content_of("hello"))) + wrap(seal.close(content_of("end"))))
    assert [message.kind for message in channel.receive()] == ["hello", "end"]


@pytest.mark.parametrize("what", ["changed", "doubled", "left out", "sent back", "not sealed", "short", "another key"])
def test_a_sealed_channel_takes_no_message_that_is(sealed, what):
    channel, writing, seal = sealed
    whole = seal.close(content_of("hello"))
    sent = {
        "changed": [whole[:-1] + b"?"],
        "doubled": [whole, whole],
        "left out": [seal.close(content_of("end"))],
        "sent back": [Seal(b"key", "driver", "task").close(content_of("hello"))],
        "not sealed": [content_of("hello")],
        "short": [whole[:20]],
        "another key": [Seal(b"yek", "task", "driver").close(content_of("hello"))],
    }[what]
    os.write(writing, b"".join(map(wrap, sent)))
    with pytest.raises(ChannelError):
        list(channel.receive())
