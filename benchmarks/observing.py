"""Cost of a timeline and of metrics: time and processor time of a step with 2000 tensors of 1 KiB."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from rich.console import Console

from benchmarks.common import binding, environment, paths, progress, records, stats
from benchmarks.common.processes import Group, get_build_variables
from benchmarks.common.stats import Interval
from benchmarks.common.tables import Table, format_duration
from benchmarks.training.run import summarize_blocks

WORKLOADS = {"hooks": "gradient hooks alone", "training": "training step"}
NEVER, OFF, ON, PAUSED, COUNTED, OTHER = "never", "off", "on", "paused", "counted", "other"
VARIANTS = {
    NEVER: "never watched",
    OFF: "timeline off, was on before",
    ON: "timeline on",
    PAUSED: "metrics paused",
    COUNTED: "metrics on",
    OTHER: "another build, never watched",
}
SAME_JOB = {ON: OFF, COUNTED: PAUSED}
BASES = {COUNTED: PAUSED}
"""Variant of the same job with which a variant is compared, if it is not the one that is never watched."""
MODULES = {
    "hooks": ("benchmarks.collective.worker", ["--contender", "engine", "--largest", "4096"]),
    "training": ("benchmarks.training.worker", ["--workload", "tiny", "--engine"]),
}


@dataclass(frozen=True)
class ObservingSettings:
    """Measurements to make, and their duration."""

    workloads: tuple[str, ...] = tuple(WORKLOADS)
    variants: tuple[str, ...] = (NEVER, OFF, ON, PAUSED, COUNTED)
    against: str = ""
    """Directory in which another build of the engine is installed, by `pip install --target`; empty: none."""
    ranks: int = 2
    tensors: int = 2000
    rounds: int = 20
    warmup: int = 2
    steps: tuple[tuple[str, int], ...] = (("hooks", 200), ("training", 20))
    """Timed steps in a block, by workload."""


class _Variants:
    """Jobs of the variants: one never watched, one with timelines, one with metrics, and perhaps another build's."""

    def __init__(self, settings: ObservingSettings, workload: str, stack: contextlib.ExitStack) -> None:
        self._settings = settings
        self._workload = workload
        module, arguments = MODULES[workload]
        self._groups: dict[str, Group] = {}
        for name in (NEVER, ON, COUNTED, *([OTHER] if settings.against else [])):
            if not {name, SAME_JOB.get(name)} & {*settings.variants, OTHER}:
                continue
            label = f"observing-{workload}-{name}"
            variables = {"ENGINE_METRICS": str(int(name == COUNTED))}
            if name == OTHER:
                variables |= get_build_variables(settings.against)
            group = Group(label, settings.ranks, module, arguments, "engine", binding.list_processors(), variables)
            self._groups[name] = stack.enter_context(group)
            if workload == "training":
                for variant in ("engine", "engine_timeline")[: 2 if name == ON else 1]:
                    group.ask_ranks({"do": "build", "variant": variant})
        for name, other in SAME_JOB.items():
            if name in self._groups:
                self._groups[other] = self._groups[name]

    @property
    def names(self) -> list[str]:
        """Variants, in the order of `VARIANTS`."""
        return [name for name in VARIANTS if name in (*self._settings.variants, OTHER) and name in self._groups]

    def measure_block(self, name: str) -> list[dict[str, Any]]:
        """Take some steps of a variant; return each rank's times."""
        steps, warmup = dict(self._settings.steps)[self._workload], self._settings.warmup
        request: dict[str, Any] = {"do": "steps", "tensors": self._settings.tensors}
        if self._workload == "training":
            request = {"do": "block", "variant": "engine_timeline" if name == ON else "engine"}
        request["watched"] = {ON: "timeline", COUNTED: "counted", PAUSED: "paused"}.get(name, "")
        return self._groups[name].ask_ranks({**request, "steps": steps, "warmup": warmup})


def run(settings: ObservingSettings, console: Console) -> Path:
    """Measure, and write `out/observing.json`."""
    before = environment.record()
    begun = time.perf_counter()
    results = [row for workload in settings.workloads for row in _measure_workload(settings, workload, console)]
    seconds = round(time.perf_counter() - begun, 1)
    return records.write("observing", asdict(settings), before, {"results": results, "seconds": seconds})


def _measure_workload(settings: ObservingSettings, workload: str, console: Console) -> Iterator[dict[str, Any]]:
    with contextlib.ExitStack() as stack:
        variants = _Variants(settings, workload, stack)
        names = variants.names
        blocks: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in names}
        with progress.show_progress(console, WORKLOADS[workload], len(names) * (settings.rounds + 1)) as advance:
            for name in sorted(names, key=lambda name: name != ON):  # the timeline comes first, for the variant OFF
                variants.measure_block(name)
                advance(f"{VARIANTS[name]}, warm-up")
            for number in range(settings.rounds):
                for i in range(len(names)):
                    name = names[(i + number) % len(names)]
                    blocks[name].append(variants.measure_block(name))
                    advance(VARIANTS[name])
    for name in names:
        yield {"workload": workload, "variant": name, **summarize_blocks(blocks[name])}


def build_tables(content: dict[str, Any]) -> list[Table]:
    """Return the table of `out/observing.json`."""
    settings = content["settings"]
    table = Table(
        f"What it costs to be watched, {settings['ranks']} ranks: a step with {settings['tensors']} tensors of 1 KiB",
        ["workload, variant", "step, median", "p99", "ratio", "processor time", "ratio of processor times"],
    )
    for row, base in _pair_with_base(content["results"]):
        ratios = [_format_interval(stats.estimate_ratio(row[kind], base[kind])) for kind in ("rounds", "processor")]
        table.rows.append(
            [
                f"{WORKLOADS[row['workload']]}, {VARIANTS[row['variant']]}",
                format_duration(row["median"]),
                format_duration(row["p99"]),
                ratios[0],
                format_duration(stats.estimate_median(row["processor"]).value),
                ratios[1],
            ]
        )
    table.note = (
        f"Ratios to `{VARIANTS[NEVER]}`, of `{VARIANTS[COUNTED]}` to `{VARIANTS[PAUSED]}`; "
        f"brackets: 95 % bootstrap interval over {settings['rounds']} rounds in which "
        f"the variants take turns. {environment.describe(content['environment'])}"
    )
    return [table]


def draw_figure(content: dict[str, Any]) -> Path:
    """Draw both ratios of each variant with their intervals, one panel per workload, and return the PNG."""
    workloads = list(dict.fromkeys(row["workload"] for row in content["results"]))
    figure, panels = plt.subplots(
        1, len(workloads), figsize=(6 * len(workloads), 4.5), squeeze=False, sharey=True, layout="constrained"
    )
    for axes, workload in zip(panels[0], workloads, strict=True):
        pairs = [(row, base) for row, base in _pair_with_base(content["results"]) if row["workload"] == workload]
        pairs = [(row, base) for row, base in pairs if row is not base]
        for k, (kind, label) in enumerate((("rounds", "time"), ("processor", "processor time"))):
            found = [stats.estimate_ratio(row[kind], base[kind]) for row, base in pairs]
            errors = [[i.value - i.low for i in found], [i.high - i.value for i in found]]
            places = [place + 0.2 * k - 0.1 for place in range(len(pairs))]
            axes.errorbar(places, [i.value for i in found], yerr=errors, fmt="o", capsize=4, label=label)
        axes.set_xticks(range(len(pairs)), [VARIANTS[row["variant"]] for row, _ in pairs])
        axes.axhline(1.0, color="0.5", linewidth=1)
        axes.set_title(WORKLOADS[workload])
        axes.margins(x=0.3)
    panels[0][0].set_ylabel(f"of the same, {VARIANTS[NEVER]} (with metrics: paused)")
    panels[0][0].legend()
    settings = content["settings"]
    figure.suptitle(f"{settings['tensors']} tensors of 1 KiB, {settings['ranks']} ranks: what it costs to be watched")
    path = paths.get_output_path("observing.png")
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _pair_with_base(results: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each row with the row of its workload to which it is compared."""
    rows = {(row["workload"], row["variant"]): row for row in results}
    for row in results:
        yield row, rows.get((row["workload"], BASES.get(row["variant"], NEVER)), row)


def _format_interval(interval: Interval) -> str:
    return f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"
