"""Reading of untrusted files, and of JSON in them or from a peer, with limits.

No function blocks, reads from a device or keeps more data than allowed: a file may be a FIFO, endless, truncated or
malicious. Errors are one line, with the line or byte of the fault. `autotune`, which imports nothing of `engine`, has
the same file; a check compares them.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from typing import Any

MIB = 1 << 20
DEPTH = 32  # largest nesting depth of brackets
ENTRIES = 1 << 20  # largest number of values in one text, counted by its commas
LARGEST = 1e18  # largest absolute value of a number, except for integers, which may have 64 bits
_CHUNK = 1 << 20
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_STRINGS = re.compile(r'"(?:[^"\\]+|\\.)*+"?', re.DOTALL)  # An unterminated string matches to the end: no backtracking.
_TOKENS = re.compile(_STRINGS.pattern + r"|[\[\]{},]", re.DOTALL)
_NO_BRACKETS = re.compile(r"[^\[\]{}]+")
_SURROGATES = re.compile("[\ud800-\udfff]")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})(?:[eE][+-]?[0-9]{1,4})?")


class ReadError(ValueError):
    """A file or a text is damaged, or exceeds a limit. The message is one line with the place and the fault."""


def read_bytes(path: str | os.PathLike[str], limit: int) -> bytes:
    """Read a whole regular file, or the target of a link, up to `limit` bytes.

    A file that is larger, or not regular, is a ReadError; one that cannot be read is an OSError.
    """
    descriptor = _open(path, limit)
    try:
        parts, held = [], 0
        while held <= limit and (part := os.read(descriptor, min(_CHUNK, limit + 1 - held))):
            parts.append(part)
            held += len(part)
    finally:
        os.close(descriptor)
    if held > limit:  # The file has grown, or has no size.
        raise ReadError(f"{_format_path(path)}: has more than the {limit} bytes that are read of such a file")
    return b"".join(parts)


def read_text(path: str | os.PathLike[str], limit: int) -> str:
    """Read a whole file of UTF-8 text. Parameters and errors are those of `read_bytes` and of `decode`."""
    return decode(read_bytes(path, limit), _format_path(path))


def read_lines(path: str | os.PathLike[str], limit: int, longest: int) -> Iterator[tuple[int, bytes | None]]:
    """Read a file lazily; yield the number of each line, from 1, and the line without its end.

    A line of more than `longest` bytes is None. Errors are those of `read_bytes`; also if the file has grown beyond
    `limit`. Data that is written after the file was opened may or may not be read.
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
                raise ReadError(f"{_format_path(path)}: has more than the {limit} bytes that are read of such a file")


def _open(path: str | os.PathLike[str], limit: int) -> int:
    """Open a regular file of at most `limit` bytes, without blocking on a FIFO or device."""
    if "\0" in os.fsdecode(path):
        raise ReadError(f"{_format_path(path)}: a path has no NUL")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = next((name for test, name in _KINDS if test(status.st_mode)), "something else")
            raise ReadError(f"{_format_path(path)}: is {kind}, and no regular file")
        if status.st_size > limit:
            shown = _format_path(path)
            raise ReadError(f"{shown}: has {status.st_size} bytes, and at most {limit} are read of such a file")
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise


def decode(data: bytes, where: str = "") -> str:
    """Decode UTF-8; other data and a NUL are a ReadError, which begins with `where`, a file's or sender's name."""
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
    """Parse JSON with finite numbers up to `LARGEST`, integers up to 64 bits, and nesting up to `DEPTH` levels.

    Text that is not JSON, exceeds a limit, or has more than `entries` values is a ReadError. Its text begins with
    `where`, the name of the file or sender. With `halves`, lone surrogates are kept, by which Python represents
    undecodable bytes in names of files and variables. Otherwise they become `?`, since encoding them would fail.
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
    """Parse JSON whose end may be missing, as far as possible; return its value and a text.

    The value of a truncated text has all values before the last comma. The text is that of the error about it, and
    empty if nothing is missing. If no part can be parsed, it raises the error of `parse_json`.
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
    """Return whether brackets are nested more than `DEPTH` deep; called before recursive parsing."""
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


def _parse_whole(digits: str) -> int:
    if len(digits) > 20 or not -(1 << 63) <= (number := int(digits)) < 1 << 64:
        raise ValueError(f"the whole number {shorten_text(digits, 24)} has more than 64 bits")
    return number


def _parse_number(digits: str) -> float:
    number = float(digits)
    if not abs(number) <= LARGEST:
        raise ValueError(f"the number {shorten_text(digits, 24)} is beyond {LARGEST:g}")
    return number


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=_parse_whole, parse_float=_parse_number)


def get_whole(told: Any, name: str, least: int = 0, most: int = (1 << 63) - 1) -> int:
    """Return a field of an object from `parse_json`, which must be a whole number from `least` to `most`.

    A ReadError says that `told` is not an object, or that the field is missing or of another type or range.
    """
    value = _find_field(told, name)
    if type(value) is not int or not least <= value <= most:
        shown = shorten_text(repr(value))
        raise ReadError(f"{name!r} is {shown}, and a whole number from {least} to {most} is expected")
    return value


def get_number(told: Any, name: str, least: float = -LARGEST, most: float = LARGEST) -> float:
    """Return a field that must be a number, as a float. Raises like `get_whole`."""
    value = _find_field(told, name)
    if type(value) not in (int, float) or not least <= value <= most:
        raise ReadError(f"{name!r} is {shorten_text(repr(value))}, and a number from {least:g} to {most:g} is expected")
    return float(value)


def get_text(told: Any, name: str) -> str:
    """Return a field that must be a string. Raises like `get_whole`."""
    value = _find_field(told, name)
    if type(value) is not str:
        raise ReadError(f"{name!r} is {shorten_text(repr(value))}, and a text is expected")
    return value


def _find_field(told: Any, name: str) -> Any:
    if not isinstance(told, dict):
        raise ReadError(f"an object with {name!r} is expected, and not {shorten_text(repr(told))}")
    if name not in told:
        raise ReadError(f"{name!r} is missing")
    return told[name]


def parse_natural(digits: str, most: int = (1 << 31) - 1) -> int | None:
    """Parse a whole number from 0 on in a text, such as a file's name; None if it is invalid, or more than `most`.

    Unlike `int` it accepts no signs, blanks or digits of other scripts, and no extremely long numbers.
    """
    if not (digits.isascii() and digits.isdigit()) or len(digits.lstrip("0")) > len(str(most)):
        return None
    value = int(digits.lstrip("0") or "0")
    return value if value <= most else None


def parse_decimal(digits: str, most: float = LARGEST) -> float | None:
    """Parse an ordinary decimal number; None if it is invalid, or its absolute value is more than `most`.

    Unlike `float` it accepts neither `1_000`, `nan` and digits of other scripts, nor numbers that become infinite.
    """
    value = float(digits) if _DECIMAL.fullmatch(digits) else most + abs(most)
    return value if abs(value) <= most else None


def shorten_text(text: str, longest: int = 60) -> str:
    """Shorten a text for an error, and replace characters that are not printable by `?`."""
    plain = "".join(each if each.isprintable() else "?" for each in text[: longest + 1])
    return plain if len(plain) <= longest else plain[: longest - 3] + "..."


def _format_path(path: str | os.PathLike[str]) -> str:
    return shorten_text(os.fsdecode(path), 4096)
