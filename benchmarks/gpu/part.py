"""Process of one part: `python -m benchmarks.gpu.part NAME --out FILE ...`, started by `run.py`.

A part that crashes or hangs does not lose other parts' results, and of its own only those not reported yet.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Skipped(Exception):
    """Signal that a part, or a piece of one, cannot be measured here; the text gives the reason."""


@dataclass(frozen=True)
class Task:
    """Task of a part."""

    here: dict[str, Any]  # result of `here.describe_machine`
    end: float  # time by `time.monotonic` at which the part should have ended; it is killed somewhat later
    quick: bool  # whether to use few samples and small sizes
    tell: Callable[[dict[str, Any]], None]  # stores the results so far, a dict with all of them each time

    @property
    def left(self) -> float:
        """Remaining seconds."""
        return self.end - time.monotonic()

    def pick_amount(self, quick: int, whole: int) -> int:
        """Return the amount to measure: `quick` on the stand-in, too, where times mean nothing."""
        return quick if self.quick or self.here["stand_in"] else whole


def write(file: Path, content: dict[str, Any]) -> None:
    """Replace a record atomically."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.replace(file)


def run_part(name: str, task: Task) -> dict[str, Any]:
    """Run a part to its end: its `outcome`, its results, errors (`problems`), and the rest (`unfinished`)."""
    kept: dict[str, Any] = {}

    def tell(found: dict[str, Any]) -> None:
        kept.update(found)
        task.tell(kept)

    try:
        module = importlib.import_module(f"benchmarks.gpu.{name}")
        kept.update(module.measure_part(Task(task.here, task.end, task.quick, tell)))
    except Skipped as error:
        return kept | {"outcome": "skipped", "why": str(error)}
    except Exception as error:
        text = traceback.format_exc()
        return kept | {"outcome": "failed", "why": f"{type(error).__name__}: {error}", "traceback": text}
    problems = kept.get("problems") or []
    if problems:
        return kept | {"outcome": "failed", "why": problems[0]}
    left = kept.get("unfinished") or ""
    return kept | {"outcome": "partial" if left else "ok", "why": left}


def main() -> None:
    """Measure the part that the command line names."""
    faulthandler.enable()
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--here", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    here = json.loads(options.here.read_text(encoding="utf-8"))

    def tell(found: dict[str, Any]) -> None:
        write(options.out, found | {"outcome": "unfinished", "why": ""})

    task = Task(here, time.monotonic() + options.seconds, options.quick, tell)
    write(options.out, run_part(options.name, task))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # skips the unloading of libraries, which is not measured


if __name__ == "__main__":
    main()
