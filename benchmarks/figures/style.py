"""Look of every figure: its size, fonts and colours, on light and on dark pages."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler

from engine.foresee.picture import COLOURS, make_style_sheet

WIDTH = 5.0
"""Inches, so that a letter of 12 points is 13 pixels high in a figure that is shown 400 pixels wide."""
INK, GRID, CARD, FIRST, SECOND, THIRD, FOURTH = COLOURS
SERIES = (FIRST, SECOND, THIRD, FOURTH)
RULES = {
    "axes.edgecolor": GRID,
    "axes.facecolor": CARD,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.prop_cycle": cycler(color=SERIES),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 13,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "figure.constrained_layout.use": True,
    "figure.facecolor": CARD,
    "font.family": "sans-serif",
    "font.size": 12,
    "grid.color": GRID,
    "legend.fontsize": 11.5,
    "legend.frameon": False,
    "lines.linewidth": 2.2,
    "lines.markersize": 6,
    "svg.fonttype": "none",
    "svg.hashsalt": "figure",
    "text.color": INK,
    "xtick.color": INK,
    "xtick.labelsize": 12,
    "ytick.color": INK,
    "ytick.labelsize": 12,
}


def start_figure(height: float, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a new figure and its panels, one below another."""
    mpl.rcdefaults()
    mpl.rcParams.update(RULES)
    figure, panels = plt.subplots(rows, 1, figsize=(WIDTH, height), squeeze=False)
    return figure, [axes for (axes,) in panels]


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as SVG that is light on a light page and dark on a dark one."""
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    text = re.sub(r" +$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    path.write_text(text.replace("<defs>", f"{make_style_sheet()}\n <defs>", 1), encoding="utf-8")


def draw_bars(axes: Axes, rows: list[str], series: dict[str, list[tuple[float, float, float]]]) -> None:
    """Draw horizontal bars, a group for each row, of values with the ends of their intervals."""
    height = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = [row + (number - (len(series) - 1) / 2) * height for row in range(len(rows))]
        errors = [[value - low for value, low, _ in values], [high - value for value, _, high in values]]
        axes.barh(
            places, [value for value, _, _ in values], height * 0.92, xerr=errors, label=name,
            color=SERIES[number], error_kw={"ecolor": INK, "elinewidth": 1.2, "capsize": 2.5},
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def put_legend(figure: Figure, axes: Axes, columns: int) -> None:
    """Put the legend of a panel below the figure."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, columnspacing=1.2, handlelength=1.4)
