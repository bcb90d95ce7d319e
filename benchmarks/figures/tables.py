"""Recorded tables: those of Markdown pages, and the numbers in their cells."""

from __future__ import annotations

import json
import re
from typing import Any

from benchmarks.common.paths import ROOT

HISTORY = ROOT / "benchmarks" / "history"
RECORDED = HISTORY / "recorded"
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "%": 1e-2, "": 1.0}
NUMBER = re.compile(r"([-+]?[\d.]+)(?: (s|ms|us|%)(?![\w.]))?")


def read_recording(name: str) -> Any:
    """Read a recording in JSON."""
    return json.loads((RECORDED / name).read_text(encoding="utf-8"))


def read_table(page: str, title: str) -> list[dict[str, str]]:
    """Read the rows of the first table below a bold title of a page of benchmarks/history.

    An empty first cell means that of the row above.
    """
    text = (HISTORY / page).read_text(encoding="utf-8")
    _, found, below = text.partition(f"**{title}")
    if not found:
        raise ValueError(f"{page} has no table {title!r}")
    lines = re.search(r"(?:^\|.*\n)+", below, re.MULTILINE)
    if lines is None:
        raise ValueError(f"{page} has no rows below {title!r}")
    names, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines())
    made: list[dict[str, str]] = []
    for cells in rows:
        cells[0] = cells[0] or made[-1][names[0]]
        made.append(dict(zip(names, cells, strict=True)))
    return made


def parse_numbers(cell: str) -> list[float]:
    """Return the numbers of a cell, durations in seconds and percentages as shares.

    >>> parse_numbers("1.5 s [900 ms, 2 s]"), parse_numbers("9.6 %")
    ([1.5, 0.9, 2.0], [0.096])
    """
    return [round(float(number) * UNITS[unit], 12) for number, unit in NUMBER.findall(cell)]


def parse_interval(cell: str) -> tuple[float, float, float]:
    """Return the value and the ends of the interval in a cell like `0.29 [0.227, 0.362]`."""
    value, low, high = parse_numbers(cell)
    return value, low, high
