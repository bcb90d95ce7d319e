"""Part `steps`: cost of the engine in a training step on the GPU, beside DDP over NCCL, in a world of one rank.

`python -m benchmarks.gpu.steps DIRECTORY SECONDS ROUNDS WORKLOAD` is the rank. With one rank nothing has to be summed.
So it measures hooks, events, packing, and the order of these. DDP's NCCL and the engine can share a process here, as
with one rank neither waits for another rank.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import stats
from benchmarks.gpu import ranks
from benchmarks.gpu.part import Task

FLOOR, PEER, OURS = "floor", "ddp", "engine"
VARIANTS = (FLOOR, PEER, OURS)
WARMUP = 5
BLOCK = 0.3  # seconds
MOST = 60  # steps of a block
TOLERANCE = 1e-2
"""Tolerance of parameters relative to DDP's after the warm-up, as GPU kernels add in no fixed order."""


def measure_part(task: Task) -> dict[str, Any]:
    """Measure every workload in a process of its own.

    Returns `workloads`: result of `compare_variants`, by name; and `problems`: errors.
    """
    from benchmarks.gpu.training import WORKLOADS

    found: dict[str, Any] = {"workloads": {}, "problems": []}
    for number, name in enumerate(WORKLOADS):
        seconds = task.left / (len(WORKLOADS) - number)
        with tempfile.TemporaryDirectory() as scratch:
            arguments = [scratch, str(0.6 * seconds), str(task.pick_amount(4, 12)), name]
            try:
                with ranks.Ranks("benchmarks.gpu.steps", 1, arguments) as job:
                    job.end(seconds)
            except ranks.RankProcessError as error:
                found["problems"].append(f"{name}: {error}")
                continue
            told = json.loads(Path(scratch, "0.json").read_text(encoding="utf-8"))
        found["workloads"][name] = told
        if not told["difference"] <= TOLERANCE:
            off = f"{told['difference']:.2g} of their size"
            found["problems"].append(f"{name}: after {WARMUP} steps the parameters differ from DDP's by {off}")
        task.tell(found)
    return found


def compare_variants(block: Callable[[str, int], float], warm: float, rounds: int, end: float) -> dict[str, Any]:
    """Measure the variants in turns; each round begins with another one.

    `block` takes steps of a variant, and returns the seconds of one. `warm`, the seconds of a step, decides how many a
    block has. After `end`, by `time.monotonic`, no round begins except the first two.

    Returns `steps` of a block; `rounds`: seconds of a step, by variant; `ratio`: the engine's median to DDP's; and
    `overheads`: seconds of both above the floor. Ratio and overheads have intervals.
    """
    steps = int(min(MOST, max(2, BLOCK / warm)))
    taken: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for number in range(rounds):
        if number >= 2 and time.monotonic() > end:
            break
        for turn in range(len(VARIANTS)):
            name = VARIANTS[(turn + number) % len(VARIANTS)]
            block(name, 1)
            taken[name].append(block(name, steps))
    return {
        "steps": steps,
        "rounds": taken,
        "ratio": stats.estimate_ratio(taken[OURS], taken[PEER]).record(),
        "overheads": {name: stats.estimate_overhead(taken[name], taken[FLOOR]).record() for name in (PEER, OURS)},
    }


def measure_workload(name: str, where: Path, rounds: int, seconds: float, device: str = "cuda:0") -> dict[str, Any]:
    """Measure one workload in this process; return the result of `compare_variants` and describe the workload."""
    from benchmarks.gpu import training

    end = time.monotonic() + seconds
    engine = training.join(where, device)
    workload = training.WORKLOADS[name]
    bench = training.WorkloadBench(workload, VARIANTS, device)
    warm = 0.0
    for variant in VARIANTS:
        bench.time_block(variant, 1)
        warm = bench.time_block(variant, WARMUP - 1)
    difference = bench.compute_difference(OURS, PEER)
    found = compare_variants(bench.time_block, warm, rounds, end)
    engine.shutdown()
    return {"title": workload.title, **bench.size(), "difference": difference, **found}


def run_rank(train: Callable[[str, Path, int, float], dict[str, Any]]) -> None:
    """Run as the rank that the command line describes, and write its measurements.

    `train` gets the workload's name, the directory, the number of rounds and the seconds.
    """
    where, seconds, rounds, name = sys.argv[1:]
    told = train(name, Path(where), int(rounds), float(seconds))
    Path(where, "0.json").write_text(json.dumps(told), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    run_rank(measure_workload)
