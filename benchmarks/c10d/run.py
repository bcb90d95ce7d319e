"""torch.distributed on the engine and on gloo, in turns: reductions, messages between two ranks, and new groups."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.common import binding, environment, progress, records, stats
from benchmarks.common.processes import Group
from benchmarks.common.tables import MISSING, Table, format_duration, format_size

KIB, MIB = 1 << 10, 1 << 20
BACKENDS = ("engine", "gloo")
OWN = "engine.allreduce_"
CASES = (
    (OWN, 4 * KIB),
    *((case, nbytes) for nbytes in (4 * KIB, MIB, 25 * MIB) for case in ("allreduce", "allreduce with a future")),
    *(("ping-pong", nbytes) for nbytes in (4 * KIB, 25 * MIB)),
    *(("both directions", nbytes) for nbytes in (MIB, 25 * MIB)),
    ("new_group", 0),
    ("FSDP2 step, GPT", 0),
)
"""Calls and bytes of a message; a round trip of ping-pong is two. The first is the engine's own, and not of gloo."""


@dataclass(frozen=True)
class TorchSettings:
    """Measurements to make, and their duration."""

    rounds: int = 10
    most: int = 200
    block_bytes: int = 100 * MIB
    """Bytes of all messages of a block; `most` bounds its iterations, too."""


def run(settings: TorchSettings, console: Console) -> Path:
    """Measure, and write `out/c10d.json`."""
    before = environment.record()
    begun = time.perf_counter()
    processors = binding.list_processors()
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        groups = {
            name: stack.enter_context(
                Group(f"c10d-{name}", 2, "benchmarks.c10d.worker", ["--backend", name], "plain", processors)
            )
            for name in BACKENDS
        }
        with progress.show_progress(console, "2 ranks", len(CASES) * settings.rounds) as advance:
            for case, nbytes in CASES:
                rows += _measure_case(settings, groups, case, nbytes, advance)
    seconds = round(time.perf_counter() - begun, 1)
    return records.write("c10d", asdict(settings), before, {"results": rows, "seconds": seconds})


def _measure_case(
    settings: TorchSettings, groups: dict[str, Group], case: str, nbytes: int, advance: progress.Advance
) -> list[dict[str, Any]]:
    iterations = 3 if not nbytes else max(2, min(settings.most, settings.block_bytes // nbytes))
    request = {"do": "block", "case": case, "bytes": nbytes, "iterations": iterations}
    backends = BACKENDS[:1] if case == OWN else BACKENDS
    blocks: dict[str, list[list[float]]] = {name: [] for name in backends}
    for number in range(settings.rounds):
        for name in sorted(backends, reverse=number % 2 == 1):
            answers = groups[name].ask_ranks(request)
            blocks[name].append([max(ranks) for ranks in zip(*answers, strict=True)])
        advance(f"{case} {format_size(nbytes)}" if nbytes else case)
    medians = {name: [float(np.median(block)) for block in blocks[name]] for name in backends}
    return [
        {
            "case": case,
            "bytes": nbytes,
            "backend": name,
            "round_medians": medians[name],
            "ratio": stats.estimate_ratio(medians[name], medians[backends[-1]]).record(),
            **stats.Summary.from_samples([seconds for block in blocks[name] for seconds in block]).record(),
        }
        for name in backends
    ]


def build_tables(content: dict[str, Any]) -> list[Table]:
    """Return the table of `out/c10d.json`."""
    rows = {(row["case"], row["bytes"], row["backend"]): row for row in content["results"]}
    table = Table(
        "torch.distributed, 2 ranks of one host: median (p99)", ["call", "message", *BACKENDS, "of gloo's time"]
    )
    for case, nbytes in dict.fromkeys((row["case"], row["bytes"]) for row in content["results"]):
        own = [rows.get((case, nbytes, name)) for name in BACKENDS]
        cells = [f"{format_duration(row['median'])} ({format_duration(row['p99'])})" if row else MISSING for row in own]
        share = MISSING
        if all(own):
            ratio = rows[case, nbytes, BACKENDS[0]]["ratio"]
            share = f"{ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
        table.rows.append([case, format_size(nbytes) if nbytes else "", *cells, share])
    table.note = f"Brackets: 95 % bootstrap interval over rounds. {environment.describe(content['environment'])}"
    return [table]
