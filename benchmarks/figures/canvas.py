"""A small SVG image, drawn part by part in pixels from the upper left corner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise

from benchmarks.figures.style import CARD, INK
from engine.foresee.picture import make_style_sheet

Point = tuple[float, float]
SMALL = 12.5  # pixels of a small letter


class Canvas:
    """Parts of an image of a fixed width, whose colours are those of light pages; dark pages exchange them."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._parts: list[str] = []

    def write(self, x: float, y: float, text: str, size: float = SMALL, anchor: str = "", weight: str = "") -> None:
        """Write a text whose baseline is at `y`."""
        given = [f'x="{_format_pixels(x)}" y="{_format_pixels(y)}"']
        given += [f'font-size="{size:g}"'] if size != SMALL else []
        given += [f'text-anchor="{anchor}"'] if anchor else []
        given += [f'font-weight="{weight}"'] if weight else []
        self._parts.append(f"<text {' '.join(given)}>{escape(text)}</text>")

    def fill_rectangle(self, x: float, y: float, width: float, height: float, color: str, opacity: float = 1.0) -> None:
        """Fill a rectangle."""
        place = " ".join(
            f'{name}="{_format_pixels(value)}"'
            for name, value in zip(("x", "y", "width", "height"), (x, y, width, height), strict=True)
        )
        self._parts.append(f'<rect {place} fill="{color}"{_format_opacity(opacity)}/>')

    def fill_area(self, points: Sequence[Point], color: str, opacity: float = 1.0) -> None:
        """Fill a polygon."""
        self._parts.append(f'<path d="{_join(points)}z" fill="{color}"{_format_opacity(opacity)}/>')

    def stroke_lines(
        self,
        lines: Iterable[Sequence[Point]],
        color: str,
        width: float = 1.8,
        opacity: float = 1.0,
        dashed: bool = False,
    ) -> None:
        """Draw lines of one look, each through its points."""
        if path := "".join(_join(points) for points in lines):
            dashes = ' stroke-dasharray="4 2"' if dashed else ""
            look = f'fill="none" stroke="{color}" stroke-width="{width:g}"{dashes}{_format_opacity(opacity)}'
            self._parts.append(f'<path d="{path}" {look}/>')

    def finish(self, height: float) -> str:
        """Return the image."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{height:.0f}" '
            f'font-family="sans-serif" font-size="{SMALL}" fill="{INK}">{make_style_sheet()}'
        )
        return "\n".join((head, f'<rect width="100%" height="100%" fill="{CARD}"/>', *self._parts, "</svg>")) + "\n"


def estimate_width(text: str, size: float = SMALL) -> float:
    """Return about how many pixels a text takes in a reader's font."""
    return 0.6 * size * len(text)


def _join(points: Sequence[Point]) -> str:
    """Return the commands of a path through points: the first place, and the steps from one to the next."""
    tenths = [(round(10 * x), round(10 * y)) for x, y in points]
    steps = (f"{_format_pixels((x - a) / 10)} {_format_pixels((y - b) / 10)}" for (a, b), (x, y) in pairwise(tenths))
    return f"M{_format_pixels(points[0][0])} {_format_pixels(points[0][1])}l{' '.join(steps)}"


def _format_opacity(value: float) -> str:
    return f' opacity="{value:g}"' if value < 1 else ""


def _format_pixels(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
