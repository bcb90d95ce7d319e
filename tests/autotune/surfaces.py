"""Step times as functions of the knobs, with noise: what the tuner is tried on where nothing is trained."""

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
    """Where the two numbers lie in their ranges, and whether stores are streaming."""
    at = SPACE.encode(knobs)
    return float(at[0]), float(at[1]), knobs["stores"] == "streaming"


def bowl(threshold: float, cycle: float, streaming: bool) -> Surface:
    """One valley, whose bottom is 0.1 s."""

    def seconds(knobs: dict[str, Any]) -> float:
        a, b, c = shares(knobs)
        return 0.1 * (1 + 0.8 * (a - threshold) ** 2 + 0.6 * (b - cycle) ** 2 + 0.05 * (c != streaming))

    return seconds


def flat(knobs: dict[str, Any]) -> float:
    """Nothing matters."""
    return 0.1


def cliff(edge: float) -> Surface:
    """The best is beside a cliff of two and a half times the time."""

    def seconds(knobs: dict[str, Any]) -> float:
        a, b, _ = shares(knobs)
        falls = a < edge - 0.12 or b > 0.8
        return 0.1 * (1 + 0.5 * abs(a - edge) + 0.3 * max(0.0, b - 0.4)) * (2.5 if falls else 1.0)

    return seconds


def measured(
    surface: Surface, knobs: dict[str, Any], rng: np.random.Generator, sd: float = 0.03, n: int = 30
) -> list[float]:
    """Steps with normal noise of relative size `sd`."""
    return [float(each) for each in surface(knobs) * np.exp(rng.normal(0.0, sd, n))]


def search_on(tuner: Tuner, surface: Surface, rng: np.random.Generator, sd: float = 0.03, steps: int = 20_000) -> None:
    """Search as a job of so many steps would: a search whose trials have lost all that they may goes on later."""
    search(tuner, surface, rng, sd)
    while tuner.resting and steps > 0:
        tuner.observe(measured(surface, tuner.best(), rng, sd, 20), 200)
        steps -= 200
        if not tuner.done:
            search(tuner, surface, rng, sd)


def search(tuner: Tuner, surface: Surface, rng: np.random.Generator, sd: float = 0.03) -> int:
    """Go on until the search is over, as a job would: trials that are too slow are cut short. The number of trials."""
    trials = 0
    while not tuner.done:
        trial = tuner.ask()
        samples = measured(surface, trial.knobs, rng, sd)
        hopeless = math.log(float(np.median(samples[:3]))) > math.log(trial.limit) if trial.limit < math.inf else False
        tuner.tell(trial.id, samples[:3] if hopeless else samples, "aborted" if hopeless else "ok")
        trials += 1
    return trials
