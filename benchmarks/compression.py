"""Cost of compression on a fast transport: allreduces over shared memory, uncompressed, as halves and as fp8."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.collective.contenders import GroupContender
from benchmarks.common import binding, environment, progress, records, stats
from benchmarks.common.tables import Table, format_duration, format_size

BOUND = 1.1
"""Maximum time of a compressed allreduce, in multiples of the uncompressed one."""


@dataclass(frozen=True)
class CompressionSettings:
    """Measurements to make, and their duration."""

    ranks: int = 2
    nbytes: int = 100 << 20
    rounds: int = 48
    warmup: int = 1
    iterations: int = 4
    first: int = 10
    """Number of untimed iterations of each variant before the rounds."""


def run(settings: CompressionSettings, console: Console) -> Path:
    """Measure, and write `out/compression.json`."""
    before = environment.record()
    begun = time.perf_counter()
    contender = GroupContender("compression", settings.ranks, 1 << 12, binding.list_processors())
    try:
        with progress.show_progress(
            console, f"{settings.ranks} ranks", len(contender.cases) * settings.rounds
        ) as advance:
            results = measure_cases(settings, contender, advance)
    finally:
        contender.close()
    seconds = round(time.perf_counter() - begun, 1)
    return records.write("compression", asdict(settings), before, {"results": results, "seconds": seconds})


def measure_cases(
    settings: CompressionSettings, contender: GroupContender, advance: progress.Advance
) -> list[dict[str, Any]]:
    """Measure all cases of a contender in turns, and return a row for each; ratios are to the first case."""
    cases = contender.cases
    blocks: dict[str, list[list[float]]] = {case: [] for case in cases}
    for case in cases:  # lets the engine choose the kind of store
        contender.time_block(case, settings.nbytes, 0, settings.first)
    for number in range(settings.rounds):
        for k in range(len(cases)):
            case = cases[(number + k) % len(cases)]
            blocks[case].append(contender.time_block(case, settings.nbytes, settings.warmup, settings.iterations))
            advance(case)
    medians = {case: [float(np.median(block)) for block in blocks[case]] for case in cases}
    return [
        {
            "case": case,
            "round_medians": medians[case],
            "ratio": stats.estimate_ratio(medians[case], medians[cases[0]]).record(),
            **stats.Summary.from_samples([seconds for block in blocks[case] for seconds in block]).record(),
        }
        for case in cases
    ]


def build_tables(content: dict[str, Any]) -> list[Table]:
    """Return the table of `out/compression.json`."""
    settings = content["settings"]
    title = f"Allreduce of {format_size(settings['nbytes'])} of float32, {settings['ranks']} ranks, by compression"
    table = Table(title, ["compression", "median", "p99", "least", "ratio of medians", f"at most {BOUND}"])
    for row in content["results"]:
        ratio = row["ratio"]
        cells = [format_duration(row[name]) for name in ("median", "p99", "least")]
        cells.append(f"{ratio['value']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})")
        table.rows.append([row["case"], *cells, "pass" if ratio["value"] <= BOUND else "miss"])
    table.note = environment.describe(content["environment"])
    return [table]
