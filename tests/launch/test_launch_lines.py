"""Cutting a stream into whole lines, and writing them without waiting for their reader."""

from __future__ import annotations

import os
import random
import threading

import pytest

from engine.launch import console as console_module
from engine.launch.console import Console
from engine.launch.output import PROGRESS_INTERVAL, Lines

pytestmark = pytest.mark.quick


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_halves_wait_for_each_other():
    lines = Lines()
    assert lines.feed(b"a") == b""
    assert lines.feed(b"b\nc") == b"ab\n"
    assert lines.feed(b"\n\nd") == b"c\n\n"
    assert lines.flush() == b"d\n"
    assert lines.flush() == b""


@pytest.mark.parametrize("seed", range(5))
def test_any_cut_of_the_stream_gives_the_same_lines(seed):
    chance = random.Random(seed)
    text = bytes(chance.choice(b"ab\n\x00\xff\xe2") for _ in range(5000))
    lines = Lines()
    shown = b""
    rest = text
    while rest:
        size = chance.randint(1, 40)
        shown += lines.feed(rest[:size])
        rest = rest[size:]
    shown += lines.flush()
    assert shown == text + (b"" if text.endswith(b"\n") else b"\n")


def test_dos_line_ends_whatever_the_cut():
    for cut in range(10):
        lines = Lines()
        text = b"one\r\ntwo\r\n"
        assert lines.feed(text[:cut]) + lines.feed(text[cut:]) == b"one\ntwo\n"


def test_a_progress_bar_shows_its_end_and_a_sign_of_life_now_and_then():
    clock = Clock()
    lines = Lines(clock=clock)
    shown = b"".join(lines.feed(b"\r%d%%" % number) for number in range(50))
    assert shown == b"0%\n"
    clock.now += PROGRESS_INTERVAL
    shown = b"".join(lines.feed(b"\r%d%%" % number) for number in range(50, 101))
    assert shown == b"49%\n"
    assert lines.feed(b"\n") == b"100%\n"
    assert lines.feed(b"plain\n") == b"plain\n"


def test_a_bar_that_wipes_itself_leaves_the_text_after_it():
    lines = Lines()
    lines.feed(b"\r50%")
    assert lines.feed(b"\r      \rdone\n").split(b"\n")[-2] == b"done"


def test_a_progress_bar_without_end_takes_no_memory():
    lines = Lines()
    for number in range(100_000):
        lines.feed(b"\r%06d" % number)
    assert len(lines._held) < 20


def test_a_line_without_end_is_shown_in_pieces():
    lines = Lines(limit=1000)
    shown = b"".join(lines.feed(b"x" * 300) for _ in range(10)) + lines.flush()
    assert shown.replace(b"\n", b"") == b"x" * 3000
    assert max(map(len, shown.split(b"\n"))) <= 1300


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    yield reading, writing
    for descriptor in (reading, writing):
        try:
            os.close(descriptor)
        except OSError:
            continue


def read_all(descriptor: int, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := os.read(descriptor, 1 << 20)):
        data += part
    return data


def test_nothing_is_lost_when_the_reader_is_slow(pipe, monkeypatch):
    monkeypatch.setattr(console_module, "MEMORY_BYTES", 100_000)
    reading, writing = pipe
    console = Console(writing)
    parts = [b"%06d" % number + b"x" * 5000 + b"\n" for number in range(500)]
    for part in parts[:300]:
        console.write(part)  # would block for ever if it waited: nobody reads
    assert console.waiting
    got = os.read(reading, 1 << 16)  # some room: the file is read while it grows
    console.pump()
    for part in parts[300:]:
        console.write(part)
    text = b"".join(parts)
    rest: list[bytes] = []
    reader = threading.Thread(target=lambda: rest.append(read_all(reading, len(text) - len(got))))
    console.pump()
    reader.start()
    console.drain()
    reader.join()
    assert got + rest[0] == text
    assert not console.waiting
    console.write(b"after\n")
    assert os.read(reading, 100) == b"after\n"


def test_a_reader_that_went_away_is_no_error(pipe):
    reading, writing = pipe
    console = Console(writing)
    os.close(reading)
    console.write(b"x\n")
    assert console.broken
    console.write(b"y\n")
    console.drain()


def test_a_closed_stream_is_no_error():
    console = Console(999)
    console.write(b"x\n")
    console.drain()
    assert console.broken


def test_a_regular_file_takes_everything_at_once(tmp_path):
    with (tmp_path / "log").open("wb") as file:
        console = Console(file.fileno())
        console.write(b"x" * 10_000_000)
        assert not console.waiting
    assert (tmp_path / "log").stat().st_size == 10_000_000
