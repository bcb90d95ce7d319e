"""Tables and the plot of the training benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.common import paths, stats
from benchmarks.common.environment import describe
from benchmarks.common.tables import MISSING, Table, format_digits, format_duration
from benchmarks.training.run import FLOOR, PEER

TITLES = {
    "resnet50": "ResNet-50, batch 2 of 128x128",
    "gpt": "GPT, batch 1 of 32 tokens",
    "tiny": "2000 tensors of 1 KiB",
    "device": "16 tensors of 4 MiB, paced by sleep (a stand-in)",
}
LABELS = {
    "floor": "no communication (floor)",
    "ddp": "DDP, gloo, defaults",
    "ddp_view": "DDP, gloo, bucket views",
    "ddp_silent": "DDP that reduces nothing",
    "ddp_engine": "DDP on the backend engine",
    "engine": "engine",
    "engine_view": "engine, bucket views",
    "engine_view_kept": "engine, bucket views kept by zero_grad(set_to_none=False)",
    "engine_timeline": "engine, with a timeline",
}
COLORS = {"ddp": "tab:red", "ddp_view": "tab:orange"}


def build_tables(content: dict[str, Any]) -> list[Table]:
    """Return one table per workload."""
    found = [_build_workload_table(workload) for workload in content["workloads"]]
    if found:
        ranks, rounds = content["settings"]["ranks"], content["settings"]["rounds"]
        found[-1].note = (
            f"{ranks} ranks, one thread each; {rounds} rounds in which the variants take turns; brackets: 95 % "
            f"bootstrap interval over rounds. {describe(content['environment'])}"
        )
    return found


def compute_ratio_to_peer(workload: dict[str, Any], variant: str) -> stats.Interval | None:
    """Return the overhead of a variant as a share of DDP's; None if something was not measured."""
    variants = workload["variants"]
    if not {variant, PEER, FLOOR} <= variants.keys():
        return None
    return stats.estimate_overhead_ratio(
        variants[variant]["rounds"], variants[PEER]["rounds"], variants[FLOOR]["rounds"]
    )


def draw_figure(content: dict[str, Any]) -> Path | None:
    """Draw the overhead of each variant with its interval, one panel per workload, and return the PNG."""
    workloads = [w for w in content["workloads"] if FLOOR in w["variants"]]
    if not workloads:
        return None
    figure, panels = plt.subplots(
        1, len(workloads), figsize=(5 * len(workloads), 5), squeeze=False, layout="constrained"
    )
    for axes, workload in zip(panels[0], workloads, strict=True):
        floor = workload["variants"][FLOOR]
        names = [name for name in workload["variants"] if name != FLOOR]
        found = [stats.estimate_overhead(workload["variants"][name]["rounds"], floor["rounds"]) for name in names]
        heights = [1e3 * i.value for i in found]
        errors = [[1e3 * (i.value - i.low) for i in found], [1e3 * (i.high - i.value) for i in found]]
        colors = [COLORS.get(name, "tab:blue") for name in names]
        axes.bar(range(len(names)), heights, yerr=errors, capsize=4, color=colors)
        axes.set_xticks(range(len(names)), [LABELS[name].replace(", ", ",\n") for name in names], fontsize="small")
        axes.set_ylabel("added to a step (ms), 95 % interval")
        axes.set_title(f"{TITLES[workload['workload']]}\nfloor {format_duration(floor['median'])}")
        axes.grid(visible=True, axis="y", alpha=0.3)
    ranks = content["settings"]["ranks"]
    figure.suptitle(f"Training step of {ranks} ranks in one host: time beyond {ranks} independent processes")
    path = paths.get_output_path("training.png")
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _build_workload_table(workload: dict[str, Any]) -> Table:
    table = Table(
        f"{TITLES[workload['workload']]}: {workload['tensors']} tensors, {workload['bytes'] / 1e6:.0f} MB",
        ["variant", "step, median", "p99", "processor time", "over the floor", "of the floor", "of DDP's overhead"],
    )
    variants = workload["variants"]
    for name, row in variants.items():
        processor = format_duration(stats.estimate_median(row["processor"]).value)
        cells = [LABELS[name], format_duration(row["median"]), format_duration(row["p99"]), processor]
        if name == FLOOR or FLOOR not in variants:
            table.rows.append([*cells, MISSING, MISSING, MISSING])
            continue
        over = stats.estimate_overhead(row["rounds"], variants[FLOOR]["rounds"])
        share = None if name == PEER else compute_ratio_to_peer(workload, name)
        table.rows.append(
            [
                *cells,
                f"{format_duration(over.value)} [{format_duration(over.low)}, {format_duration(over.high)}]",
                f"{format_digits(100 * over.value / variants[FLOOR]['median'])} %",
                f"{format_digits(share.value)} [{format_digits(share.low)}, {format_digits(share.high)}]"
                if share
                else MISSING,
            ]
        )
    return table
