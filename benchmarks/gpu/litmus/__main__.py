"""Command `python -m benchmarks.gpu.litmus`: run the litmus programs with this machine's driver."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.litmus import runs

TIMES = 5


def main() -> int:
    """Run all programs, and return the exit status: 1 if one failed, or none could run."""
    counts = {"ok": 0, "skipped": 0, "failed": 0}
    with tempfile.TemporaryDirectory() as scratch:
        for run in runs.run_programs(runs.build_programs(Path(scratch)), TIMES):
            counts[run.outcome] += 1
            print(f"{run.outcome:<8} {run.name:<55} {run.text}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return 1 if counts["failed"] or not counts["ok"] else 0


if __name__ == "__main__":
    sys.exit(main())
