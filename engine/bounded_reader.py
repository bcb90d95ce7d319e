"""Read what others wrote, within limits: files of any origin, and JSON in them or from a peer.

Nothing here waits, follows a device or keeps more than it was allowed to: a file may be a FIFO, endless, cut short, or
made to do harm. What is wrong is told in one line, with the line or the byte at which it is. `autotune`, which imports
nothing of `engine`, has the same file; a check compares them.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from typing import Any

MIB = 1 << 20
DEPTH = 32  # most brackets within each other
ENTRIES = 1 << 20  # most values of one text, as its commas tell
LARGEST = 1e18  # no number of a file or a peer is beyond it, but for whole numbers of 64 bits
_CHUNK = 1 << 20
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_STRINGS = re.compile(r'"(?:[^"\\]+|\\.)*+"?', re.DOTALL)  # one that does not end goes to the end: no second try
_TOKENS = re.compile(_STRINGS.pattern + r"|[\[\]{},]", re.DOTALL)
_NO_BRACKETS = re.compile(r"[^\[\]{}]+")
_SURROGATES = re.compile("[\ud800-\udfff]")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})(?:[eE][+-]?[0-9]{1,4})?")


class ReadError(ValueError):
    """A file or a text that is damaged, or beyond a limit: one line that says where, and what is wrong."""


def read_bytes(path: str | os.PathLike[str], limit: int) -> bytes:
    """Read a whole file.

    Parameters
    ----------
    path : path
        Of a regular file, or of a link to one.
    limit : int
        Most bytes that it may have.

    Raises
    ------
    ReadError
        It is no regular file, or larger.
    OSError
        It cannot be read.
    """
    descriptor = _open(path, limit)
    try:
        parts, held = [], 0
        while held <= limit and (part := os.read(descriptor, min(_CHUNK, limit + 1 - held))):
            parts.append(part)
            held += len(part)
    finally:
        os.close(descriptor)
    if held > limit:  # it grows, or tells no size
        raise ReadError(f"{_shown(path)}: has more than the {limit} bytes that are read of such a file")
    return b"".join(parts)


def read_text(path: str | os.PathLike[str], limit: int) -> str:
    """Read a whole file of text in UTF-8. Parameters and errors as of `read_bytes`, and a byte that is no text."""
    return decode(read_bytes(path, limit), _shown(path))


def read_lines(path: str | os.PathLike[str], limit: int, longest: int) -> Iterator[tuple[int, bytes | None]]:
    """Read a file line by line, as lines are asked for.

    Parameters
    ----------
    path, limit
        As of `read_bytes`. What is written after the file was opened may or may not be read.
    longest : int
        Most bytes of a line.

    Yields
    ------
    int, bytes or None
        The number of a line, from 1, and the line without its end; None for a line that is too long.

    Raises
    ------
    ReadError, OSError
        As of `read_bytes`, also for a file that has become larger than `limit`.
    """
    with open(_open(path, limit), "rb") as file:
        number = held = 0
        while line := file.readline(longest + 1):
            number += 1
            held += len(line)
            short = len(line) <= longest or line.endswith(b"\n")
            yield number, line.rstrip(b"\r\n") if short else None
            while not short and (line := file.readline(_CHUNK)):
                held += len(line)
                short = line.endswith(b"\n")
            if held > limit:
                raise ReadError(f"{_shown(path)}: has more than the {limit} bytes that are read of such a file")


def _open(path: str | os.PathLike[str], limit: int) -> int:
    """Open a regular file of at most so many bytes, without waiting for whoever may be at its other end."""
    if "\0" in os.fsdecode(path):
        raise ReadError(f"{_shown(path)}: a path has no NUL")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = next((name for test, name in _KINDS if test(status.st_mode)), "something else")
            raise ReadError(f"{_shown(path)}: is {kind}, and no regular file")
        if status.st_size > limit:
            raise ReadError(f"{_shown(path)}: has {status.st_size} bytes, and at most {limit} are read of such a file")
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise


def decode(data: bytes, where: str = "") -> str:
    """Decode UTF-8.

    Parameters
    ----------
    data : bytes
    where : str
        Name of the file or the sender, with which the error begins.

    Raises
    ------
    ReadError
        It is no UTF-8, or has a NUL.
    """
    begin = f"{where}: " if where else ""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ReadError(f"{begin}is no text in UTF-8 (line {line}, byte {error.start})") from None
    if (at := text.find("\0")) >= 0:
        raise ReadError(f"{begin}is no text: it has a NUL (line {text.count(chr(10), 0, at) + 1})")
    return text


def parse_json(data: bytes | str, where: str = "", *, entries: int = ENTRIES, halves: bool = False) -> Any:
    """Parse JSON. Numbers are finite, and beyond neither `LARGEST` nor 64 bits; brackets lie `DEPTH` deep at most.

    Parameters
    ----------
    data : bytes or str
    where : str
        Name of the file or the sender, with which the error begins.
    entries : int
        Most values.
    halves : bool
        Keep halves of surrogate pairs, by which Python tells bytes that are no text in names of files and variables.
        Else they become `?`: whoever writes them would fail.

    Returns
    -------
    object

    Raises
    ------
    ReadError
        It is no such JSON.
    """
    text = decode(data, where) if isinstance(data, bytes) else data
    begin = f"{where}: " if where else ""
    try:
        if text.count(",") >= entries:
            raise ValueError(f"has more than {entries} values")
        if text.count("[") + text.count("{") > DEPTH and _is_deep(text):
            raise ValueError(f"is nested too deeply, more than {DEPTH} levels")
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise ReadError(f"{begin}no JSON: {error.msg} ({place})") from None
    except ValueError as error:
        raise ReadError(f"{begin}{error}") from None
    return value if halves or "\\u" not in text else _without_halves(value)


def parse_cut_json(data: bytes, where: str = "") -> tuple[Any, str]:
    """Parse JSON of which the end may be missing, as far as it goes.

    Returns
    -------
    object
        Of what is cut short, all values before the last comma.
    str
        What is wrong, as the error would say; empty if the text is whole.

    Raises
    ------
    ReadError
        As of `parse_json`, for a text of which nothing can be read.
    """
    try:
        return parse_json(data, where), ""
    except ReadError as error:
        whole_text = data.decode(errors="replace")
        if whole_text.count(",") >= ENTRIES or _is_deep(whole_text):
            raise
        ends: list[str] = []
        cut, behind = 0, ""
        for token in _TOKENS.finditer(whole_text):
            if token[0] == ",":
                cut, behind = token.start(), "".join(reversed(ends))
            elif token[0] in "[{":
                ends.append("]" if token[0] == "[" else "}")
            elif token[0] in "]}" and ends:
                ends.pop()
        try:
            return parse_json(whole_text[:cut] + behind, where), str(error)
        except ReadError:
            raise error from None


def _is_deep(text: str) -> bool:
    """Whether brackets lie more than `DEPTH` deep within each other, before anything recurses into them."""
    depth = 0
    for bracket in _NO_BRACKETS.sub("", _STRINGS.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > DEPTH:
            return True
    return False


def _without_halves(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATES.sub("?", value)
    if isinstance(value, list):
        return [_without_halves(each) for each in value]
    if isinstance(value, dict):
        return {_without_halves(name): _without_halves(each) for name, each in value.items()}
    return value


def _whole(digits: str) -> int:
    if len(digits) > 20 or not -(1 << 63) <= (number := int(digits)) < 1 << 64:
        raise ValueError(f"the whole number {shorten(digits, 24)} has more than 64 bits")
    return number


def _number(digits: str) -> float:
    number = float(digits)
    if not abs(number) <= LARGEST:
        raise ValueError(f"the number {shorten(digits, 24)} is beyond {LARGEST:g}")
    return number


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=_whole, parse_float=_number)


def whole(told: Any, name: str, least: int = 0, most: int = (1 << 63) - 1) -> int:
    """A field of an object that is a whole number.

    Parameters
    ----------
    told : object
        Part of what `parse_json` has given.
    name : str
        Name of the field.
    least, most : int

    Raises
    ------
    ReadError
        `told` is no object, or the field is missing or something else; so for `number` and `text`.
    """
    value = _field(told, name)
    if type(value) is not int or not least <= value <= most:
        raise ReadError(f"{name!r} is {shorten(repr(value))}, and a whole number from {least} to {most} is expected")
    return value


def number(told: Any, name: str, least: float = -LARGEST, most: float = LARGEST) -> float:
    """A field that is a number."""
    value = _field(told, name)
    if type(value) not in (int, float) or not least <= value <= most:
        raise ReadError(f"{name!r} is {shorten(repr(value))}, and a number from {least:g} to {most:g} is expected")
    return float(value)


def text(told: Any, name: str) -> str:
    """A field that is a text."""
    value = _field(told, name)
    if type(value) is not str:
        raise ReadError(f"{name!r} is {shorten(repr(value))}, and a text is expected")
    return value


def _field(told: Any, name: str) -> Any:
    if not isinstance(told, dict):
        raise ReadError(f"an object with {name!r} is expected, and not {shorten(repr(told))}")
    if name not in told:
        raise ReadError(f"{name!r} is missing")
    return told[name]


def natural(digits: str, most: int = (1 << 31) - 1) -> int | None:
    """Read a whole number from 0 on in a text, such as a file's name; None if it is none, or more than `most`.

    Unlike `int` it takes neither signs, blanks and digits of other scripts, nor numbers that are as long as a file.
    """
    if not (digits.isascii() and digits.isdigit()) or len(digits.lstrip("0")) > len(str(most)):
        return None
    value = int(digits.lstrip("0") or "0")
    return value if value <= most else None


def decimal(digits: str, most: float = LARGEST) -> float | None:
    """Read a number in a text, as people write it; None if it is none, or beyond `most` or its negative.

    Unlike `float` it takes neither `1_000`, `nan` and digits of other scripts, nor what becomes infinite.
    """
    value = float(digits) if _DECIMAL.fullmatch(digits) else most + abs(most)
    return value if abs(value) <= most else None


def shorten(text: str, longest: int = 60) -> str:
    """A text as an error quotes it: without what would control a terminal, and cut."""
    plain = "".join(each if each.isprintable() else "?" for each in text[: longest + 1])
    return plain if len(plain) <= longest else plain[: longest - 3] + "..."


def _shown(path: str | os.PathLike[str]) -> str:
    return shorten(os.fsdecode(path), 4096)
