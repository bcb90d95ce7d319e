"""Formatting of rank lists, sizes, durations and shares for people, and of foreign texts for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TextIO

UNITS = (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10))


def format_ranks(numbers: Iterable[int], most: int | None = None) -> str:
    """Format ranks in any order as `rank 3`, `ranks 0, 1` or `ranks 0-2, 5`.

    Beyond `most` parts, only the first ones and the last one are shown.
    """
    listed = list(numbers)
    parts: list[str] = []
    for low, high in find_runs(listed):
        parts += [f"{low}-{high}"] if high > low + 1 else map(str, range(low, high + 1))
    if most is not None and len(parts) > most:
        parts[most - 1 : -1] = [".."]
    return f"rank{'s' * (len(listed) > 1)} {', '.join(parts)}"


def format_members(numbers: Iterable[int], group: str = "") -> str:
    """Format the ranks of a process set as `among ranks 0, 2`, or as `in the group 'tp' of ranks 0, 2`."""
    ranks = format_ranks(numbers)
    return f"in the group {group!r} of {ranks}" if group else f"among {ranks}"


def quote_value(value: object, longest: int = 100) -> str:
    """Return the shortened `repr` of a value for an error, or a note if `__repr__` raises."""
    try:
        text = repr(value)
    except Exception as error:  # `__repr__` is the program's code; and an int may have too many digits
        return f"a value that cannot be shown ({type(error).__name__})"
    return text if len(text) <= longest else f"{text[: longest - 2]}..{text[-1]}"


def format_cpus(numbers: Iterable[int]) -> str:
    """Format CPUs in any order like the kernel and taskset(1): `0-3,8`."""
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in find_runs(numbers))


def find_runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Divide numbers into runs without a gap; return the first and the last number of each."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found


def format_size(nbytes: float) -> str:
    """Format a number of bytes, such as `1.5 MiB`."""
    for unit, factor in UNITS:
        if nbytes >= factor:
            return f"{nbytes / factor:.4g} {unit}iB"
    return f"{nbytes:.0f} B"


def format_speed(nbytes: float) -> str:
    """Format bytes per second, such as `1.23 GB/s`, in powers of ten."""
    return f"{nbytes / 1e9:.2f} GB/s" if nbytes >= 1e9 else f"{nbytes / 1e6:.3g} MB/s"


def format_clock(seconds: float) -> str:
    """Format a duration, such as `0:03:12` or `2 d 0:03:12`."""
    whole = max(0, int(seconds))
    days, whole = divmod(whole, 86400)
    return (f"{days} d " if days else "") + f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def format_seconds(seconds: float) -> str:
    """Format a duration with three digits in a suitable unit: `32 ns`, `812 us`, `81.2 ms`, `1.25 s`."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6), ("ns", 1e9)):
        value = seconds * factor
        if abs(value) >= 1 or unit == "ns":
            break
    return f"{value:.0f} {unit}" if abs(value) >= 100 or not value else f"{value:.3g} {unit}"


def format_share(part: float) -> str:
    """Format a share of 1 in per cent."""
    return f"{100 * part:.1f} %"


def format_exact_size(nbytes: int) -> str:
    """Format a number of bytes for an option: `64M` if that is exact, else all digits."""
    for unit, factor in UNITS:
        if nbytes and nbytes % factor == 0:
            return f"{nbytes // factor}{unit}"
    return str(nbytes)


def replace_unprintable(text: str) -> str:
    """Replace characters that are not printable by `?`, so that a foreign text cannot control a terminal.

    Control characters, line breaks and marks of the writing direction are replaced; letters of any script are not.
    """
    return "".join(each if each.isprintable() else "?" for each in text)


def plain_line(text: str) -> str:
    """Make a line safe like `replace_unprintable`, but with spaces for tabs, and undecodable bytes as `\\udcff`."""
    return replace_unprintable(text.encode(errors="backslashreplace").decode().replace("\t", " "))


def plain_lines(text: str) -> str:
    """Apply `plain_line` to each line of a text."""
    return "\n".join(map(plain_line, text.split("\n")))


def print_plain(text: object, file: TextIO | None = None) -> None:
    """Print lines that may quote files, peers or ranks, without characters that control a terminal."""
    print(plain_lines(str(text)), file=sys.stdout if file is None else file, flush=True)


def format_count(number: int, noun: str) -> str:
    """Format a number of items: `1 rank`, `4 ranks`."""
    return f"{number} {noun}{'s' * (number != 1)}"
