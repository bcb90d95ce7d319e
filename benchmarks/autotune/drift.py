"""Surface that changes after the search: how soon the tuner notices, and what it then finds.

The tuner observes the deployed setting in batches. After `QUIET` of them, or at once, the surface changes: its minimum
moves, and the deployed setting becomes slower or faster by `CHANGE`. The tuner goes on until it reopens the search, and
this search ends by itself. Without a change, each reopened search is a false alarm. The other policies do not notice
changes, so they are not run: they would stay at the regret before the new search.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from autotune import Settings, Tuner
from benchmarks.autotune.problems import Problem, cut_short, make_synthetic_problem
from benchmarks.autotune.surfaces import SURFACES, Surface

CHANGE = 0.1  # share of the time of a step
BATCH = 20
"""Steps of a batch that rank 0 observes."""
QUIET = 10
"""Batches before the change, after which the tuner's reference is as certain as it gets."""
KINDS = {
    "slower": (1.0 + CHANGE, QUIET),
    "faster": (1.0 - CHANGE, QUIET),
    "slower at once": (1.0 + CHANGE, 0),
    "none": (1.0, 0),
}
"""Factor of the deployed setting's step time, and the batches before it applies."""
DRIFTING = ("valley", "narrow")
ELSEWHERE = 1000
"""Offset of the seed for the surface after a drift."""


def run_search(
    surface: str, noise: str, kind: str, seed: int, trials: int, steps: int, observed: int, horizon: int
) -> dict[str, Any]:
    """Run one search, observe the result through a change, and return the row of the record."""
    rng = np.random.default_rng([seed, 7])
    before = make_synthetic_problem(SURFACES[surface](seed), noise)
    tuner = Tuner(before.space, before.default, seed=seed, max_trials=trials, settings=Settings(background=0))
    _finish(tuner, before, steps, rng)
    row: dict[str, Any] = {"surface": surface, "noise": noise, "kind": kind, "seed": seed}
    factor, quiet = KINDS[kind]
    alarms = _collect_alarms(tuner, before, steps, quiet if factor != 1.0 else observed // BATCH, rng)
    row["alarms"] = alarms
    if factor == 1.0:
        return row
    deployed = tuner.best()
    seconds = factor * before.seconds(deployed)
    after = make_synthetic_problem(_scale_surface(SURFACES[surface](seed + ELSEWHERE), deployed, seconds), noise)
    left = after.seconds(deployed)
    regret = left / after.least - 1.0
    noticed = _count_steps_to_alarm(tuner, after, observed // BATCH, rng)
    if noticed is None:
        return row | {"noticed": None, "regret": regret, "regret_before": regret}
    made, lost = _finish(tuner, after, steps, rng)
    return row | {
        "noticed": noticed,
        "trials": made,
        "regret": after.seconds(tuner.best()) / after.least - 1.0,
        "regret_before": regret,
        "lost": lost / (horizon * left),
    }


def _finish(tuner: Tuner, problem: Problem, steps: int, rng: np.random.Generator) -> tuple[int, float]:
    """Continue until the search is over; return the trials, and the seconds lost against the deployed setting."""
    standing, trials, lost = problem.seconds(tuner.best()), 0, 0.0
    while not tuner.done:
        trial = tuner.ask()
        samples, cut = cut_short(problem.steps(trial.knobs, steps, rng), trial.limit)
        tuner.tell(trial.id, samples.tolist(), "aborted" if cut else "ok")
        lost += max(0.0, problem.seconds(trial.knobs) - standing) * len(samples)
        trials += 1
    return trials, lost


def _collect_alarms(tuner: Tuner, problem: Problem, steps: int, batches: int, rng: np.random.Generator) -> list[int]:
    """Return the steps after which the tuner reopened the search, for each time."""
    found: list[int] = []
    left = batches
    while (noticed := _count_steps_to_alarm(tuner, problem, left, rng)) is not None:
        found.append(noticed)
        left -= noticed // BATCH
        _finish(tuner, problem, steps, rng)
    return found


def _count_steps_to_alarm(tuner: Tuner, problem: Problem, batches: int, rng: np.random.Generator) -> int | None:
    """Observe until the search is reopened; return the number of steps, or None if it is not."""
    for batch in range(1, batches + 1):
        if tuner.observe(problem.steps(tuner.best(), BATCH, rng).tolist()):
            return batch * BATCH
    return None


def _scale_surface(surface: Surface, deployed: dict[str, Any], seconds: float) -> Surface:
    """Return a surface scaled so that the deployed setting takes the given seconds."""
    factor = seconds / surface(deployed)
    return lambda knobs: factor * surface(knobs)
