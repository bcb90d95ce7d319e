"""Splitting a stream into whole lines, and writing them without waiting for their reader."""

from __future__ import annotations

import os
import random
import threading

import pytest

from engine.launch.process import outgoing as outgoing_module
from engine.launch.process import writer as writer_module
from engine.launch.process.console import Console
from engine.launch.process.outgoing import Outgoing
from engine.launch.process.output import PROGRESS_INTERVAL, Display, Lines
from engine.launch.process.writer import Writer

from ..waiting import until

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
    monkeypatch.setattr(outgoing_module, "MEMORY_BYTES", 100_000)
    reading, writing = pipe
    os.set_blocking(writing, False)
    console = Outgoing(writing)
    parts = [b"%06d" % number + b"x" * 5000 + b"\n" for number in range(500)]
    for part in parts[:300]:
        console.write(part)  # would block for ever if it waited, since nothing reads
    assert console.waiting
    got = os.read(reading, 1 << 16)  # makes some room: the file is read while it grows
    console.write_available()
    for part in parts[300:]:
        console.write(part)
    text = b"".join(parts)
    rest: list[bytes] = []
    reader = threading.Thread(target=lambda: rest.append(read_all(reading, len(text) - len(got))))
    console.write_available()
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
    assert console.flush()


def test_a_closed_stream_is_no_error():
    console = Console(999)
    console.write(b"x\n")
    assert console.flush()
    assert console.broken


@pytest.fixture
def stuck(monkeypatch):
    """Writer with low limits, whose first task blocks until the event is set."""
    for name, value in {"HIGH": 1000, "LOW": 500, "STANDSTILL": 0.3}.items():
        monkeypatch.setattr(writer_module, name, value)
    writer, goes_on = Writer("test"), threading.Event()
    writer.start()
    writer.put(goes_on.wait)
    yield writer, goes_on
    goes_on.set()
    writer.finish()


def test_a_console_that_stands_still_holds_nobody_and_loses_nothing(pipe):
    reading, writing = pipe
    console = Console(writing)
    console.writer.start()
    text = b"".join(b"%06d" % number + b"x" * 5000 + b"\n" for number in range(500))
    for start in range(0, len(text), 5000):
        console.write(text[start : start + 5000])  # would block for ever if it waited: nobody reads
    assert console.lost > 1 << 20
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(read_all(reading, len(text))))
    reader.start()
    assert console.flush()
    reader.join()
    assert got[0] == text and console.lost == 0
    console.close()
    console.write(b"after\n")
    assert os.read(reading, 100) == b"after\n"


def test_streams_that_are_one_file_are_written_in_order(pipe):
    reading, writing = pipe
    again = os.dup(writing)
    out = Console(writing)
    err = Console(again, beside=out)
    assert err.writer is out.writer
    out.writer.start()
    for number in range(500):
        (out, err)[number % 2].write(b"%d\n" % number)
    out.close()
    os.close(again)
    assert os.read(reading, 1 << 16) == b"".join(b"%d\n" % number for number in range(500))


def test_who_writes_is_held_back_before_anything_is_lost(stuck):
    writer, goes_on = stuck
    done: list[int] = []
    for number in range(11):
        assert not writer.is_full()
        assert writer.put(lambda number=number: done.append(number), 100)
    assert writer.is_full(), "1100 bytes wait, and there is room for 1000"
    goes_on.set()
    until(lambda: not writer.is_full(), "there is room again")
    assert writer.flush() and done == list(range(11))


def test_a_disk_that_takes_nothing_for_long_loses_what_does_not_fit_and_says_how_much(stuck, tmp_path):
    writer, goes_on = stuck
    with (tmp_path / "shown").open("wb") as shown:
        display = Display(3, "stdout", tmp_path / "rank.3" / "stdout", Console(shown.fileno()), writer)
        display.write_output(b"a" * 1100)
        assert writer.is_full()
        display.write_output(b"b" * 200)  # exceeds the room, but the writer has been stuck only for a moment
        until(lambda: not writer.is_full(), "ranks are read again: their output is worth less than they are")
        display.write_output(b"c" * 77)
        goes_on.set()
        until(lambda: not writer.is_full() and writer.behind == 0, "the disk takes what waits")
        display.write_output(b"d" * 5)
        display.close()
        assert writer.finish()
    assert (tmp_path / "rank.3" / "stdout").read_bytes() == b"a" * 1100 + b"b" * 200 + b"d" * 5
    assert display.describe_loss() == f"77 bytes of rank 3's stdout were lost: {display.path} did not take them"


def test_what_is_not_written_at_the_end_is_counted(stuck, tmp_path):
    writer, _ = stuck
    with (tmp_path / "shown").open("wb") as shown:
        display = Display(0, "stderr", tmp_path / "rank.0" / "stderr", Console(shown.fileno()), writer)
        display.write_output(b"x" * 123)
        assert not writer.finish(0.2)
        assert display.describe_loss().startswith("123 bytes of rank 0's stderr were lost: ")
        assert not writer.put(lambda: None), "nothing is done any more"


def test_a_file_that_cannot_be_written_says_why(tmp_path):
    with open("/dev/full", "wb", buffering=0) as full, (tmp_path / "shown").open("wb") as shown:
        display = Display(0, "stdout", tmp_path / "rank.0" / "stdout", Console(shown.fileno()), Writer("test"))
        os.dup2(full.fileno(), display._file)
        display.write_output(b"x")
    display.close()
    assert display.describe_loss() == f"{display.path} is not complete: No space left on device"
