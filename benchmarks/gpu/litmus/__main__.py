"""Runs the litmus programs with this machine's driver: `python -m benchmarks.gpu.litmus`."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SKIPPED = 77
TIMES = 5


def main() -> int:
    counts = {"ok": 0, "skipped": 0, "failed": 0}
    with tempfile.TemporaryDirectory() as scratch:
        binary = Path(scratch, "litmus")
        options = ["-D_GNU_SOURCE", "-std=gnu11", "-O1", "-pthread", f"-I{HERE.parents[2]}"]
        compiler = shlex.split(os.environ.get("CC", "cc"))
        subprocess.run([*compiler, *options, *HERE.glob("*.c"), "-ldl", "-o", binary], check=True)
        for name in subprocess.run([binary, "--list"], check=True, text=True, capture_output=True).stdout.split():
            runs = [subprocess.run([binary, name], text=True, stderr=subprocess.PIPE) for _ in range(TIMES)]
            failed = [run for run in runs if run.returncode not in (0, SKIPPED)]
            outcome = "failed" if failed else "skipped" if runs[0].returncode == SKIPPED else "ok"
            counts[outcome] += 1
            text = failed[0].stderr if failed else runs[0].stderr
            print(f"{outcome:<8} {name:<55} {text.strip()}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return 1 if counts["failed"] or not counts["ok"] else 0


if __name__ == "__main__":
    sys.exit(main())
