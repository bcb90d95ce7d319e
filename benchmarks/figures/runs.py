"""Figures of single runs, from the recordings in benchmarks/history/recorded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from textwrap import wrap
from types import SimpleNamespace

from matplotlib.figure import Figure

from autotune.log_summary import summarize_log
from benchmarks.common.paths import ROOT
from benchmarks.figures.style import FIRST, FOURTH, INK, SECOND, THIRD, put_legend, start_figure
from benchmarks.figures.tables import RECORDED, read_recording
from engine.foresee.picture import draw_picture

PREDICTED = re.compile(r"^ +(\d+) +\d+ +([\d.]+) ms +([\d.]+) % +([\d.]+) ms", re.MULTILINE)
COLUMNS = 58
"""Number of characters in a line of terminal text."""


def draw_timeline() -> Figure:
    """Draw one training step of two ranks: when gradients came, were reduced, and waited for."""
    ranks = read_recording("timeline.json")["ranks"]
    steps = [event for events in ranks for event in events if event["name"] == "step"]
    start = min(step["ts"] for step in steps)
    end = max(step["ts"] + step["dur"] - start for step in steps) / 1e3
    figure, panels = start_figure(3.9, len(ranks))
    for rank, (axes, events) in enumerate(zip(panels, ranks, strict=True)):
        for place, name, color, label in (
            (0, "step", FIRST, "the step"),
            (1, "negotiate", THIRD, "waits for the other rank"),
            (2, "allreduce", SECOND, "allreduce"),
            (3, "wait", FOURTH, "the program waits"),
        ):
            bars = [((event["ts"] - start) / 1e3, event["dur"] / 1e3) for event in events if event["name"] == name]
            axes.broken_barh(bars, (place - 0.3, 0.6), color=color, label=label)
        axes.set(title=f"rank {rank}", yticks=[], ylim=(3.5, -0.5))
        axes.grid(visible=False, axis="y")
        axes.set_xlim(0, end)
    panels[0].tick_params(labelbottom=False)
    panels[-1].set_xlabel("ms since the step began")
    put_legend(figure, panels[0], 2)
    return figure


def draw_search() -> Figure:
    """Draw the trials of a tuner's search, and the best so far."""
    rows = [json.loads(line) for line in (RECORDED / "search.jsonl").read_text(encoding="utf-8").splitlines()]
    summary = summarize_log(rows)
    figure, (axes,) = start_figure(3.7)
    numbered = list(enumerate(summary.lines, start=1))
    for phases, color, marker, label in (
        (("default",), INK, "s", "default"),
        (("design", "search"), FIRST, "o", "tried"),
        (("confirm",), THIRD, "D", "measured again"),
    ):
        points = [(k, 1e3 * line.seconds) for k, line in numbered if line.phase in phases and line.samples]
        axes.plot(*zip(*points, strict=True), color=color, marker=marker, linestyle="", label=label)
    best = [1e3 * min(line.seconds for line in summary.lines[:k] if line.samples) for k, _ in numbered]
    axes.step([k for k, _ in numbered], best, where="post", color=SECOND, label="least so far")
    axes.set(
        title="A search: time of a step in each trial", xlabel="trial", ylabel="ms", ylim=(0, 1.05 * axes.get_ylim()[1])
    )
    put_legend(figure, axes, 2)
    return figure


def draw_failure() -> Figure:
    """Draw what the terminal showed at a failure, as lines of at most `COLUMNS` characters."""
    text = (RECORDED / "failure.txt").read_text(encoding="utf-8")
    lines: list[tuple[str, str]] = []
    for line in text.splitlines():
        color = next(
            color
            for pattern, color in (
                (r"^\$", FIRST), ("first failure:", SECOND), ("^enginerun:", THIRD), ("Error|ERROR", FOURTH), ("", INK),
            )
            if re.search(pattern, line)
        )  # fmt: skip
        lines += [
            (part, color)
            for part in wrap(line, COLUMNS, subsequent_indent="  ", break_long_words=True, break_on_hyphens=False)
        ]
    figure, (axes,) = start_figure(0.2 * len(lines) + 0.2)
    axes.set_axis_off()
    axes.set(xlim=(0, 1), ylim=(len(lines) - 0.4, -0.6))
    for number, (line, color) in enumerate(lines):
        axes.text(
            0,
            number,
            line.replace(" ", "\N{NO-BREAK SPACE}"),
            color=color,
            fontsize=9.6,
            family="monospace",
            va="center",
        )
    return figure


def write_prediction(path: Path) -> None:
    """Write the picture of `enginerun foresee` for the table in docs/how-to/foresee.md."""
    text = (ROOT / "docs" / "how-to" / "foresee.md").read_text(encoding="utf-8")
    rows = [
        SimpleNamespace(
            hosts=int(hosts), step=float(step) / 1e3, efficiency=float(share) / 100, added=float(added) / 1e3
        )
        for hosts, step, share, added in PREDICTED.findall(text)
    ]
    steps, network = (
        re.findall(r"(\d+) of \d+ steps in full", text),
        re.findall(r"^network: (.+?): ", text, re.MULTILINE),
    )
    title = f"A step on more hosts, foreseen from {steps[0]} steps of one"
    path.write_text(draw_picture(title, rows, network[0]), encoding="utf-8")
