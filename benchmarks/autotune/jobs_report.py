"""Tables and the plot of `out/autotune-jobs.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.autotune.jobs import BEST, DEFAULT
from benchmarks.common import paths, stats
from benchmarks.common.environment import describe
from benchmarks.common.tables import MISSING, Table, format_duration
from benchmarks.training.report import TITLES

WITHIN = 1.03
"""Target: a setting's step time relative to the best of the grid, at most."""


def build_tables(content: dict[str, Any]) -> list[Table]:
    """Return one table with every choice of every workload."""
    settings = content["settings"]
    table = Table(
        "The tuner on jobs, against every setting of a grid",
        ["workload", "setting", "trials", "steps", "step, median", "of the best of the grid", "of the default",
         f"at most {WITHIN:g}"],
        left=("setting",),
    )  # fmt: skip
    for job in content["jobs"]:
        rows = {row["name"]: row for row in job["choices"]}
        for k, (name, row) in enumerate(rows.items()):
            search = job["searches"][int(name.split()[1]) - 1] if name.startswith("search") else None
            to_best = stats.estimate_ratio(row["rounds"], rows[BEST]["rounds"])
            table.rows.append(
                [
                    TITLES[job["workload"]] if k == 0 else "",
                    f"{name}: {_format_changes(row['knobs'], job['default'])}",
                    MISSING if search is None else str(search["trials"]),
                    MISSING if search is None else str(search["steps"]),
                    format_duration(row["median"]),
                    MISSING if name == BEST else _format_interval(to_best),
                    MISSING
                    if name == DEFAULT
                    else _format_interval(stats.estimate_ratio(row["rounds"], rows[DEFAULT]["rounds"])),
                    "" if search is None else ("pass" if to_best.value <= WITHIN else "miss"),
                ]
            )
    made = "; ".join(
        f"{job['workload']}: {job['trials']} trials at most, a grid of {job['cells']} settings in {job['grid_rounds']} "
        f"rounds, {job['rounds']} afresh, revision {job['revision']}"
        for job in content["jobs"]
    )
    table.note = (
        f"{settings['ranks']} ranks. {made}. Times are of a fresh job, in which settings take turns; brackets: 95 % "
        "bootstrap interval over rounds. The heap of all jobs keeps what is freed (MALLOC_TRIM_THRESHOLD_). "
        f"{describe(content['environment'])}"
    )
    return [table]


def draw_figure(content: dict[str, Any]) -> Path | None:
    """Draw the step time of each choice relative to the default, a panel for each workload."""
    jobs = content["jobs"]
    if not jobs:
        return None
    figure, panels = plt.subplots(
        1, len(jobs), figsize=(4 * len(jobs), 4.2), squeeze=False, sharey=True, layout="constrained"
    )
    for axes, job in zip(panels[0], jobs, strict=True):
        rows = job["choices"]
        found = [stats.estimate_ratio(row["rounds"], rows[0]["rounds"]) for row in rows]
        heights = [each.value for each in found]
        errors = [[each.value - each.low for each in found], [each.high - each.value for each in found]]
        colors = ["tab:gray", "tab:green", *["tab:blue"] * (len(rows) - 2)]
        axes.bar(range(len(rows)), heights, yerr=errors, capsize=4, color=colors)
        axes.set_xticks(
            range(len(rows)),
            [row["name"].replace(" of the ", "\n").replace(" ", "\n") for row in rows],
            fontsize="small",
        )
        axes.set_title(TITLES[job["workload"]].replace(", ", ",\n", 1), fontsize="medium")
        axes.grid(visible=True, axis="y", alpha=0.3)
    panels[0][0].set_ylabel("time of a step, default = 1\n95 % interval")
    figure.suptitle("What the tuner found, and the best of a grid, measured afresh in turns")
    path = paths.get_output_path("autotune-jobs.png")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _format_interval(ratio: stats.Interval) -> str:
    return f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def _format_changes(knobs: dict[str, Any], default: dict[str, Any]) -> str:
    """Format the knobs that differ from the default."""
    changed = {name: value for name, value in knobs.items() if value != default[name]}
    return " ".join(f"{name}={value}" for name, value in changed.items()) or "as it is"
