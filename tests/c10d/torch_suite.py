"""Comparison of backends by the suite that torch's wheel carries: what gloo passes, the engine passes too.

    python -m tests.c10d.torch_suite [--cases PATTERN] [--ranks 3]

Tests run on gloo, and those that it passes on the engine. A table at the end names the differences; the command fails
if there is one without a reason in `CANNOT`, or if a reason is out of date.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from .jobs import ROOT
from .torch_cases import LONGEST, list_cases

OUTPUT = 4000  # characters of a failed case's output that are shown

_TWO_NAMES = "the case makes its model if the backend is named nccl or gloo, and has none on another"
_MONITORED = "torch's monitored_barrier refuses every backend that is not named gloo"
_WORDS = "the case looks for gloo's words in the error of monitored_barrier"
CANNOT = {
    "test_accumulate_gradients_no_sync": _TWO_NAMES,
    "test_accumulate_gradients_no_sync_allreduce_hook": _TWO_NAMES,
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook": _TWO_NAMES,
    "test_accumulate_gradients_no_sync_grad_is_view": _TWO_NAMES,
    "test_monitored_barrier_failure_order": _MONITORED,
    "test_monitored_barrier_gloo": _MONITORED,
    "test_monitored_barrier_gloo_rank_0_timeout": _WORDS,
    "test_monitored_barrier_gloo_subgroup": _MONITORED,
    "test_monitored_barrier_wait_all_ranks": _MONITORED,
}
"""Tests that gloo passes and the engine cannot, each with its reason."""

Results = dict[str, dict[str, str]]


def run_cases(backend: str, names: list[str], ranks: int) -> Results:
    """Run cases on a backend in a process; return their results by name. A case that was not reached has none."""
    with tempfile.TemporaryDirectory(prefix="torch-suite-") as directory:
        command = [sys.executable, "-m", "tests.c10d.torch_cases", backend, directory, *names]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ENGINE_")}
        environment = kept | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks)}
        try:
            ended = subprocess.run(command, cwd=ROOT, env=environment, timeout=LONGEST * len(names), check=False)
            if ended.returncode:
                print(f"{backend}: the process of the cases has ended with {ended.returncode}")
        except subprocess.TimeoutExpired as error:
            print(f"{backend}: {error}")
        written = Path(directory, f"{backend}.jsonl")
        lines = written.read_text(encoding="utf-8").splitlines() if written.exists() else []
    found = map(json.loads, lines)
    return {each["case"]: each for each in found}


def compare_results(gloo: Results, engine: Results, names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield what is wrong, as a case and a text."""
    for name in names:
        if name not in gloo:
            yield name, "has not run on gloo"
        elif gloo[name]["outcome"] == "failed":
            yield name, "fails on gloo, so it says nothing here"
    for name in (name for name in names if name in gloo and gloo[name]["outcome"] == "passed"):
        outcome = engine[name]["outcome"] if name in engine else "has not run"
        if name in CANNOT and outcome == "passed":
            yield name, "passes on the engine: it needs no reason in CANNOT any more"
        elif name not in CANNOT and outcome != "passed":
            yield name, f"passes on gloo; on the engine: {outcome}"


def print_table(gloo: Results, engine: Results) -> None:
    for backend, results in (("gloo", gloo), ("engine", engine)):
        counts = Counter("cannot" if _is_excused(backend, each) else each["outcome"] for each in results.values())
        words = ("passed", "failed", "cannot", "skipped")
        print(f"{backend:>8}  " + "  ".join(f"{word} {counts[word]:3}" for word in words))
    by_reason: dict[str, list[str]] = {}
    for name in sorted(name for name, each in engine.items() if _is_excused("engine", each)):
        by_reason.setdefault(CANNOT[name], []).append(name)
    for reason, found in by_reason.items():
        print(f"  cannot: {reason}:", *found, sep="\n    ")


def _is_excused(backend: str, result: dict[str, str]) -> bool:
    return backend == "engine" and result["case"] in CANNOT and result["outcome"] != "passed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", default="*", metavar="PATTERN", help="cases with such names, as of a shell")
    parser.add_argument("--ranks", type=int, default=3)
    arguments = parser.parse_args()
    names = fnmatch.filter(list_cases(), arguments.cases)
    if not names:
        parser.error(f"no case has a name like {arguments.cases!r}")
    gloo = run_cases("gloo", names, arguments.ranks)
    passed = [name for name in names if name in gloo and gloo[name]["outcome"] == "passed"]
    engine = run_cases("engine", passed, arguments.ranks) if passed else {}
    wrong = list(compare_results(gloo, engine, names))
    for name, _ in wrong:
        result = engine.get(name) or gloo.get(name) or {"text": "", "output": ""}
        print(f"---- {name}\n{result['output'][-OUTPUT:]}\n{result['text'][-OUTPUT:]}")
    print_table(gloo, engine)
    for name, text in wrong:
        print(f"  WRONG: {name}: {text}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
