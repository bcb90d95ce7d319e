"""SVG image of a prediction: a bar for each number of hosts, with the recorded step and what the network adds."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from textwrap import wrap
from typing import Protocol

LEFT, WIDTH, RIGHT, BAR, GAP, TOP = 88, 222, 170, 24, 12, 76  # pixels
COLOURS = {
    "#1f2328": "#e6edf3",
    "#d0d7de": "#484f58",
    "#fefefe": "#161b22",
    "#0969da": "#58a6ff",
    "#c4540a": "#f0883e",
    "#1a7f37": "#56d364",
    "#8250df": "#bc8cff",
}
"""Colours on light pages, with those on dark ones: text, lines, background, then those of series."""
INK, _LINES, CARD, RECORDED, ADDED, *_OTHERS = COLOURS


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


def make_style_sheet() -> str:
    """Return an SVG element that exchanges the colours of a picture where the page is dark."""
    rules = (
        f'[{name}="{light}"],[style*="{name}: {light}"]{{{name}:{dark}!important}}'
        for light, dark in COLOURS.items()
        for name in ("fill", "stroke")
    )
    return f"<style>@media (prefers-color-scheme: dark) {{{''.join(rules)}}}</style>"


def draw_picture(title: str, rows: Sequence[Length], network: str) -> str:
    """Return an SVG image of at least one row; `network` is the line below the title."""
    longest = max(row.step for row in rows)
    height = TOP + len(rows) * (BAR + GAP) + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + RIGHT}" height="{height}" '
        f'font-family="sans-serif" font-size="15" fill="{INK}">{make_style_sheet()}',
        f'<rect width="100%" height="100%" fill="{CARD}"/><text x="12" y="22" font-size="17">{escape(title)}</text>',
        *(f'<text x="12" y="{44 + 18 * k}">{escape(line)}</text>' for k, line in enumerate(wrap(network, 52)[:2])),
    ]
    for number, row in enumerate(rows):
        y = TOP + number * (BAR + GAP)
        recorded = WIDTH * (row.step - row.added) / longest
        whole = WIDTH * row.step / longest
        hosts = f"{row.hosts} host{'s' * (row.hosts > 1)}"
        lines += [
            f'<text x="{LEFT - 10}" y="{y + 17}" text-anchor="end">{hosts}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{recorded:.1f}" height="{BAR}" fill="{RECORDED}"/>',
            f'<rect x="{LEFT + recorded:.1f}" y="{y}" width="{whole - recorded:.1f}" height="{BAR}" fill="{ADDED}"/>',
            f'<text x="{LEFT + whole + 8:.1f}" y="{y + 17}">{1e3 * row.step:.2f} ms, '
            f"{100 * row.efficiency:.1f} %</text>",
        ]
    y = height - 14
    for x, color, what in ((LEFT, RECORDED, "the recorded step"), (LEFT + 170, ADDED, "what the network adds")):
        lines.append(f'<rect x="{x}" y="{y - 10}" width="10" height="10" fill="{color}"/>')
        lines.append(f'<text x="{x + 16}" y="{y}">{what}</text>')
    return "\n".join([*lines, "</svg>", ""])
