"""Display of logs in the terminal, as tables and curves."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table

from autotune import horovod_csv
from autotune.hindsight import compute_regrets
from autotune.log_summary import LogSummary, TrialLine, summarize_log
from autotune.result_cache import Known
from autotune.space import Knobs
from autotune.terminal import replace_unprintable
from autotune.whatif import WhatIf

BAR = 16  # characters of a bar
BYTES = ("fusion_threshold", "chunk_bytes")
# Names of scores in a log, with the heads of their columns.
SCORES = {"seconds per step": "ms/step", "seconds per period": "ms/period", "busy seconds per GiB": "busy ms/GiB"}
# Same as in engine/text/readable.py, which this package does not import, because it works without the engine.
UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def format_knobs(knobs: Knobs) -> str:
    """Format knobs on one line."""
    return " ".join(f"{name}={_format_value(name, value)}" for name, value in knobs.items())


LEGEND = (
    "phase: default, what runs without tuning; design, near the corners of the space, to learn from; search, the most "
    "promising; confirm, the best so far and what stood, measured again in turns",
    "of default: time of a step as a share of the default's, below 1 is faster; cut: too slow, so only a few steps",
)
"""Explanation of the words in the table."""
WIDE = 10_000
"""Columns of output that is not a terminal, so that each row is on one line."""


class PlainConsole(Console):
    """Console that shows texts of logs without letting them control the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Render without control characters, except for rich's own."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else "\n".join(map(replace_unprintable, text.split("\n"))), style, control)


def create_console(file: TextIO) -> Console:
    """Return a console that wraps lines at the width of a terminal, and nowhere else."""
    return PlainConsole(file=file) if file.isatty() else PlainConsole(file=file, width=WIDE, soft_wrap=True)


APART = ("recalled", "link")  # fields of `about` that are shown on a line of their own


def show_log(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print the trials and decisions of a log."""
    summary = summarize_log(rows)
    head = rows[0]
    recalled = head.get("about", {}).get("recalled")
    about = " ".join(f"{name}={value}" for name, value in head.get("about", {}).items() if name not in APART)
    console.print(
        f"seed {head['seed']}, at most {head['max_trials']} trials{', ' + replace_unprintable(about) if about else ''}",
        highlight=False, markup=False,
    )  # fmt: skip
    if recalled is not None:
        console.print(f"recalled: {replace_unprintable(recalled)}", highlight=False, markup=False)
    link = head.get("about", {}).get("link")
    if isinstance(link, dict) and all(isinstance(link.get(name), float) for name in ("latency", "bandwidth")):
        measured_link = f"{1e6 * link['latency']:.3g} us and {link['bandwidth'] / 1e9:.3g} GB/s"
        console.print(f"the transport, as batches of the warm-up have it: {measured_link}", highlight=False)
    for knobs in head["first"]:
        console.print(f"tried first: {format_knobs(knobs)}", highlight=False)
    score = _get_score_heading(head)
    measured = any(not math.isnan(line.exposed) for line in summary.lines)
    shares = ["" if math.isnan(line.exposed) else f"{line.exposed:.0%}" for line in summary.lines]
    console.print(_build_table(head["space"], summary.lines, {"exposed": shares} if measured else None, score))
    for line in LEGEND:
        console.print(line, highlight=False, markup=False)
    for row in summary.decisions:
        why = escape(replace_unprintable(row["why"]))
        told = f"after trial {row['last']}: [bold]{row['decision']}[/] {format_knobs(row['knobs'])}: {why}"
        told += f"; {escape(replace_unprintable(str(row['because'])))}" if "because" in row else ""
        console.print(told, highlight=False)
    console.print(_format_curves(summary, compute_regrets(rows, summary)), highlight=False)
    if summary.spent and not score.startswith("busy"):  # samples per byte do not add up to seconds
        console.print(
            f"{len(summary.lines)} trials, {summary.spent:.3g} s of steps; slower trials lost {summary.lost:.2g} s "
            f"({summary.lost / summary.spent:.1%}), faster ones saved {summary.saved:.2g} s", highlight=False,
        )  # fmt: skip
    if summary.final is None:
        console.print("the search was not finished")


def show_what_if(found: WhatIf, name: str, opened: dict[str, Any], console: Console) -> None:
    """Print the estimated course of another search."""
    console.print(_build_table(opened["space"], found.lines, {"from": found.sources}, _get_score_heading(opened)))
    of = {source: found.sources.count(source) for source in ("log", "again", "model")}
    said = [
        f"{len(found.lines)} trials of {name}: {of['log']} answered by what the log has measured, "
        f"{of['again']} by samples used again, {of['model']} by the model",
        f"it would have deployed {format_knobs(found.best)}"
        + (", as the log did" if found.best == found.logged else f"; the log deployed {format_knobs(found.logged)}"),
        f"a step's time by the model: {_format_ratio(found.of_default)} of the default's, "
        f"{_format_ratio(found.of_logged)} of what the log deployed; "
        f"the log has {found.trials_of_best or 'no'} trial{'s' * (found.trials_of_best != 1)} of it",
        f"trials lost {found.lost:.3g} steps of the default, {found.lost_by_model:.3g} of them by the model; those of "
        f"the log {found.lost_in_log:.3g}",
    ]
    if found.resting:
        said.append("the search ended there: its trials had lost all that they may, until the job has run longer")
    if found.drifted:
        said.append("the log goes on, after a drift or in the background; this is of the search before that")
    if of["model"]:
        said.append("the model stands in for measurements that nobody has made: try on the job what it praises")
    for line in said:
        console.print(line, highlight=False)


def show_known(results: Sequence[Known], console: Console) -> None:
    """Print the kept results, the newest first."""
    for known in sorted(results, key=lambda known: datetime.fromisoformat(known.when), reverse=True):
        job = known.job
        gain = "nothing is proven faster than the default" if known.gain is None else f"{known.gain:.0%} less time"
        held = f"; held: {format_knobs(job.held)}" if job.held else ""
        console.print(
            f"{known.when.partition('+')[0]}  model {job.model[:8]}, {job.tensors} tensors, {job.bytes / 1e6:.3g} MB; "
            f"{job.ranks} ranks, {job.cpus} CPUs, {job.processor}, version {job.version}{held}\n"
            f"  {gain}: {format_knobs(known.knobs)}\n",
            highlight=False, markup=False,
        )  # fmt: skip


def show_samples(samples: Sequence[horovod_csv.HorovodSample], console: Console) -> None:
    """Print a log of Horovod's autotuner."""
    best = horovod_csv.find_best_sample(list(samples))
    most = max(sample.score for sample in samples)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("line", "knobs", "bytes/us", ""):
        table.add_column(name, justify="right" if name in ("line", "bytes/us") else "left")
    for sample in samples:
        bar = "▇" * max(1, round(BAR * sample.score / most)) if most > 0 else ""
        bar += " best" if sample is best else ""
        table.add_row(str(sample.line), format_knobs(sample.knobs), f"{sample.score:.4g}", bar)
    console.print(table)
    console.print("a log of Horovod's: each row was measured once, and the best of them looks better than it is")


def _get_score_heading(head: Mapping[str, Any]) -> str:
    """Return the head of the column of scores, from a log's first row."""
    return SCORES.get(str(head.get("about", {}).get("score")), "ms/step")


def _build_table(
    space: Mapping[str, Any], lines: Sequence[TrialLine], more: Mapping[str, Sequence[str]] | None, score: str
) -> Table:
    """Return a table of trials, with optional further columns."""
    more = more or {}
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in ("trial", "phase", *space, score, "of default", *more):
        number = space.get(name, {}).get("kind") != "Choice" and name not in ("phase", *more)
        table.add_column(re.sub("[_ ]", "\n", name), justify="right" if number else "left", no_wrap=True)
    for k, line in enumerate(lines):
        ratio = "running" if line.status == "running" else f"{line.ratio:.3f}{' cut' * (line.status == 'aborted')}"
        error = "" if math.isnan(line.error) else f" ± {1e3 * line.error:.1g}"
        seconds = "" if math.isnan(line.seconds) else f"{1e3 * line.seconds:.4g}{error}"
        shown = [_format_value(name, value) for name, value in line.knobs.items()]
        table.add_row(str(line.id), line.phase, *shown, seconds, ratio, *(column[k] for column in more.values()))
    return table


def _format_curves(summary: LogSummary, regret: Sequence[float]) -> str:
    """Format the least ratio, the regret and the loss, one character per trial."""
    best, lost = summary.compute_best_so_far(), summary.compute_lost_so_far()
    if not any(value < math.inf for value in best):
        return "no trial was told to its end"
    return (
        f"least so far  {_format_sparkline(best)}  {best[-1]:.3f} of what stood before\n"
        f"regret        {_format_sparkline(regret)}  {regret[-1]:.1%}: what had measured best by then, to the best "
        f"tried, as believed at the end\n"
        f"lost so far   {_format_sparkline(lost)}  {lost[-1]:.3g} steps of what stood before, by slower trials"
    )


def _format_sparkline(values: Sequence[float]) -> str:
    marks = "▁▂▃▄▅▆▇█"
    finite = [value for value in values if math.isfinite(value)]
    step = (max(finite) - min(finite)) / (len(marks) - 1) or 1.0
    return "".join(marks[round((value - min(finite)) / step)] if math.isfinite(value) else " " for value in values)


def _format_ratio(ratio: tuple[float, float]) -> str:
    """Format a ratio of times from the mean and standard deviation of its logarithm."""
    mean, deviation = math.exp(ratio[0]), ratio[1]
    return f"{mean:.3f} ± {mean * deviation:.3f}"


def _format_value(name: str, value: Any) -> str:
    """Format a value, with bytes in a suitable unit."""
    if name in BYTES and isinstance(value, int):
        unit, size = next(((unit, size) for unit, size in UNITS if value >= size), ("B", 1))
        return f"{value / size:.3g} {unit}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
