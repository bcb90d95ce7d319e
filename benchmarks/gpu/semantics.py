"""Part `litmus`: check that the driver gives the guarantees of the tests' stand-in, on which all else relies."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.litmus import runs
from benchmarks.gpu.part import Skipped, Task


def measure_part(task: Task) -> dict[str, Any]:
    """Run every litmus program.

    Returns `counts`: number of programs by outcome; `skipped`: programs, with what they lack; `problems`: failed
    programs, with the place; `unfinished`: number of programs that were not run.
    """
    times = task.pick_amount(1, 2)
    counts = {"ok": 0, "skipped": 0, "failed": 0, "not run": 0}
    found: dict[str, Any] = {"counts": counts, "times": times, "skipped": {}, "problems": []}
    with tempfile.TemporaryDirectory() as scratch:
        binary = runs.build_programs(Path(scratch))
        counts["not run"] = len(runs.list_programs(binary))
        nccl = task.here.get("nccl_library")
        for run in runs.run_programs(binary, times, {"ENGINE_NCCL_LIBRARY": str(nccl)} if nccl else None):
            counts[run.outcome] += 1
            counts["not run"] -= 1
            if run.outcome == "skipped":
                found["skipped"][run.name] = run.text
            elif run.outcome == "failed":
                found["problems"].append(f"{run.name}: {run.text}")
            task.tell(found)
            if task.left < 0:
                break
    if not counts["ok"] and not counts["failed"]:
        raise Skipped(next(iter(found["skipped"].values()), "there are no programs"))
    if counts["not run"]:
        found["unfinished"] = f"{counts['not run']} programs were not run: the time was over"
    return found
