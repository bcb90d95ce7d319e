"""Edge cases of the channel between the launcher and an agent."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from engine.launch.hosts import remote_files
from engine.launch.hosts.channel import Channel, ChannelError, Message, pack_message
from engine.launch.process.writer import Writer
from engine.net.frames import UNPROVEN, wrap
from engine.net.stream import Seal


@pytest.fixture
def ends() -> Iterator[tuple[Channel, int]]:
    """Channel, and the descriptor with which the other side writes to it."""
    reading, writing = os.pipe()
    null = os.open(os.devnull, os.O_WRONLY)
    with closing(Channel(reading, null)) as channel:
        yield channel, writing
        os.close(writing)


def test_what_has_come_with_a_message_is_there_for_whoever_reads_on(ends):
    """After the message that starts its ranks, an agent reads elsewhere: no buffered message may wait for the next."""
    channel, writing = ends
    os.write(writing, pack_message("start") + pack_message("launch", worker=0) + pack_message("launch", worker=1))
    first = next(channel.wait_for_messages())
    assert first.kind == "start"
    assert [message.get_number("worker") for message in channel.receive()] == [0, 1]
    assert list(channel.receive()) == [] and not channel.ended


def test_a_message_may_come_byte_by_byte(ends):
    channel, writing = ends
    found = []
    for byte in pack_message("output", b"\0\xff", rank=1):
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
    channel.limit_sizes(UNPROVEN, UNPROVEN)
    os.write(writing, (60 << 20).to_bytes(4, "big"))
    with pytest.raises(ChannelError):
        list(channel.receive())


def test_a_head_beyond_its_limit_is_refused_unparsed(ends, monkeypatch):
    channel, writing = ends
    channel.limit_sizes(1 << 20, UNPROVEN)
    monkeypatch.setattr("engine.net.frames.parse_json", None)
    os.write(writing, pack_message("say", line="x" * UNPROVEN))
    with pytest.raises(ChannelError, match="the head of a message is damaged: it has"):
        list(channel.receive())


@pytest.fixture
def sealed(ends) -> tuple[Channel, int, Seal]:
    """Channel with sealed messages, the other side's descriptor, and the other side's seal."""
    channel, writing = ends
    channel.authenticate_with(Seal(b"key", "driver", "task"))
    return channel, writing, Seal(b"key", "task", "driver")


def content_of(kind: str) -> bytes:
    return pack_message(kind)[4:]


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


def problem_of(path: Any, first: bool, part: bytes, directory: Path) -> OSError | None:
    """Why a part of a file from the agent of rank 0 cannot be written; None if it is."""
    problems: dict[str, OSError] = {}
    message = Message("file", {"path": path, "first": first}, part)
    remote_files.keep_part(message, directory, [0], Writer("files"), problems)  # not started, so it writes at once
    return problems.get(str(directory / str(path)))


@pytest.mark.parametrize(
    "path",
    [
        *("/etc/passwd", "../rank.0/x", "rank.0/../../x", "rank.0/a\0b", "", ".", "a/" * 40 + "b"),  # invalid paths
        *("rank.1/call-result", "rank.01/x", "rank.x/y", "rank.", "rank.0/stdout", "rank.0/stderr"),  # not the host's
        *("rank.0/link/x", "rank.0/deep/link/x", ".job", "enclosed", ".agents", 7, None, ["rank.0", "x"]),
    ],
)
def test_an_agent_writes_files_of_its_own_ranks_alone(tmp_path, path):
    directory, outside = tmp_path / "job", tmp_path / "outside"
    for each in (directory / "rank.0/deep", directory / "rank.1", outside):
        each.mkdir(parents=True, mode=0o700)
    for place in ("rank.0/link", "rank.0/deep/link"):
        (directory / place).symlink_to(outside)
    before = sorted(tmp_path.rglob("*"))
    for first in (True, False):
        problem: object = None
        try:
            problem = problem_of(path, first, b"x", directory)
        except ChannelError as error:
            problem = error
        assert problem is not None
    assert sorted(tmp_path.rglob("*")) == before


def test_an_agents_file_lies_where_it_says_and_only_the_user_reads_it(tmp_path):
    for path in ("rank.0/flight.json", "world.2/rank.5/failure.json", "autotune.jsonl", "rank.0/own/deep.txt"):
        for first, part in ((True, b"one, "), (False, b"two")):
            assert problem_of(path, first, part, tmp_path) is None
        assert (tmp_path / path).read_bytes() == b"one, two"
        assert stat.S_IMODE((tmp_path / path).stat().st_mode) == 0o600
        assert stat.S_IMODE((tmp_path / path).parent.stat().st_mode) == 0o700


def test_no_file_of_an_agent_is_written_through_a_link(tmp_path):
    """The first part of a file replaces a link; a later part is refused."""
    link = tmp_path / "job" / "x"
    link.parent.mkdir(mode=0o700)
    link.symlink_to(tmp_path / "out")
    for first in (False, True):
        problem = problem_of("x", first, b"x", link.parent)
        assert (problem is None) == first
    assert link.read_bytes() == b"x" and not link.is_symlink() and link.stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "out").exists()
