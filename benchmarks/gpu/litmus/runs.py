"""Build of the litmus programs, and repeated runs of each."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SKIPPED = 77
HUNG = 30.0  # seconds; a program ends itself after 20, unless it hangs in the driver


@dataclass(frozen=True)
class LitmusRun:
    """Result of a program."""

    name: str
    outcome: str  # "ok", "skipped" (this machine lacks a prerequisite) or "failed"
    text: str  # violated expectation, or missing prerequisite


def build_programs(where: Path) -> Path:
    """Compile the programs into one binary."""
    binary = where / "litmus"
    options = ["-D_GNU_SOURCE", "-std=gnu11", "-O1", "-pthread", f"-I{HERE.parents[2]}"]
    compiler = shlex.split(os.environ.get("CC", "cc"))
    subprocess.run([*compiler, *options, *sorted(HERE.glob("*.c")), "-ldl", "-o", binary], check=True)
    return binary


def list_programs(binary: Path) -> list[str]:
    """Return the names of the programs in the binary."""
    return subprocess.run([binary, "--list"], check=True, text=True, capture_output=True).stdout.split()


def run_programs(binary: Path, times: int, variables: Mapping[str, str] | None = None) -> Iterator[LitmusRun]:
    """Run all programs several times, with additional variables, and yield the result of each."""
    env = {**os.environ, **(variables or {})}
    for name in list_programs(binary):
        runs = [_run_once(binary, name, env) for _ in range(times)]
        failed = [text for status, text in runs if status not in (0, SKIPPED)]
        status, text = runs[0]
        outcome = "failed" if failed else "skipped" if status == SKIPPED else "ok"
        yield LitmusRun(name, outcome, (failed[0] if failed else text).strip().removeprefix("skipped: "))


def _run_once(binary: Path, name: str, env: Mapping[str, str]) -> tuple[int, str]:
    try:
        run = subprocess.run([binary, name], env=env, text=True, stderr=subprocess.PIPE, timeout=HUNG)
    except subprocess.TimeoutExpired:
        return 1, f"it has not ended within {HUNG:.0f} s"
    # A program killed by its alarm prints nothing.
    return run.returncode, run.stderr or (f"it ended with status {run.returncode}" if run.returncode else "")
