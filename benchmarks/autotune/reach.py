"""Result of a whole job: a search of short, noisy trials, and what the tuner finds later while the job runs.

A job is a number of steps. Its search has few trials of few steps. Then the tuner observes in batches, and may make
more trials. The report has the setting at the end of the first search and the one at the end of the job.

    python -m benchmarks.autotune.reach --seeds 100 [--surfaces valley ...] [--steps 10000]

What was tuned on some seeds must be judged on others, `--first-seed`; for a busy machine, use `--noises heavy`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from autotune import Tuner
from benchmarks.autotune import recorded
from benchmarks.autotune.problems import Problem, cut_short, make_problem, select_noises
from benchmarks.autotune.surfaces import NOISES, SHORT, SURFACES

TRIALS = 20
"""Trials of a search."""
STEPS = 10
"""Steps of a trial."""
SETTLING = 2
"""Steps after a change of the knobs that no trial counts."""
WATCHED = 50
"""Steps between two observations after the search."""
OBSERVED = 20
"""Number of these steps that the tuner gets."""
HORIZON = 10_000
"""Steps of a job."""


NEAR = 0.1
"""Regret that at most one job in a hundred should exceed."""


class SimulatedJob:
    """Simulated job: the steps that pass, and their cost.

    It has `horizon` steps, and its search at most `trials` trials of `length` steps.
    """

    def __init__(self, given: Problem, seed: int, horizon: int, trials: int = TRIALS, length: int = STEPS) -> None:
        self.given, self.horizon, self.length = given, horizon, length
        self.rng = np.random.default_rng([seed, 7])
        self.tuner = Tuner(given.space, given.default, seed=seed, max_trials=trials)
        self.standing = given.seconds(given.default)
        self.steps = self.trials = 0
        self.lost = self.thinking = self.longest = 0.0

    def run_trial(self) -> None:
        """Ask for a trial, measure it, and report the result."""
        before = time.process_time()
        asked = self.tuner.ask()
        self.add_time(time.process_time() - before)
        seconds = self.given.seconds(asked.knobs)
        samples, cut = cut_short(self.given.steps(asked.knobs, self.length, self.rng), asked.limit)
        self.lost += max(0.0, seconds / self.given.seconds(self.tuner.best()) - 1.0) * (len(samples) + SETTLING)
        self.steps += len(samples) + SETTLING
        self.trials += 1
        before = time.process_time()
        self.tuner.tell(asked.id, samples.tolist(), "aborted" if cut else "ok")
        self.add_time(time.process_time() - before)

    def add_time(self, seconds: float) -> None:
        """Add processor time of the tuner."""
        self.thinking += seconds
        self.longest = max(self.longest, seconds)

    def run_search(self) -> None:
        """Make trials until there is nothing to try for now."""
        while not self.tuner.done and self.steps < self.horizon:
            self.run_trial()

    def observe_once(self) -> None:
        """Observe the deployed setting once."""
        self.steps += WATCHED
        samples = self.given.steps(self.tuner.best(), OBSERVED, self.rng).tolist()
        before = time.process_time()
        self.tuner.observe(samples, WATCHED)
        self.add_time(time.process_time() - before)


def run_job(
    surface: str, noise: str, seed: int, horizon: int = HORIZON, trials: int = TRIALS, length: int = STEPS
) -> dict[str, Any]:
    """Run one job, from its first trial to its last step."""
    given = make_problem(surface, noise, seed)
    run = SimulatedJob(given, seed, horizon, trials, length)
    run.run_search()
    first, made = given.seconds(run.tuner.best()), run.trials
    while run.steps < horizon:
        run.observe_once()
        run.run_search()
    return {
        "surface": surface,
        "noise": noise,
        "seed": seed,
        "default": run.standing / given.least - 1.0,
        "regret_then": first / given.least - 1.0,
        "regret": given.seconds(run.tuner.best()) / given.least - 1.0,
        "trials_then": made,
        "trials": run.trials,
        "lost": run.lost,
        "changed": run.tuner.best() != given.default,
        "seconds_a_trial": run.thinking / run.trials,
        "longest": run.longest,
    }


HEAD = (
    "surface", "noise", "default's regret", "first search: median", "over 10 %", "at the end: median", "99 %",
    "worst", "over 10 %", "worse than default", "changed", "trials", "lost, median", "lost, most", "ms a trial",
)  # fmt: skip


def format_row(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a row of the table for the jobs of one surface and noise."""
    of = {name: np.array([row[name] for row in rows]) for name in rows[0] if name not in ("surface", "noise")}
    default, then, end = 100 * of["default"], 100 * of["regret_then"], 100 * of["regret"]
    return [
        rows[0]["surface"],
        rows[0]["noise"],
        f"{np.median(default):.1f} %",
        f"{np.median(then):.2f} %",
        f"{np.sum(then > 100 * NEAR)} of {len(rows)}",
        f"{np.median(end):.2f} %",
        f"{np.quantile(end, 0.99):.1f} %",
        f"{end.max():.1f} %",
        f"{np.sum(end > 100 * NEAR)} of {len(rows)}",
        str(int(np.sum(end > default + 1e-6))),
        f"{of['changed'].mean():.0%}",
        f"{np.median(of['trials']):.0f}",
        f"{np.median(of['lost']):.0f} steps",
        f"{of['lost'].max():.0f} steps",
        f"{1e3 * np.median(of['seconds_a_trial']):.1f}",
    ]


def main(arguments: Sequence[str]) -> int:
    """Print the table in Markdown, each row as soon as it is complete."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.autotune.reach", description=__doc__)
    every = (*SURFACES, *recorded.list_names())
    parser.add_argument("--surfaces", nargs="+", choices=every, default=every)
    parser.add_argument("--seeds", type=int, default=100, help="jobs of each kind")
    parser.add_argument("--steps", type=int, default=HORIZON, help="of a job")
    known = tuple(noise.name for noise in (*SHORT, *NOISES))
    parser.add_argument("--noises", nargs="+", choices=known, default=tuple(noise.name for noise in SHORT))
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=TRIALS, help="most of a search")
    parser.add_argument("--trial-steps", type=int, default=STEPS, help="of a trial")
    given = parser.parse_args(arguments)
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for surface in given.surfaces:
        for noise in select_noises(surface, tuple(given.noises)):
            rows = [run_job(surface, noise, seed, given.steps, given.trials, given.trial_steps) for seed in seeds]
            print(f"| {' | '.join(format_row(rows))} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
