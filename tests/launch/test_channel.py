"""The channel between the launcher and an agent, at its edges."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from engine.launch.channel import Channel, ChannelError, pack


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
    os.write(writing, len(head).to_bytes(4, "big") * 2 + head)
    with pytest.raises(ChannelError, match="the head of a message is damaged"):
        list(channel.receive())
