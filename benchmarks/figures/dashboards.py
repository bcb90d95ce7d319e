"""Pictures of the dashboards, from the recorded answers of a Prometheus to every query of every panel."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from typing import Any

from benchmarks.common.tables import format_digits, format_duration, format_size
from benchmarks.figures.canvas import SMALL, Canvas, Point, estimate_width
from benchmarks.figures.style import FIRST, FOURTH, GRID, INK, SECOND, SERIES, THIRD
from benchmarks.figures.tables import read_recording

Panel = dict[str, Any]
Values = list[float | None]

# Pixels of the picture: its width, its margin, and the space between panels.
WIDTH, MARGIN, GAP = 480, 10, 14
# Pixels of a panel: its title, a line of small text, the axes of lines, a row of states or of a heat map, a number.
TITLE, LINE, PLOT, STRIPE, NUMBER = 21, 17, 92, 15, 42
HEADING = 34  # pixels of a heading of panels
HEAD = 11.5  # pixels of a letter in a table's head
LEFT, BELOW = 62, 22  # pixels of the labels beside and below axes
LETTERS = "ABCDEFGH"
COLORS = {
    "green": THIRD,
    "blue": FIRST,
    "orange": SECOND,
    "red": SECOND,
    "purple": FOURTH,
    "text": GRID,
    "yellow": INK,
}
"""Colours of the pages for those that Grafana's dashboards name."""
LEFT_OUT = ("local rank", "process", "transport", "version")
"""Columns of tables for which a picture is too narrow."""
SHADES = 6  # of a heat map


def write_dashboard(name: str, path: Path, recording: str = "dashboards.json") -> None:
    """Write the picture of every panel of a dashboard with the recorded answers to its queries."""
    path.write_text(Picture(read_recording(recording), name).draw_svg(), encoding="utf-8")


def format_value(value: float, unit: str) -> str:
    """Format a value of a panel by Grafana's name of its unit."""
    if unit == "s":
        return format_duration(value) if value else "0 s"
    if unit in ("bytes", "Bps"):
        return format_size(round(value)) + ("/s" if unit == "Bps" else "")
    if unit == "percentunit":
        return f"{100 * value:.2g} %" if abs(value) < 0.095 else f"{100 * value:.0f} %"
    if unit == "bool_yes_no":
        return "yes" if value else "no"
    return (f"{value:.0f}" if value == round(value) else format_digits(value)) + ("/s" if unit == "ops" else "")


class Picture:
    """Picture of one dashboard: its panels from above to below, wide ones alone, others two or three in a line."""

    def __init__(self, content: dict[str, Any], name: str) -> None:
        self.content = content
        self.board = content["boards"][name]
        self.seconds, self.step = content["seconds"], content["step"]
        self.faults = content.get("faults", [])
        self.rank_colors = {str(fault["rank"]): SERIES[(k + 1) % 4] for k, fault in enumerate(self.faults)}
        self.canvas = Canvas(WIDTH)

    def draw_svg(self) -> str:
        """Return the picture as SVG."""
        top = MARGIN + 16.0
        self.canvas.write(MARGIN, top, self.board["title"], size=18)
        for text in self._list_head_lines():
            top += LINE
            self.canvas.write(MARGIN, top, text)
        top += 8
        for row, panels in self._group_panels():
            empty = not any(panel.get("series") or panel.get("rows") for panel in panels)
            text = f"{row}: {len(panels)} panels without data in this job" if empty else row
            self.canvas.write(MARGIN, top + 24, text, size=16, weight="bold")
            top += HEADING
            for line in () if empty else self._pack_lines(panels):
                top = self._draw_line(line, top)
        return self.canvas.finish(top + MARGIN)

    def _list_head_lines(self) -> Iterator[str]:
        """Yield the lines below the title: what run it was, and what was done to it."""
        texts = list(self.content["about"])
        for letter, fault in zip(LETTERS, self.faults, strict=False):
            texts.append(f"{letter}: {fault['text']}")
        if self.board["marks"].get("Changes of the knobs"):
            texts.append("Ticks at the bottom: the tuner has changed the knobs")
        if "moment" in self.content:
            texts.append(f"Numbers and tables are of minute {self.content['moment'] / 60:.1f}; axes show minutes")
        texts.append("Where a few values are far above the others, \N{BLACK UP-POINTING TRIANGLE} names the highest")
        for text in texts:
            yield from wrap(text, 66, subsequent_indent="\N{NO-BREAK SPACE}" * 4)

    def _group_panels(self) -> Iterator[tuple[str, list[Panel]]]:
        """Yield each heading with its panels."""
        for row in dict.fromkeys(panel["row"] for panel in self.board["panels"]):
            yield row, [panel for panel in self.board["panels"] if panel["row"] == row]

    def _pack_lines(self, panels: list[Panel]) -> Iterator[list[Panel]]:
        """Yield the panels that stand side by side."""
        line: list[Panel] = []
        for panel in panels:
            if line and (len(line) == count_in_line(line[0]) or count_in_line(line[0]) != count_in_line(panel)):
                yield line
                line = []
            line.append(panel)
        yield line

    def _draw_line(self, line: list[Panel], top: float) -> float:
        """Draw panels side by side, and return where the next line begins."""
        stats = line[0]["kind"] == "stat"
        places = count_in_line(line[0]) if stats else len(line)
        each = (WIDTH - 2 * MARGIN - GAP * (places - 1)) / places
        parts = [PanelPicture(self, panel, MARGIN + k * (each + GAP), top, each) for k, panel in enumerate(line)]
        return max(part.draw_panel() for part in parts) + GAP


def count_in_line(panel: Panel) -> int:
    """Return how many panels of this kind stand side by side."""
    if panel["kind"] == "stat":
        return 3 if len(panel["series"]) < 3 else 1
    return 1 if panel["kind"] == "table" or panel["width"] >= 12 else 2


class PanelPicture:
    """One panel of a picture, at its place."""

    def __init__(self, picture: Picture, panel: Panel, left: float, top: float, width: float) -> None:
        self.picture, self.panel, self.canvas = picture, panel, picture.canvas
        self.left, self.top, self.width = left, top, width
        self.plot_left, self.plot_width = left + LEFT, width - LEFT - 6

    def draw_panel(self) -> float:
        """Draw the panel, and return where it ends."""
        top = self.top
        for text in wrap(self.panel["title"], int(self.width / 8.2)):
            self.canvas.write(self.left, top + 14, text, size=14)
            top += TITLE - 3
        top += 3
        kind = self.panel["kind"]
        if not (self.panel.get("series") or self.panel.get("rows")):
            self.canvas.write(self.left, top + 14, "no data")
            return top + TITLE
        if kind == "stat":
            return self._write_numbers(top)
        if kind == "table":
            return self._write_table(top)
        if kind == "heatmap":
            return self._draw_heatmap(top)
        if kind == "state-timeline":
            return self._draw_states(top)
        return self._draw_lines(top)

    # ---- axes

    def _place_time(self, seconds: float) -> float:
        """Return where a time is."""
        return self.plot_left + self.plot_width * seconds / self.picture.seconds

    def _shade_faults(self, top: float, height: float) -> None:
        """Shade the times of faults."""
        for fault in self.picture.faults:
            begin, end = map(self._place_time, fault["times"])
            self.canvas.fill_rectangle(begin, top, max(2, end - begin), height, GRID, 0.5)

    def _mark_times(self, top: float, height: float) -> float:
        """Write the letters of faults and the minutes, and return where the axes end."""
        for letter, fault in zip(LETTERS, self.picture.faults, strict=False):
            self.canvas.write(self._place_time(sum(fault["times"]) / 2), top - 2, letter, size=11, anchor="middle")
        minutes = self.picture.seconds / 60
        every = next(each for each in (1, 2, 5, 10, 30, 60, 1e9) if minutes / each < self.plot_width / 38)
        for k in range(int(minutes / every) + 1):
            self.canvas.write(self._place_time(60 * k * every), top + height + 14, f"{k * every:g}", anchor="middle")
        self.canvas.stroke_lines(
            [[(self.plot_left, top + height), (self.plot_left + self.plot_width, top + height)]], GRID, 1
        )
        return top + height + BELOW

    def _write_legend(self, entries: dict[str, dict[str, Any]], top: float) -> float:
        """Write the names of series, each behind a piece of its line, and return where they end."""
        left = self.left
        for name, look in entries.items():
            needed = 22 + estimate_width(name) + 8
            if left > self.left and left + needed > self.left + self.width + 8:
                left, top = self.left, top + LINE
            self.canvas.stroke_lines([[(left, top + 8), (left + 16, top + 8)]], **{**look, "width": 3})
            self.canvas.write(left + 20, top + 12, name)
            left += needed
        return top + LINE + 12

    # ---- kinds of panels

    def _list_looks(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the name in the legend and the look of each series; ranks to which nothing was done look alike."""
        looks: list[tuple[str, dict[str, Any]]] = []
        series = self.panel["series"]
        other = 0
        for one in series:
            rank = re.match(r"rank (\d+)", one["name"])
            if rank is None or len(series) <= 4:
                looks.append((one["name"], {"color": SERIES[other % 4], "dashed": other > 3}))
                other += 1
            elif color := self.picture.rank_colors.get(rank[1]):
                looks.append((one["name"], {"color": color}))
            else:
                looks.append(("other ranks", {"color": INK, "width": 0.9, "opacity": 0.4}))
        return looks

    def _draw_lines(self, top: float) -> float:
        looks = self._list_looks()
        series = [one["values"] for one in self.panel["series"]]
        if self.panel.get("stacked") or (len(series) > 4 and looks[0][0] == self.panel["series"][0]["name"]):
            series, looks = _leave_out_zeros(series, looks)
        top = self._write_legend(dict(looks), top)
        self._shade_faults(top, PLOT)
        sums = [sum(value or 0 for value in values) for values in zip(*series, strict=True)]
        known = sorted(sums if self.panel.get("stacked") else [value or 0.0 for values in series for value in values])
        highest, most = known[-1], known[int(0.97 * (len(known) - 1))]
        cut = 0 < 3 * most < highest
        ticks, end = _choose_ticks(1.2 * most if cut else highest, self.panel["unit"])
        scale = PLOT / end
        for tick in ticks:
            y = top + PLOT - scale * tick
            self.canvas.stroke_lines([[(self.plot_left, y), (self.plot_left + self.plot_width, y)]], GRID, 0.8)
            self.canvas.write(self.plot_left - 5, y + 4, format_value(tick, self.panel["unit"]), anchor="end")
        if self.panel.get("stacked"):
            self._draw_areas(series, looks, top + PLOT, scale)
        else:
            in_front = sorted(range(len(series)), key=lambda k: looks[k][0] != "other ranks")
            for k in in_front:
                self.canvas.stroke_lines(self._trace_line(series[k], top + PLOT, scale), **looks[k][1])
        if cut:
            text = f"\N{BLACK UP-POINTING TRIANGLE} {format_value(highest, self.panel['unit'])}"
            self.canvas.write(self.left + self.width, self.top + 14, text, size=11, anchor="end")
        changes = self.picture.board["marks"].get("Changes of the knobs", ())
        ends = [(self._place_time(moment), top + PLOT) for moment in changes]
        self.canvas.stroke_lines([[(x, y), (x, y - 6)] for x, y in ends], FIRST, 1)
        return self._mark_times(top, PLOT)

    def _trace_line(self, values: Values, bottom: float, scale: float) -> list[list[Point]]:
        """Return the pieces of a line between its gaps."""
        pieces: list[list[Point]] = [[]]
        for k, value in enumerate(values):
            if value is None:
                pieces.append([])
            else:
                pieces[-1].append((self._place_time(k * self.picture.step), bottom - min(PLOT, scale * value)))
        return [piece if len(piece) > 1 else [piece[0], (piece[0][0] + 1, piece[0][1])] for piece in pieces if piece]

    def _draw_areas(
        self, series: list[Values], looks: list[tuple[str, dict[str, Any]]], bottom: float, scale: float
    ) -> None:
        times = [self._place_time(k * self.picture.step) for k in range(len(series[0]))]
        below = [0.0] * len(times)
        for values, (_, look) in zip(series, looks, strict=True):
            above = [low + (value or 0) for low, value in zip(below, values, strict=True)]
            edge = [(x, bottom - min(PLOT, scale * y)) for x, y in zip(times, above, strict=True)]
            back = [(x, bottom - min(PLOT, scale * y)) for x, y in zip(reversed(times), reversed(below), strict=True)]
            self.canvas.fill_area(edge + back, look["color"], 0.45 if look["dashed"] else 0.75)
            below = above

    def _draw_heatmap(self, top: float) -> float:
        """Draw the ranks' values, or how many were in each bucket, as shades of one colour."""
        names, rows = _read_heatmap(self.panel["series"])
        known = sorted(value for row in rows for value in row)
        highest = min(known[-1], 3 * known[int(0.97 * (len(known) - 1))] or known[-1]) or 1
        top += 12
        self._shade_faults(top, STRIPE * len(rows))
        shades: dict[int, list[list[Point]]] = {}
        for number, (name, row) in enumerate(zip(names, rows, strict=True)):
            y = top + STRIPE * (number + 0.5)
            self.canvas.write(self.plot_left - 5, y + 4, name, anchor="end")
            for begin, end, shade in _list_runs(
                [math.ceil(SHADES * math.sqrt(min(1, value / highest))) for value in row]
            ):
                ends = [self._place_time((k - 0.5) * self.picture.step) for k in (max(begin, 0.5), end)]
                shades.setdefault(int(shade), []).append([(ends[0], y), (ends[1], y)])
        for shade, lines in sorted(shades.items()):
            if shade:
                self.canvas.stroke_lines(lines, SECOND, STRIPE - 2, shade / SHADES)
        return self._mark_times(top, STRIPE * len(rows))

    def _draw_states(self, top: float) -> float:
        words, series = self.panel["words"], self.panel["series"]
        labels = max(LEFT, *(estimate_width(one["name"]) + 6 for one in series))
        self.plot_left, self.plot_width = self.left + labels, self.width - labels - 6
        seen = {f"{value:.0f}" for one in series for value in one["values"] if value is not None}
        used = {word: {"color": COLORS[color]} for code, (word, color) in words.items() if code in seen}
        top = self._write_legend(used, top)
        self._shade_faults(top, STRIPE * len(series))
        for number, one in enumerate(series):
            y = top + STRIPE * number
            self.canvas.write(self.plot_left - 5, y + 12, one["name"], anchor="end")
            for begin, end, value in _list_runs(one["values"]):
                ends = [self._place_time(k * self.picture.step) for k in (begin, min(end, len(one["values"]) - 1))]
                color = COLORS[words[f"{value:.0f}"][1]] if f"{value:.0f}" in words else GRID
                self.canvas.fill_rectangle(ends[0], y + 1.5, max(1.5, ends[1] - ends[0]), STRIPE - 3, color)
        return self._mark_times(top, STRIPE * len(series))

    def _write_numbers(self, top: float) -> float:
        """Write single numbers, with their names if there are several, above lines of how they came about."""
        left = self.left
        each = self.width / len(self.panel["series"])
        for one in self.panel["series"]:
            value = one.get("moment")
            word = self.panel.get("words", {}).get("" if value is None else f"{value:.0f}", ("",))[0]
            text = "no data" if value is None else word or format_value(value, self.panel["unit"])
            name = one["name"] if len(self.panel["series"]) > 1 else ""
            self.canvas.write(left, top + 14, text, size=17, weight="bold")
            if name:
                self.canvas.write(left + estimate_width(text, 19) + 4, top + 14, name)
            values = [0.0 if value is None else value for value in one["values"]]
            across = (each - 14) / max(1, len(values) - 1)
            scale = 16 / (max(values) or 1)
            line = [(left + k * across, top + 38 - scale * value) for k, value in enumerate(values)]
            if "words" not in self.panel:
                self.canvas.stroke_lines([line], FIRST, 1, 0.7)
            left += each
        return top + NUMBER

    def _write_table(self, top: float) -> float:
        kept = [k for k, column in enumerate(self.panel["columns"]) if column not in LEFT_OUT]
        cells = [[self.panel["columns"][k].replace("running for", "runs for") for k in kept]]
        cells += [[_format_cell(row[k], self.panel["units"][k]) for k in kept] for row in self.panel["rows"]]
        widths = [
            max(estimate_width(line[k], HEAD if line is cells[0] else SMALL) for line in cells)
            for k in range(len(kept))
        ]
        gap = min(20, (self.width - sum(widths)) / max(1, len(widths) - 1))
        for number, line in enumerate(cells):
            left = self.left
            for text, width in zip(line, widths, strict=True):
                look = {} if number else {"size": HEAD, "weight": "bold"}
                self.canvas.write(left, top + 13, text, **look)
                left += width + gap
            top += LINE
        return top + 4


def _choose_ticks(highest: float, unit: str) -> tuple[list[float], float]:
    """Return round values of an axis from 0, and its end."""
    if not highest:
        return [0.0], 1.0
    if unit in ("bytes", "Bps"):
        every = 2.0 ** math.ceil(math.log2(highest / 3))
    else:
        power = 10.0 ** math.floor(math.log10(highest / 3))
        every = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= highest / 3.2)
    return [every * k for k in range(int(1.08 * highest / every) + 1)], 1.08 * highest


def _leave_out_zeros(
    series: list[Values], looks: list[tuple[str, dict[str, Any]]]
) -> tuple[list[Values], list[tuple[str, dict[str, Any]]]]:
    """Return the series that are not 0 all the time, or one if all are, with looks that follow one another."""
    kept = [k for k, values in enumerate(series) if any(values)] or [0]
    fresh = [(looks[k][0], {"color": SERIES[n % 4], "dashed": n > 3}) for n, k in enumerate(kept)]
    return [series[k] for k in kept], fresh


def _read_heatmap(series: list[dict[str, Any]]) -> tuple[list[str], list[list[float]]]:
    """Return the names and values of a heat map's rows from above to below; of buckets those that are used."""
    values = {one["name"]: [value or 0.0 for value in one["values"]] for one in series}
    if series[0]["name"].startswith("rank"):
        return list(values), list(values.values())
    bounds = sorted(values, key=float)
    inside = {
        upper: [max(0.0, more - less) for more, less in zip(values[upper], values[lower], strict=True)]
        for lower, upper in pairwise(bounds)
    }
    inside = {bounds[0]: values[bounds[0]], **inside}
    used = [k for k, bound in enumerate(bounds) if max(inside[bound]) > 1e-3 * max(map(max, inside.values()))]
    shown = bounds[used[0] : used[-1] + 1][::-1]
    names = [
        "more" if bound == "+Inf" else f"\N{LESS-THAN OR EQUAL TO} {format_duration(float(bound))}" for bound in shown
    ]
    return names, [inside[bound] for bound in shown]


def _format_cell(value: Any, unit: str) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else format_value(value, unit)


def _list_runs(values: list[Any]) -> Iterator[tuple[int, int, float]]:
    """Yield the first index, the one after the last, and the value of each run of equal values."""
    begin = 0
    for k in range(1, len(values) + 1):
        if k == len(values) or values[k] != values[begin]:
            if (value := values[begin]) is not None:
                yield begin, k, value
            begin = k
