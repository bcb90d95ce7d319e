"""What is searched: a surface, a noise, the knobs, and the default that a search begins with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.space import Knobs, Space
from benchmarks.autotune import recorded
from benchmarks.autotune.surfaces import DEFAULT, NOISES, SHORT, SPACE, SURFACES, Noise, Surface, least

Array = NDArray[np.float64]
RECORDED = "recorded"
"""The noise of a recorded surface is its own."""


@dataclass(frozen=True)
class Problem:
    """One of them.

    Attributes
    ----------
    seconds : callable
        Of a step with some knobs, without noise.
    steps : callable
        Seconds of so many steps, with noise: shape (n,).
    least : float
        Seconds of the fastest setting.
    """

    space: Space
    default: Knobs
    seconds: Surface
    steps: Callable[[Knobs, int, np.random.Generator], Array]
    least: float


def problem(surface: str, noise: str, seed: int) -> Problem:
    """A surface with a noise. Of a recorded one every seed has the same."""
    if surface.startswith(recorded.PREFIX):
        found = recorded.of(surface)
        return Problem(found.space, found.default, found.seconds, found.steps, found.least)
    return synthetic(SURFACES[surface](seed), noise)


def synthetic(seconds: Surface, noise: str) -> Problem:
    """A function of the knobs of the synthetic surfaces."""
    noisy: Noise = next(each for each in (*NOISES, *SHORT) if each.name == noise)
    best = min(least(seconds), seconds(DEFAULT))
    return Problem(SPACE, DEFAULT, seconds, lambda knobs, n, rng: noisy.steps(seconds(knobs), n, rng), best)


def noises(surface: str, asked: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the noises that a surface is searched with."""
    return (RECORDED,) if surface.startswith(recorded.PREFIX) else asked


def cut_short(samples: Array, limit: float) -> tuple[Array, bool]:
    """What a job measures of a trial: three steps, if their median is above the limit. Whether it was cut."""
    cut = float(np.median(samples[:3])) > limit
    return (samples[:3] if cut else samples), cut
