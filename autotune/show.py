"""A log for the eyes: tables and a curve in the terminal, and a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from autotune import horovod_csv
from autotune.known import Known
from autotune.policy import Tuner
from autotune.replay import tuner_of
from autotune.space import Choice, Knobs, Space
from autotune.story import Story, tell

BAR = 16  # characters
BYTES = ("fusion_threshold", "chunk_bytes")
UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def text_of(knobs: Knobs) -> str:
    """Knobs on one line."""
    return " ".join(f"{name}={_value(name, value)}" for name, value in knobs.items())


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print the story of a log."""
    story = tell(rows)
    head = rows[0]
    recalled = head.get("about", {}).get("recalled")
    about = " ".join(f"{name}={value}" for name, value in head.get("about", {}).items() if name != "recalled")
    console.print(
        f"seed {head['seed']}, at most {head['max_trials']} trials{', ' + about if about else ''}", highlight=False
    )
    if recalled is not None:
        console.print(f"recalled: {recalled}", highlight=False, markup=False)
    for knobs in head["first"]:
        console.print(f"tried first: {text_of(knobs)}", highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("trial", "phase", *head["space"], "ms/step", "of default"):
        number = head["space"].get(name, {}).get("kind") != "Choice" and name != "phase"
        wrapped = name in head["space"]
        table.add_column(name.replace("_", " "), justify="right" if number else "left", no_wrap=not wrapped)
    for line in story.lines:
        ratio = "running" if line.status == "running" else f"{line.ratio:.3f}{' cut' * (line.status == 'aborted')}"
        error = "" if math.isnan(line.error) else f" ± {1e3 * line.error:.1g}"
        seconds = "" if math.isnan(line.seconds) else f"{1e3 * line.seconds:.4g}{error}"
        shown = [_value(name, value) for name, value in line.knobs.items()]
        table.add_row(str(line.id), line.phase, *shown, seconds, ratio)
    console.print(table)
    for row in story.decisions:
        told = f"after trial {row['last']}: [bold]{row['decision']}[/] {text_of(row['knobs'])}: {row['why']}"
        console.print(told, highlight=False)
    console.print(_curve(story), highlight=False)
    if story.spent:
        console.print(
            f"{len(story.lines)} trials, {story.spent:.3g} s of steps; slower trials lost {story.lost:.2g} s "
            f"({story.lost / story.spent:.1%}), faster ones saved {story.saved:.2g} s", highlight=False,
        )  # fmt: skip
    if story.final is None:
        console.print("the search was not finished")


def show_known(results: Sequence[Known], console: Console) -> None:
    """Print what is kept, the newest first."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("when", "model", "tensors", "MB", "ranks", "CPUs", "processor", "version", "less time", "knobs"):
        right = name in ("tensors", "MB", "ranks", "CPUs", "less time")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for known in sorted(results, key=lambda known: datetime.fromisoformat(known.when), reverse=True):
        job = known.job
        held = f", held: {text_of(job.held)}" if job.held else ""
        row = [
            known.when.partition("+")[0], job.model[:8], str(job.tensors), f"{job.bytes / 1e6:.3g}", str(job.ranks),
            str(job.cpus), job.processor, job.version, "nothing" if known.gain is None else f"{known.gain:.0%}",
            text_of(known.knobs) + held,
        ]  # fmt: skip
        table.add_row(*map(escape, row))
    console.print(table)


def show_samples(samples: Sequence[horovod_csv.Sample], console: Console) -> None:
    """Print a log of Horovod's."""
    best = horovod_csv.best(list(samples))
    most = max(sample.score for sample in samples)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("line", "knobs", "bytes/us", ""):
        table.add_column(name, justify="right" if name in ("line", "bytes/us") else "left")
    for sample in samples:
        bar = "▇" * max(1, round(BAR * sample.score / most)) if most > 0 else ""
        bar += " best" if sample is best else ""
        table.add_row(str(sample.line), text_of(sample.knobs), f"{sample.score:.4g}", bar)
    console.print(table)
    console.print("a log of Horovod's: each row was measured once, and the best of them looks better than it is")


def picture(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw trials, best so far and what the surrogate believes of each two knobs, as PNG, SVG or PDF by the suffix."""
    from matplotlib.figure import Figure

    story, tuner = tell(rows), _after(rows)
    names = [name for name, knob in tuner.space.knobs.items() if not isinstance(knob, Choice)]
    maps = 1 if names and tuner.history else 0
    figure = Figure(figsize=(6.4 * (1 + maps), 4.4), layout="constrained")
    axes = figure.subplots(1, 1 + maps, squeeze=False)[0]
    colours = {"default": "black", "design": "tab:gray", "search": "tab:blue", "confirm": "tab:green"}
    for phase, colour in colours.items():
        told = [(k, line) for k, line in enumerate(story.lines) if line.phase == phase and line.ratio == line.ratio]
        axes[0].errorbar(
            [k for k, _ in told], [line.ratio for _, line in told],
            yerr=[0.0 if math.isnan(line.error) else line.error * line.ratio / line.seconds for _, line in told],
            fmt="o", color=colour, label=phase, capsize=2,
        )  # fmt: skip
    axes[0].step(range(len(story.lines)), story.best_so_far(), where="post", color="tab:orange", label="least so far")
    axes[0].axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes[0].set(xlabel="trial", ylabel="time per step, of what stood before")
    axes[0].legend()
    if maps:
        _surface(figure, axes[1], tuner, names)
    figure.savefig(path, dpi=150)


def _surface(figure: Any, axes: Any, tuner: Tuner, names: list[str]) -> None:
    """What is believed over the first two numeric knobs, the others as in the best setting; over one, a line."""
    space, best = tuner.space, tuner.best()
    grid = 48
    shown = names[:2]
    shares = np.linspace(0.0, 1.0, grid)
    knobs = [
        {**best, **{name: _at(space, name, share) for name, share in zip(shown, pair, strict=True)}}
        for pair in ([(a, b) for b in shares for a in shares] if len(shown) == 2 else [(a,) for a in shares])
    ]
    mean, _ = tuner.believe(knobs)
    ratio = np.exp(mean)
    values = [[_at(space, name, share) for share in shares] for name in shown]
    if len(shown) == 2:
        drawn = axes.pcolormesh(values[0], values[1], ratio.reshape(grid, grid), shading="gouraud", cmap="viridis_r")
        figure.colorbar(drawn, ax=axes, label="time per step, believed, of what stood before")
        tried = [[told.trial.knobs[name] for told in tuner.history] for name in shown]
        axes.scatter(*tried, c="white", edgecolors="black", s=24)
        axes.scatter([best[shown[0]]], [best[shown[1]]], marker="*", s=160, c="tab:red", edgecolors="white")
        axes.set(xlabel=shown[0], ylabel=shown[1])
    else:
        axes.plot(values[0], ratio)
        axes.set(xlabel=shown[0], ylabel="time per step, believed, of what stood before")
    for name, scaled in zip(shown, (axes.set_xscale, axes.set_yscale), strict=False):
        if getattr(space.knobs[name], "log", False):
            scaled("log")


def _at(space: Space, name: str, share: float) -> Any:
    return space.knobs[name].decode([float(share), 0.0])


def _after(rows: Sequence[dict[str, Any]]) -> Tuner:
    """The tuner in the state that a log leaves it in, whatever it would have proposed."""
    tuner = tuner_of(rows[0])
    tuner.load(rows)
    return tuner


def _curve(story: Story) -> str:
    """Least ratio so far, one character a trial."""
    best = [value for value in story.best_so_far() if value < math.inf]
    if not best:
        return "no trial was told"
    low, high = min(best), max(best)
    marks = "▁▂▃▄▅▆▇█"
    step = (high - low) / (len(marks) - 1) or 1.0
    drawn = "".join(marks[round((value - low) / step)] for value in best)
    return f"least so far  {drawn}  {best[0]:.3f} to {best[-1]:.3f} of what stood before"


def _value(name: str, value: Any) -> str:
    """A value for people: bytes in the unit in which they are short."""
    if name in BYTES and isinstance(value, int):
        unit, size = next(((unit, size) for unit, size in UNITS if value >= size), ("B", 1))
        return f"{value / size:.3g} {unit}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
