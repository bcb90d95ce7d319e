"""SVG image of a prediction: a bar for each number of hosts, with the recorded step and what the network adds."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Protocol

LEFT, WIDTH, RIGHT, BAR, GAP, TOP = 90, 480, 190, 22, 12, 64  # pixels
RECORDED, ADDED = "#4c78a8", "#f58518"


class Length(Protocol):
    """Values that are drawn for a row: its hosts, seconds, the seconds that the network adds, and the efficiency."""

    @property
    def hosts(self) -> int: ...
    @property
    def step(self) -> float: ...
    @property
    def added(self) -> float: ...
    @property
    def efficiency(self) -> float: ...


def draw_picture(title: str, rows: Sequence[Length], network: str) -> str:
    """Draw an SVG image.

    Parameters
    ----------
    title : str
    rows : sequence of Length
        Rows, at least one.
    network : str
        Line below the title.

    Returns
    -------
    str
    """
    longest = max(row.step for row in rows)
    height = TOP + len(rows) * (BAR + GAP) + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + RIGHT}" height="{height}" '
        'font-family="sans-serif" font-size="13" fill="#333">',
        f'<rect width="100%" height="100%" fill="#fff"/><text x="12" y="22" font-size="15">{escape(title)}</text>',
        f'<text x="12" y="44">{escape(network)}</text>',
    ]
    for number, row in enumerate(rows):
        y = TOP + number * (BAR + GAP)
        recorded = WIDTH * (row.step - row.added) / longest
        whole = WIDTH * row.step / longest
        hosts = f"{row.hosts} host{'s' * (row.hosts > 1)}"
        lines += [
            f'<text x="{LEFT - 10}" y="{y + 16}" text-anchor="end">{hosts}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{recorded:.1f}" height="{BAR}" fill="{RECORDED}"/>',
            f'<rect x="{LEFT + recorded:.1f}" y="{y}" width="{whole - recorded:.1f}" height="{BAR}" fill="{ADDED}"/>',
            f'<text x="{LEFT + whole + 8:.1f}" y="{y + 16}">{1e3 * row.step:.2f} ms, '
            f"{100 * row.efficiency:.1f} %</text>",
        ]
    y = height - 14
    for x, color, what in ((LEFT, RECORDED, "the recorded step"), (LEFT + 160, ADDED, "what the network adds")):
        lines.append(f'<rect x="{x}" y="{y - 10}" width="10" height="10" fill="{color}"/>')
        lines.append(f'<text x="{x + 16}" y="{y}">{what}</text>')
    return "\n".join([*lines, "</svg>", ""])
