"""Foreign files and texts are read within limits, and a fault in one is reported in a line."""

from __future__ import annotations

import contextlib
import json
import os
import random

import pytest

from engine.text.bounded_reader import (
    DEPTH,
    ReadError,
    get_number,
    get_text,
    get_whole,
    parse_json,
    read_bytes,
    read_lines,
    read_text,
)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"[" * 100_000, "is nested too deeply, more than 32 levels"),
        (b"[" * (DEPTH + 1) + b"]" * (DEPTH + 1), "is nested too deeply"),
        (b'{"a":' * 4_000_000, "is nested too deeply"),
        (b'["' + b'\\"' * 4_000_000, "no JSON: Unterminated string"),
        (b"[" + b"1," * (1 << 20) + b"1]", "has more than 1048576 values"),
        (b"9" * 5000, "the whole number 999.* has more than 64 bits"),
        (b"18446744073709551616", "the whole number 18446744073709551616 has more than 64 bits"),
        (b"[1e400]", r"the number 1e400 is beyond 1e\+18"),
        (b"[-1e19]", "the number -1e19 is beyond"),
        (b"[NaN]", "NaN is no number of JSON"),
        (b'{"a": 1,\n "b', r"no JSON: Unterminated string starting at \(line 2, column 2\)"),
        (b'{"a": "\xff"}', r"is no text in UTF-8 \(line 1, byte 7\)"),
        (b'{"a":\n\0}', r"is no text: it has a NUL \(line 2\)"),
        (b"", "no JSON: Expecting value"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_json_beyond_a_limit_is_refused_in_one_line(content, error):
    with pytest.raises(ReadError, match=f"^f.json: {error}") as caught:
        parse_json(content, "f.json")
    assert len(str(caught.value)) < 200 and str(caught.value).isprintable()


def test_json_within_the_limits_is_read_as_json_does():
    dice = random.Random(1)

    def draw(depth: int) -> object:
        kind = dice.randrange(7 if depth else 5)
        simple = (dice.randrange(-(1 << 63), 1 << 64), dice.uniform(-1e18, 1e18), '[{\\"é\n' * dice.randrange(3), None)
        if kind < 4:
            return simple[kind]
        if kind == 4:
            return dice.random() < 0.5
        some = [draw(depth - 1) for _ in range(dice.randrange(4))]
        return some if kind == 5 else {f"{key}]": each for key, each in enumerate(some)}

    for _ in range(300):
        value = draw(DEPTH - 1)
        assert parse_json(json.dumps(value)) == value
        assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value


def test_half_a_surrogate_pair_is_kept_only_for_names():
    assert parse_json(r'{"\ud800": ["a\udfff", "\ud83d\ude00", "\\ud800"]}') == {"?": ["a?", "\U0001f600", r"\ud800"]}
    assert parse_json(r'"\udc80"', halves=True) == "\udc80"


@pytest.mark.parametrize("reader", [lambda path: read_bytes(path, 100), lambda path: list(read_lines(path, 100, 10))])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path, reader):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    for path, kind in ((tmp_path / "fifo", "a FIFO"), (tmp_path / "link", "a FIFO"), (tmp_path, "a directory")):
        with pytest.raises(ReadError, match=f"^{path}: is {kind}, and no regular file$"):
            reader(path)
    with pytest.raises(ReadError, match="is a device, and no regular file"):
        reader("/dev/zero")
    (tmp_path / "round").symlink_to("round")
    for path in (tmp_path / "round", tmp_path / "nothing"):
        with pytest.raises(OSError, match=str(path)):
            reader(path)
    with pytest.raises(ReadError, match="a path has no NUL"):
        reader("a\0b")


def test_a_file_that_is_too_large_or_grows_is_refused(tmp_path):
    path = tmp_path / "large"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(ReadError, match=f"large: has {1 << 40} bytes, and at most 100 are read of such a file"):
        read_bytes(path, 100)
    with pytest.raises(ReadError, match="/proc/self/status: has more than the 100 bytes"):  # its reported size is 0
        read_bytes("/proc/self/status", 100)
    path.write_bytes(b"a\n" * 50)
    assert len(read_bytes(path, 100)) == 100
    lines = read_lines(path, 100, 10)
    next(lines)
    path.write_bytes(b"a\n" * 50_000)
    with pytest.raises(ReadError, match="has more than the 100 bytes"):
        list(lines)


def test_a_line_that_is_too_long_is_told_and_passed_over(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"one\r\n" + b"x" * 5000 + b"\n0123456789\n" + b"y" * 11)
    assert list(read_lines(path, 10_000, 10)) == [(1, b"one"), (2, None), (3, b"0123456789"), (4, None)]


def test_a_path_with_bytes_that_are_no_text_is_named(tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\x1b")
    with pytest.raises(FileNotFoundError):
        read_bytes(path, 1)
    with open(path, "wb") as file:
        file.write(b"\xff")
    with pytest.raises(ReadError, match=r"\?\?: is no text in UTF-8"):
        read_text(path, 1)


@pytest.mark.parametrize(
    ("read", "told", "error"),
    [
        (get_whole, {"n": True}, "'n' is True, and a whole number from 0 to"),
        (get_whole, {"n": 1.0}, "'n' is 1.0, and a whole number"),
        (get_whole, {"n": -1}, "'n' is -1, and a whole number"),
        (get_number, {"n": "x" * 1000}, "'n' is 'xxx.*[.]{3}, and a number from -1e[+]18 to 1e[+]18 is expected"),
        (get_number, {"n": False}, "'n' is False, and a number"),
        (get_text, {"n": ["\x1b"]}, "'n' is .*, and a text is expected"),
        (get_text, [], "an object with 'n' is expected"),
        (get_text, {}, "'n' is missing"),
    ],
)
def test_a_field_of_another_kind_is_named(read, told, error):
    with pytest.raises(ReadError, match=f"^{error}"):
        read(told, "n")


def test_no_descriptor_is_left_open(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"1\n" * 10)
    before = len(os.listdir("/proc/self/fd"))
    for limit in (5, 20):
        with contextlib.suppress(ReadError):
            read_bytes(path, limit)
        with contextlib.suppress(ReadError):
            list(read_lines(path, limit, 1))
        with contextlib.suppress(ReadError):
            read_bytes(tmp_path, limit)
    assert len(os.listdir("/proc/self/fd")) == before
