"""Simulated step times as noisy functions of the knobs, for tests of the tuner without training."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from autotune import Choice, Integer, Real, Space, Tuner

SPACE = Space(
    fusion_threshold=Integer(1 << 16, 1 << 30, log=True),
    cycle_time_ms=Real(0.05, 50.0, log=True),
    stores=Choice(["cached", "streaming"]),
)
DEFAULT = {"fusion_threshold": 1 << 27, "cycle_time_ms": 1.0, "stores": "cached"}

Surface = Callable[[dict[str, Any]], float]


def shares(knobs: dict[str, Any]) -> tuple[float, float, bool]:
    """Return the positions of the two numbers in their ranges, from 0 to 1, and whether stores are streaming."""
    at = SPACE.encode(knobs)
    return float(at[0]), float(at[1]), knobs["stores"] == "streaming"


def bowl(threshold: float, cycle: float, streaming: bool) -> Surface:
    """Return a surface with one valley, whose bottom is 0.1 s."""

    def seconds(knobs: dict[str, Any]) -> float:
        a, b, c = shares(knobs)
        return 0.1 * (1 + 0.8 * (a - threshold) ** 2 + 0.6 * (b - cycle) ** 2 + 0.05 * (c != streaming))

    return seconds


def flat(knobs: dict[str, Any]) -> float:
    """Return the same time for all knobs."""
    return 0.1


def cliff(edge: float) -> Surface:
    """Return a surface whose best setting is beside a cliff, beyond which steps take 2.5 times as long."""

    def seconds(knobs: dict[str, Any]) -> float:
        a, b, _ = shares(knobs)
        falls = a < edge - 0.12 or b > 0.8
        return 0.1 * (1 + 0.5 * abs(a - edge) + 0.3 * max(0.0, b - 0.4)) * (2.5 if falls else 1.0)

    return seconds


def measured(
    surface: Surface, knobs: dict[str, Any], rng: np.random.Generator, sd: float = 0.03, n: int = 30
) -> list[float]:
    """Return the times of steps with log-normal noise of relative size `sd`."""
    return [float(each) for each in surface(knobs) * np.exp(rng.normal(0.0, sd, n))]


def search_on(tuner: Tuner, surface: Surface, rng: np.random.Generator, sd: float = 0.03, steps: int = 20_000) -> None:
    """Search as a job of this many steps would: a search that has used up its budget resumes later."""
    search(tuner, surface, rng, sd)
    while tuner.resting and steps > 0:
        tuner.observe(measured(surface, tuner.best(), rng, sd, 20), 200)
        steps -= 200
        if not tuner.done:
            search(tuner, surface, rng, sd)


def search(tuner: Tuner, surface: Surface, rng: np.random.Generator, sd: float = 0.03) -> int:
    """Search to the end as a job would, cut trials short that are too slow, and return the number of trials."""
    trials = 0
    while not tuner.done:
        trial = tuner.ask()
        samples = measured(surface, trial.knobs, rng, sd)
        hopeless = math.log(float(np.median(samples[:3]))) > math.log(trial.limit) if trial.limit < math.inf else False
        tuner.tell(trial.id, samples[:3] if hopeless else samples, "aborted" if hopeless else "ok")
        trials += 1
    return trials
