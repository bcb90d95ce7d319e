"""Comparison of the tuner with every setting of a grid, on jobs that train.

For each workload, all settings of the grid are measured, in rounds of random order. The best ones are measured again in
turns, which gives the best of the grid. Then the tuner searches, each time in a job of its own, started as users do.
Finally the default, the best of the grid and the result of each search are measured again, in turns in a new job. Only
this last measurement is compared, because settings selected for their speed look faster in the measurements that
selected them.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.autotune import recorded
from benchmarks.common import binding, environment, paths, progress, records
from benchmarks.common.processes import Group, RankError
from benchmarks.common.stats import Summary

WORKLOADS = ("resnet50", "gpt", "tiny", "device")
AXES: dict[str, tuple[Any, ...]] = {
    "fusion_threshold": (1 << 16, 1 << 20, 1 << 23, 1 << 26),
    "cycle_time_ms": (0.0, 0.2, 1.0, 5.0, 20.0),
    "stores": ("auto", "streaming"),
    "chunk_bytes": (1 << 17, 1 << 19),
}
DEFAULT, BEST = "default", "best of the grid"
SEARCH_LIMIT = 900.0
KEEP = {"MALLOC_TRIM_THRESHOLD_": str(4 << 30), "MALLOC_MMAP_THRESHOLD_": str(4 << 30)}
"""Variables of all jobs: torch's allocator does not return freed memory to the system and take it again in each step.
The resulting page faults depend on the layout of the heap: up to 5000 a step, and 10 ms."""
OFF = {"ENGINE_AUTOTUNE": "0"}

Knobs = dict[str, Any]


@dataclass(frozen=True)
class TunedJobsSettings:
    """Workloads, and the amount of measurement."""

    workloads: tuple[str, ...] = WORKLOADS
    ranks: int = 2
    grid_rounds: int = 2
    short_list: int = 5
    short_rounds: int = 6
    searches: int = 2
    trials: int = 15
    rounds: int = 15
    block_seconds: float = 0.6
    least: int = 3
    most: int = 12
    warmup: int = 2
    record: bool = False
    """True to keep the grid as a surface for `python -m benchmarks autotune`."""


def run(settings: TunedJobsSettings, console: Console, merge: bool = False) -> Path:
    """Measure, and write `out/autotune-jobs.json`. `merge` keeps workloads of the last run that are not run now."""
    content = records.read("autotune-jobs") if merge else None
    kept = [job for job in (content or {"jobs": []})["jobs"] if job["workload"] not in settings.workloads]
    before = environment.record()
    begun = time.perf_counter()
    jobs = kept + [_measure_workload(settings, workload, console, before) for workload in settings.workloads]
    jobs.sort(key=lambda job: WORKLOADS.index(job["workload"]))
    seconds = round(time.perf_counter() - begun, 1)
    return records.write("autotune-jobs", asdict(settings), before, {"jobs": jobs, "seconds": seconds})


class _Rounds:
    """Settings that are measured in turns in one job."""

    def __init__(self, settings: TunedJobsSettings, group: Group) -> None:
        self._group, self._warmup = group, settings.warmup
        standing = group.ask_ranks({"do": "knobs"})[0]
        self.default: Knobs = {name: standing[name] for name in AXES}
        first = group.ask_ranks({"do": "block", "knobs": self.default, "warmup": 5, "steps": settings.least})
        step = statistics.median(first[0])
        self.steps = int(min(settings.most, max(settings.least, settings.block_seconds / step)))

    def measure_rounds(
        self, choices: Sequence[Knobs], rounds: int, advance: Callable[[str], None]
    ) -> list[list[list[float]]]:
        """Return the seconds of steps, `[choice][round][step]`, as the mean over ranks."""
        found: list[list[list[float]]] = [[] for _ in choices]
        for number in range(rounds):
            order = list(range(len(choices)))
            random.Random(number).shuffle(order)
            for k in order:
                request = {"do": "block", "knobs": choices[k], "warmup": self._warmup, "steps": self.steps}
                ranks = self._group.ask_ranks(request)
                found[k].append([statistics.fmean(step) for step in zip(*ranks, strict=True)])
                advance(f"round {number + 1}")
        return found


def list_grid() -> list[Knobs]:
    """Return every setting of the grid."""
    return [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]


def _measure_workload(
    settings: TunedJobsSettings, workload: str, console: Console, before: dict[str, Any]
) -> dict[str, Any]:
    best, cells, default = _search_grid(settings, workload, console)
    if settings.record:
        recorded.write(workload, settings.ranks, before, default, AXES, cells)
    searches = [_run_tuned_job(settings, workload, number, console) for number in range(settings.searches)]
    choices = {DEFAULT: default, BEST: best}
    choices |= {f"search {number + 1}": {**default, **search["best"]} for number, search in enumerate(searches)}
    rows = _measure_afresh(settings, workload, choices, console)
    made = {
        "revision": before["revision"],
        "grid_rounds": settings.grid_rounds,
        "trials": settings.trials,
        "rounds": settings.rounds,
    }
    return {
        "workload": workload,
        **made,
        "cells": len(cells),
        "default": default,
        "searches": searches,
        "choices": rows,
    }


def _start_group(settings: TunedJobsSettings, workload: str, label: str, variables: Mapping[str, str]) -> Group:
    return Group(
        f"autotune-{workload}-{label}", settings.ranks, "benchmarks.autotune.trainer", ["--workload", workload],
        "engine", binding.list_processors(), {**KEEP, **variables},
    )  # fmt: skip


def _search_grid(
    settings: TunedJobsSettings, workload: str, console: Console
) -> tuple[Knobs, list[dict[str, Any]], Knobs]:
    """Return the best setting of the grid, all its cells, and the default."""
    every = list_grid()
    with _start_group(settings, workload, "grid", OFF) as group:
        rounds = _Rounds(settings, group)
        if rounds.default not in every:
            raise RuntimeError(f"the grid lacks the default {rounds.default}: mend benchmarks/autotune/jobs.py")
        with progress.show_progress(console, f"{workload}, grid", len(every) * settings.grid_rounds) as advance:
            found = rounds.measure_rounds(every, settings.grid_rounds, advance)
        medians = [statistics.median(itertools.chain(*cell)) for cell in found]
        short = sorted(range(len(every)), key=medians.__getitem__)[: settings.short_list]
        with progress.show_progress(console, f"{workload}, best of it", len(short) * settings.short_rounds) as advance:
            again = rounds.measure_rounds([every[k] for k in short], settings.short_rounds, advance)
    best = min(range(len(short)), key=lambda k: statistics.median(itertools.chain(*again[k])))
    cells = [
        {"knobs": knobs, "samples": list(itertools.chain(*cell))} for knobs, cell in zip(every, found, strict=True)
    ]
    return every[short[best]], cells, rounds.default


def _run_tuned_job(settings: TunedJobsSettings, workload: str, number: int, console: Console) -> dict[str, Any]:
    """Run a job that the tuner tunes, and return its decision and the cost."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        variables = {
            "ENGINE_AUTOTUNE": "1",
            "ENGINE_AUTOTUNE_LOG": str(log),
            "ENGINE_AUTOTUNE_TRIALS": str(settings.trials),
            "ENGINE_AUTOTUNE_CACHE": "off",
        }
        with (
            progress.show_progress(console, f"{workload}, search {number + 1}", 1) as advance,
            _start_group(settings, workload, f"search{number + 1}", variables) as group,
        ):
            told = group.ask_ranks({"do": "search", "log": str(log), "most": 20_000}, SEARCH_LIMIT)[0]
            advance("over")
        rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        paths.get_output_path(f"logs/autotune-{workload}-{number + 1}.jsonl").write_bytes(log.read_bytes())
    if not told["over"]:
        raise RankError(f"the search of {workload} was not over after {told['steps']} steps")
    final = next(row for row in rows if row.get("final"))
    return {"best": final["knobs"], "trials": final["trials"], "steps": told["steps"], "because": final["because"]}


def _measure_afresh(
    settings: TunedJobsSettings, workload: str, choices: Mapping[str, Knobs], console: Console
) -> list[dict[str, Any]]:
    """Measure each choice again in a new job, with a figure for each round."""
    with _start_group(settings, workload, "afresh", OFF) as group:
        rounds = _Rounds(settings, group)
        with progress.show_progress(console, f"{workload}, afresh", len(choices) * settings.rounds) as advance:
            found = rounds.measure_rounds(list(choices.values()), settings.rounds, advance)
    return [
        {
            "name": name,
            "knobs": knobs,
            "rounds": [statistics.median(block) for block in blocks],
            **Summary.from_samples(list(itertools.chain(*blocks))).record(),
        }
        for (name, knobs), blocks in zip(choices.items(), found, strict=True)
    ]
