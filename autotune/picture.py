"""Plot of a log: its trials, its regret, and the surrogate's beliefs at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from autotune.hindsight import compute_regrets, load_tuner
from autotune.log_summary import LogSummary, summarize_log
from autotune.policy import Tuner
from autotune.space import Choice, Knob

COLOURS = {"default": "black", "design": "tab:gray", "search": "tab:blue", "confirm": "tab:green"}
GRID = 48  # points along a knob
MAPS = 6  # maximum number of maps of two knobs
COLUMNS = 3
SIZE = 4.6, 3.6  # inches: width and height of a panel
OFF = 0.06  # distance below a knob's range at which its off value is drawn, as a share of the range
BELIEVED = "believed time, of what stood before"


def save_figure(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw a log as PNG, SVG or PDF, depending on the suffix."""
    draw_figure(rows).savefig(path, dpi=130)


def draw_figure(rows: Sequence[dict[str, Any]]) -> Figure:
    """Return the plot of a log.

    Above: the trials with the least ratio so far, and the regret. Below: the believed time along each knob through the
    deployed setting, with two standard deviations; then over each pair of numeric knobs, with the trials.
    """
    summary, tuner = summarize_log(rows), load_tuner(rows)
    knobs = tuner.space.knobs
    numeric = [name for name, knob in knobs.items() if not isinstance(knob, Choice)]
    believed = any(told.epoch == _get_last_epoch(summary) for told in tuner.history)
    pairs = list(combinations(numeric, 2))[:MAPS] if believed else []
    slices = list(knobs) if believed else []
    panels = [None, None, *slices, *pairs]
    columns = min(COLUMNS, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(SIZE[0] * columns, SIZE[1] * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    _draw_trials(axes[0], summary)
    _draw_regret(axes[1], summary, compute_regrets(rows, summary))
    for place, name in zip(axes[2:], slices, strict=False):
        _draw_slice(place, tuner, name)
    for place, pair in zip(axes[2 + len(slices) :], pairs, strict=False):
        _map(figure, place, tuner, pair)
    for place in axes[len(panels) :]:
        place.set_axis_off()
    return figure


def _get_last_epoch(summary: LogSummary) -> int:
    return summary.lines[-1].epoch if summary.lines else 0


def _draw_trials(axes: Any, summary: LogSummary) -> None:
    for phase, colour in COLOURS.items():
        told = [(k, line) for k, line in enumerate(summary.lines) if line.phase == phase and line.samples]
        axes.errorbar(
            [k for k, _ in told], [line.ratio for _, line in told],
            yerr=[0.0 if math.isnan(line.error) else line.error * line.ratio / line.seconds for _, line in told],
            fmt="o", color=colour, label=phase, capsize=2, markersize=4,
        )  # fmt: skip
    best = summary.compute_best_so_far()
    axes.step(range(len(best)), best, where="post", color="tab:orange", label="least so far")
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    _draw_drifts(axes, summary)
    axes.set(xlabel="trial", ylabel="measured time, of what stood before", title="trials")
    axes.legend(fontsize="small")


def _draw_regret(axes: Any, summary: LogSummary, regret: Sequence[float]) -> None:
    """Draw the regret of the best setting measured so far, and the steps that the search has lost."""
    (first,) = axes.step(range(len(regret)), [100 * each for each in regret], where="post", color="tab:orange")
    axes.set(xlabel="trial", ylabel="regret of the best measured so far (%)", title="regret")
    axes.set_ylim(bottom=0.0)
    beside = axes.twinx()
    lost = summary.compute_lost_so_far()
    (second,) = beside.step(range(len(lost)), lost, where="post", color="tab:red", linestyle="--")
    beside.set_ylabel("steps lost by slower trials")
    beside.set_ylim(bottom=0.0)
    _draw_drifts(axes, summary)
    axes.legend([first, second], ["of the best measured so far", "lost so far"], fontsize="small", loc="center right")


def _draw_drifts(axes: Any, summary: LogSummary) -> None:
    for k, line in enumerate(summary.lines[1:], start=1):
        if line.epoch != summary.lines[k - 1].epoch:
            axes.axvline(k - 0.5, color="black", linewidth=0.8, linestyle="--")


def _draw_slice(axes: Any, tuner: Tuner, name: str) -> None:
    """Draw the believed time along one knob, the others as deployed; its off value stands apart."""
    knob, best = tuner.space.knobs[name], tuner.best()
    values = list(knob.values) if isinstance(knob, Choice) else _space_values(knob)
    off = None if isinstance(knob, Choice) else knob.off
    mean, deviation = tuner.predict([{**best, name: value} for value in [*values, *([] if off is None else [off])]])
    middle, low, high = np.exp(mean), np.exp(mean - 2 * deviation), np.exp(mean + 2 * deviation)
    n = len(values)
    places = list(map(str, values)) if isinstance(knob, Choice) else values
    if isinstance(knob, Choice):
        axes.errorbar(places, middle, yerr=[middle - low, high - middle], fmt="o", color="tab:blue", capsize=4)
        axes.scatter([str(best[name])], [middle[values.index(best[name])]], marker="*", s=140, c="tab:red", zorder=3)
    else:
        axes.plot(values, middle[:n], color="tab:blue")
        axes.fill_between(values, low[:n], high[:n], color="tab:blue", alpha=0.2, linewidth=0)
        _set_log_scale(axes.set_xscale, knob)
        if off is not None:
            place = _get_off_position(knob)
            axes.errorbar(
                [place], middle[n:], yerr=[middle[n:] - low[n:], high[n:] - middle[n:]], fmt="o", color="tab:blue",
                capsize=4,
            )  # fmt: skip
            axes.annotate(f"{off:g}", (place, middle[n]), xytext=(6, 0), textcoords="offset points", fontsize="small")
        here = float(np.exp(tuner.predict([best])[0][0]))
        axes.scatter([_get_position(knob, best[name])], [here], marker="*", s=140, c="tab:red", zorder=3)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set(xlabel=name, ylabel=BELIEVED, title="with the other knobs as deployed")


def _map(figure: Figure, axes: Any, tuner: Tuner, pair: tuple[str, str]) -> None:
    """Draw the believed time over two knobs, the others as deployed, and the trials."""
    best = tuner.best()
    along = [_space_values(tuner.space.knobs[name]) for name in pair]
    knobs = [{**best, pair[0]: a, pair[1]: b} for b in along[1] for a in along[0]]
    ratio = np.exp(tuner.predict(knobs)[0]).reshape(len(along[1]), len(along[0]))
    drawn = axes.pcolormesh(*along, ratio, shading="gouraud", cmap="viridis_r")
    figure.colorbar(drawn, ax=axes, label=BELIEVED)
    number = tuner.history[-1].epoch
    tried = [told.trial.knobs for told in tuner.history if told.epoch == number]
    places = [[_get_position(tuner.space.knobs[name], each[name]) for each in tried] for name in pair]
    axes.scatter(*places, c="white", edgecolors="black", s=22)
    at = [[_get_position(tuner.space.knobs[name], best[name])] for name in pair]
    axes.scatter(*at, marker="*", s=160, c="tab:red", edgecolors="white")
    axes.set(xlabel=pair[0], ylabel=pair[1], title="with the other knobs as deployed")
    for name, scaled in zip(pair, (axes.set_xscale, axes.set_yscale), strict=True):
        _set_log_scale(scaled, tuner.space.knobs[name])


def _space_values(knob: Knob) -> list[Any]:
    """Return evenly spread values of a numeric knob."""
    found = [knob.decode([float(share), 0.0]) for share in np.linspace(0.0, 1.0, GRID)]
    return list(dict.fromkeys(found))


def _set_log_scale(scaled: Any, knob: Knob) -> None:
    if getattr(knob, "log", False):
        scaled("log")


def _get_position(knob: Knob, value: Any) -> float:
    """Return the position at which a value of a numeric knob is drawn."""
    assert not isinstance(knob, Choice)
    return _get_off_position(knob) if value == knob.off else float(value)


def _get_off_position(knob: Knob) -> float:
    """Return the position at which a knob's off value is drawn: a little below the least value."""
    assert not isinstance(knob, Choice)
    if knob.log:
        return float(knob.low * (knob.low / knob.high) ** OFF)
    return float(knob.low - OFF * (knob.high - knob.low))
