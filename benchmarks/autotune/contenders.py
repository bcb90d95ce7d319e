"""What searches: our tuner, two of Optuna's samplers, random settings, and Horovod's policy as its documentation tells.

All have the same number of trials, of which the default is the first, and the same number of steps in a trial. Only our
tuner cuts trials short, measures anything twice, or deploys the default; the others deploy what has measured best, as
they are used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune import Tuner
from benchmarks.autotune.surfaces import DEFAULT, SPACE

Array = NDArray[np.float64]
Measure = Callable[[dict[str, Any], float], tuple[Array, bool]]
"""Steps of a setting; given a limit in seconds (0 for none), three of them if they are slower. Whether it was cut."""


def ours(seed: int, trials: int, measure: Measure) -> dict[str, Any]:
    """`autotune.Tuner`."""
    tuner = Tuner(SPACE, DEFAULT, seed=seed, max_trials=trials)
    while not tuner.done:
        trial = tuner.ask()
        samples, cut = measure(trial.knobs, trial.limit)
        tuner.tell(trial.id, samples.tolist(), "aborted" if cut else "ok")
    return tuner.best()


def _optuna(sampler: Any, trials: int, measure: Measure) -> dict[str, Any]:
    import optuna

    logging.getLogger("optuna").setLevel(logging.ERROR)
    study = optuna.create_study(sampler=sampler)
    study.enqueue_trial(DEFAULT)

    def objective(trial: Any) -> float:
        knobs = {
            # As a real number: of an integer GPSampler lists every value.
            "fusion_threshold": round(trial.suggest_float("fusion_threshold", 1 << 16, 1 << 30, log=True)),
            "cycle_time_ms": trial.suggest_float("cycle_time_ms", 0.05, 50.0, log=True),
            "stores": trial.suggest_categorical("stores", ["cached", "streaming"]),
        }
        return float(np.median(measure(knobs, 0.0)[0]))

    study.optimize(objective, n_trials=trials)
    return study.best_params | {"fusion_threshold": round(study.best_params["fusion_threshold"])}


def optuna_gp(seed: int, trials: int, measure: Measure) -> dict[str, Any]:
    """Optuna's GPSampler."""
    import optuna

    return _optuna(optuna.samplers.GPSampler(seed=seed), trials, measure)


def optuna_tpe(seed: int, trials: int, measure: Measure) -> dict[str, Any]:
    """Optuna's TPESampler."""
    import optuna

    return _optuna(optuna.samplers.TPESampler(seed=seed), trials, measure)


def random(seed: int, trials: int, measure: Measure) -> dict[str, Any]:
    """Settings drawn at random."""
    rng = np.random.default_rng([seed, 5])
    tried = [DEFAULT, *(SPACE.decode(row) for row in SPACE.spread(rng.random((trials - 1, 3))))]
    scores = [float(np.median(measure(knobs, 0.0)[0])) for knobs in tried]
    return tried[int(np.argmin(scores))]


MEBIBYTES, MILLISECONDS = 64.0, 100.0  # the ranges, from 0 and 1
STARTS = ((4.0, 5.0), (32.0, 50.0), (16.0, 25.0), (8.0, 10.0))
ALPHA = 0.8  # the documented default of --autotune-gaussian-process-noise


def horovod(seed: int, trials: int, measure: Measure) -> dict[str, Any]:
    """What Horovod's documentation tells of its policy, re-stated: no code of it, and its own default is not tried.

    Threshold 0 to 64 MB and cycle time 1 to 100 ms, both linear; four fixed settings, then expected improvement under a
    Gaussian process with noise 0.8; the single best score wins. It maximizes bytes per time, which for a fixed number
    of bytes orders settings as their times do.
    """
    rng = np.random.default_rng([seed, 6])
    seen: list[tuple[float, float]] = []
    scores: list[float] = []
    for point in _horovods(seen, scores, rng):
        if len(seen) == trials:
            break
        knobs = _of_horovod(point)
        seen.append(point)
        scores.append(1.0 / float(np.mean(measure(knobs, 0.0)[0])))
    return _of_horovod(seen[int(np.argmax(scores))])


def _of_horovod(point: tuple[float, float]) -> dict[str, Any]:
    threshold = max(1 << 16, round(point[0] * (1 << 20)))
    return {"fusion_threshold": threshold, "cycle_time_ms": min(point[1], 50.0), "stores": "cached"}


def _horovods(seen: list[tuple[float, float]], scores: list[float], rng: Any) -> Iterator[tuple[float, float]]:
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


CONTENDERS = {each.__name__: each for each in (ours, optuna_gp, optuna_tpe, random, horovod)}
