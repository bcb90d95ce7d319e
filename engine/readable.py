"""Figures as people read them."""

from __future__ import annotations

from collections.abc import Iterable

UNITS = (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10))


def format_set(numbers: tuple[int, ...] | list[int]) -> str:
    """Write numbers as ranges.

    Parameters
    ----------
    numbers : sequence of int
        CPUs or ranks, in any order.

    Returns
    -------
    str
        For example `0-3,8`.
    """
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def ranks(numbers: Iterable[int]) -> str:
    """Ranks in any order as `rank 3`, or `ranks 0-2,5`."""
    listed = list(numbers)
    return f"rank{'s' * (len(listed) > 1)} {format_set(listed)}"


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
    """A duration in the unit that suits it, with three digits: `812 us`, `81.2 ms`, `1.25 s`."""
    if seconds >= 1:
        return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"


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
    """Text that a terminal shows as it is."""
    return "".join(each if each.isascii() and each.isprintable() else "?" for each in text)


def count(number: int, noun: str) -> str:
    """A number of things: `1 rank`, `4 ranks`."""
    return f"{number} {noun}{'s' * (number != 1)}"
