"""Policies that search: our tuner, two samplers of Optuna, random settings, and Horovod's documented policy.

All have the same number of trials, of which the default is the first, and the same number of steps in a trial. Only our
tuner cuts trials short, measures settings twice, or deploys the default. The others deploy the setting that measured
best, as in their normal use.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune import Tuner
from autotune.policies import Policy, Random
from autotune.space import Choice, Integer, Knob
from benchmarks.autotune.problems import Problem

Array = NDArray[np.float64]
Measure = Callable[[dict[str, Any], float], tuple[Array, bool]]
"""Callable that returns steps of a setting (only three if slower than a limit in seconds), and whether it was cut."""


def _run_policy(policy: Policy, measure: Measure) -> dict[str, Any]:
    """Run a policy that has the tuner's interface."""
    while not policy.done:
        trial = policy.ask()
        samples, cut = measure(trial.knobs, trial.limit)
        policy.tell(trial.id, samples.tolist(), "aborted" if cut else "ok")
    return policy.best()


def search_with_tuner(problem: Problem, seed: int, trials: int, measure: Measure) -> dict[str, Any]:
    """Search with `autotune.Tuner`."""
    return _run_policy(Tuner(problem.space, problem.default, seed=seed, max_trials=trials), measure)


def search_at_random(problem: Problem, seed: int, trials: int, measure: Measure) -> dict[str, Any]:
    """Search with random settings."""
    return _run_policy(Random(problem.space, problem.default, seed, trials), measure)


def _search_with_optuna(problem: Problem, sampler: Any, trials: int, measure: Measure) -> dict[str, Any]:
    import optuna

    logging.getLogger("optuna").setLevel(logging.ERROR)
    study = optuna.create_study(sampler=sampler)
    study.enqueue_trial(_encode_default(problem))
    tried: list[dict[str, Any]] = []

    def measure_trial(trial: Any) -> float:
        tried.append({name: _suggest_value(trial, name, knob) for name, knob in problem.space.knobs.items()})
        return float(np.median(measure(tried[-1], math.inf)[0]))

    study.optimize(measure_trial, n_trials=trials)
    return tried[study.best_trial.number]


def _suggest_value(trial: Any, name: str, knob: Knob) -> Any:
    """Return the value of a knob that Optuna proposes."""
    if isinstance(knob, Choice):
        return trial.suggest_categorical(name, list(knob.values))
    off = knob.off is not None and trial.suggest_categorical(f"{name} is off", [False, True])
    # Suggest a float: GPSampler lists every value of an integer. Suggest it even if off, as GPSampler needs a fixed
    # space.
    value = trial.suggest_float(name, knob.low, knob.high, log=knob.log)
    return knob.off if off else round(value) if isinstance(knob, Integer) else value


def _encode_default(problem: Problem) -> dict[str, Any]:
    """Return the default as Optuna's parameters."""
    found = {}
    for name, knob in problem.space.knobs.items():
        value = problem.default[name]
        if not isinstance(knob, Choice) and knob.off is not None:
            found[f"{name} is off"] = value == knob.off
            value = knob.low if value == knob.off else value
        found[name] = value
    return found


def search_with_gp(problem: Problem, seed: int, trials: int, measure: Measure) -> dict[str, Any]:
    """Search with Optuna's GPSampler."""
    import optuna

    return _search_with_optuna(problem, optuna.samplers.GPSampler(seed=seed), trials, measure)


def search_with_tpe(problem: Problem, seed: int, trials: int, measure: Measure) -> dict[str, Any]:
    """Search with Optuna's TPESampler."""
    import optuna

    return _search_with_optuna(problem, optuna.samplers.TPESampler(seed=seed), trials, measure)


MEBIBYTES, MILLISECONDS = 64.0, 100.0  # ends of the ranges, which begin at 0 and 1
STARTS = ((4.0, 5.0), (32.0, 50.0), (16.0, 25.0), (8.0, 10.0))
ALPHA = 0.8  # documented default of --autotune-gaussian-process-noise


HOROVODS = ("fusion_threshold", "cycle_time_ms")
"""Knobs that Horovod's policy tunes. It is not run on surfaces without both."""


def search_like_horovod(problem: Problem, seed: int, trials: int, measure: Measure) -> dict[str, Any]:
    """Search with Horovod's policy, reimplemented from its documentation; its own default is not tried.

    The threshold is 0 to 64 MB and the cycle time 1 to 100 ms, both linear. Four fixed settings are followed by
    expected improvement under a Gaussian process with noise 0.8; the single best score wins. Horovod maximizes bytes
    per time, which for a fixed number of bytes gives the same order as times do.
    """
    rng = np.random.default_rng([seed, 6])
    seen: list[tuple[float, float]] = []
    scores: list[float] = []
    for point in _propose_like_horovod(seen, scores, rng):
        if len(seen) == trials:
            break
        knobs = _clamp_knobs(problem, point)
        seen.append(point)
        scores.append(1.0 / float(np.mean(measure(knobs, math.inf)[0])))
    return _clamp_knobs(problem, seen[int(np.argmax(scores))])


def _clamp_knobs(problem: Problem, point: tuple[float, float]) -> dict[str, Any]:
    """Return Horovod's knobs clamped to the ranges of the space, with the default for the other knobs."""
    values = round(point[0] * (1 << 20)), point[1]
    knobs = [problem.space.knobs[name] for name in HOROVODS]
    within = [min(max(value, knob.low), knob.high) for value, knob in zip(values, knobs, strict=True)]
    return {**problem.default, **dict(zip(HOROVODS, within, strict=True))}


def _propose_like_horovod(
    seen: list[tuple[float, float]], scores: list[float], rng: Any
) -> Iterator[tuple[float, float]]:
    from scipy.special import ndtr

    yield from STARTS
    while True:
        x = np.array(seen) / (MEBIBYTES, MILLISECONDS)
        y = (np.array(scores) - np.mean(scores)) / (np.std(scores) or 1.0)
        points = rng.random((512, 2))
        kernel = np.exp(-0.5 * ((x[:, None] - x[None]) ** 2).sum(axis=2)) + ALPHA**2 * np.eye(len(x))
        cross = np.exp(-0.5 * ((points[:, None] - x[None]) ** 2).sum(axis=2))
        mean = cross @ np.linalg.solve(kernel, y)
        deviation = np.sqrt(np.maximum(1.0 - np.einsum("ij,ji->i", cross, np.linalg.solve(kernel, cross.T)), 1e-12))
        z = (mean - y.max()) / deviation
        improvement = deviation * (z * ndtr(z) + np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi))
        best = points[int(np.argmax(improvement))]
        yield float(best[0] * MEBIBYTES), float(max(1.0, best[1] * MILLISECONDS))


CONTENDERS = {
    "ours": search_with_tuner,
    "optuna_gp": search_with_gp,
    "optuna_tpe": search_with_tpe,
    "random": search_at_random,
    "horovod": search_like_horovod,
}
