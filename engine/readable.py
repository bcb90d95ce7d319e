"""Rank lists, sizes, durations and shares as people read them, and texts of others that reach a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TextIO

LONGEST_TEXT = 1000  # characters of an exception's text that are passed on
UNITS = (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10))


def ranks(numbers: Iterable[int], most: int | None = None) -> str:
    """Ranks in any order as `rank 3`, `ranks 0, 1` or `ranks 0-2, 5`.

    Parameters
    ----------
    numbers : iterable of int
    most : int, optional
        Parts that are shown: of more, the last one and the first ones.

    Returns
    -------
    str
    """
    listed = list(numbers)
    parts: list[str] = []
    for low, high in runs(listed):
        parts += [f"{low}-{high}"] if high > low + 1 else map(str, range(low, high + 1))
    if most is not None and len(parts) > most:
        parts[most - 1 : -1] = [".."]
    return f"rank{'s' * (len(listed) > 1)} {', '.join(parts)}"


def exception(error: BaseException) -> str:
    """An exception in one line, such as `ValueError: bad batch`, also where the exception cannot give its text."""
    text = exception_text(error).strip().splitlines()
    return type(error).__name__ + (f": {text[0][:LONGEST_TEXT]}" if text else "")


def whole_exception(error: BaseException) -> str:
    """An exception with all lines of its text, such as `ValueError: bad batch`, as `exception` gives the first."""
    return f"{type(error).__name__}: {exception_text(error)}"


def exception_text(error: BaseException) -> str:
    """The text of an exception, or why there is none: `__str__` is the program's code, and may raise itself."""
    try:
        return str(error)
    except Exception as another:
        return f"(its text cannot be made: {type(another).__name__})"


def quoted(value: object, longest: int = 100) -> str:
    """A value as Python writes it, for an error: in one line, shortened, also where the value cannot be written."""
    try:
        text = repr(value)
    except Exception as error:  # `__repr__` is the program's code; and an int may have too many digits
        return f"a value that cannot be shown ({type(error).__name__})"
    return text if len(text) <= longest else f"{text[: longest - 2]}..{text[-1]}"


def cpus(numbers: Iterable[int]) -> str:
    """CPUs in any order as the kernel and taskset(1) write them: `0-3,8`."""
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs(numbers))


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Numbers as runs without a gap, the first and the last of each."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found


def size(nbytes: float) -> str:
    """Bytes as `1.5 MiB`."""
    for unit, factor in UNITS:
        if nbytes >= factor:
            return f"{nbytes / factor:.4g} {unit}iB"
    return f"{nbytes:.0f} B"


def speed(nbytes: float) -> str:
    """Bytes a second as `1.23 GB/s`, in powers of ten."""
    return f"{nbytes / 1e9:.2f} GB/s" if nbytes >= 1e9 else f"{nbytes / 1e6:.3g} MB/s"


def clock(seconds: float) -> str:
    """A duration as `0:03:12`, or `2 d 0:03:12`."""
    whole = max(0, int(seconds))
    days, whole = divmod(whole, 86400)
    return (f"{days} d " if days else "") + f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def short(seconds: float) -> str:
    """A duration in the unit that suits it, with three digits: `32 ns`, `812 us`, `81.2 ms`, `1.25 s`."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6), ("ns", 1e9)):
        value = seconds * factor
        if abs(value) >= 1 or unit == "ns":
            break
    return f"{value:.0f} {unit}" if abs(value) >= 100 or not value else f"{value:.3g} {unit}"


def share(part: float) -> str:
    """A share of 1 as per cent."""
    return f"{100 * part:.1f} %"


def exact(nbytes: int) -> str:
    """Bytes as an option takes them: `64M` where that is no other number."""
    for unit, factor in UNITS:
        if nbytes and nbytes % factor == 0:
            return f"{nbytes // factor}{unit}"
    return str(nbytes)


def plain(text: str) -> str:
    """Return a stranger's text as a terminal shows it without being controlled by it: with `?` for what is not printed.

    Control characters, line breaks and marks that turn the direction of writing are replaced; letters of any script
    are not.
    """
    return "".join(each if each.isprintable() else "?" for each in text)


def plain_line(text: str) -> str:
    """Return a line as `plain` does, but with spaces for tabs, and bytes that are no text as `\\udcff`."""
    return plain(text.encode(errors="backslashreplace").decode().replace("\t", " "))


def plain_lines(text: str) -> str:
    """Return a text of several lines as `plain_line` does each."""
    return "\n".join(map(plain_line, text.split("\n")))


def show(text: object, file: TextIO | None = None) -> None:
    """Print lines that may quote files, peers or ranks: nothing of them controls a terminal."""
    print(plain_lines(str(text)), file=sys.stdout if file is None else file, flush=True)


def count(number: int, noun: str) -> str:
    """A number of things: `1 rank`, `4 ranks`."""
    return f"{number} {noun}{'s' * (number != 1)}"
