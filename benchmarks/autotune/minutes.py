"""Cost of a search that cannot win, as a share of a job of one minute whose default is the best setting.

python -m benchmarks.autotune.minutes [--steps 0.1 0.2 0.5] [--seeds 40] [--first-seed N]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np

from benchmarks.autotune.problems import Problem, make_synthetic_problem
from benchmarks.autotune.reach import STEPS, SimulatedJob
from benchmarks.autotune.surfaces import DEFAULT, get_positions

MINUTE = 60.0  # seconds
TRIALS, LENGTH = 30, 2 * STEPS
"""Trials of a search and steps of a trial, the defaults of the engine."""
ALLOWED = 0.02
"""Share of the minute that a search may lose."""


def make_best_default(step: float) -> Problem:
    """Return a problem whose default takes `step` seconds and all else more, on a busy machine."""
    home, there, _ = get_positions(DEFAULT)

    def step_seconds(knobs: dict[str, object]) -> float:
        a, b, streaming = get_positions(knobs)
        return step * (1 + 1.5 * (a - home) ** 2 + 1.5 * (b - there) ** 2 + 0.04 * streaming)

    return make_synthetic_problem(step_seconds, "heavy")


def run_minute(step: float, seed: int) -> tuple[float, bool]:
    """Run a job of a minute; return the share of it that trials have lost, and whether the default was left."""
    steps = round(MINUTE / step)
    job = SimulatedJob(make_best_default(step), seed, steps, TRIALS, LENGTH)
    while job.steps < steps:
        job.run_search()
        job.observe_once()
    return job.lost / steps, job.tuner.best() != DEFAULT


def main(arguments: Sequence[str]) -> int:
    """Print the table in Markdown, each row as soon as it is complete."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.autotune.minutes", description=__doc__)
    parser.add_argument("--steps", nargs="+", type=float, default=[0.1, 0.2, 0.5], help="seconds of a step")
    parser.add_argument("--seeds", type=int, default=40, help="jobs of each kind")
    parser.add_argument("--first-seed", type=int, default=0)
    given = parser.parse_args(arguments)
    print("| step | lost: median | 90 % | worst | over 2 % | left the default |\n|---|---|---|---|---|---|")
    for step in given.steps:
        found = [run_minute(step, seed) for seed in range(given.first_seed, given.first_seed + given.seeds)]
        lost, left = 100 * np.array([share for share, _ in found]), sum(away for _, away in found)
        over = int(np.sum(lost > 100 * ALLOWED))
        figures = f"{np.median(lost):.2f} % | {np.quantile(lost, 0.9):.1f} % | {lost.max():.1f} %"
        print(f"| {step * 1e3:g} ms | {figures} | {over} of {len(lost)} | {left} of {len(lost)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
