"""Problems to search: a surface, a noise, the knobs, and the default at which a search begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.space import Knobs, Space
from benchmarks.autotune import recorded
from benchmarks.autotune.surfaces import DEFAULT, NOISES, SHORT, SPACE, SURFACES, Noise, Surface, find_least

Array = NDArray[np.float64]
RECORDED = "recorded"
"""Name of the noise of recorded surfaces, which have their own."""
LEAST_SAMPLES = 3
"""Steps from which a trial may be cut short, as in the engine."""


@dataclass(frozen=True)
class Problem:
    """Problem to search."""

    space: Space
    default: Knobs
    seconds: Surface  # seconds of a step with given knobs, without noise
    steps: Callable[[Knobs, int, np.random.Generator], Array]  # seconds of `n` steps with noise: shape (n,)
    least: float  # seconds of the fastest setting


def make_problem(surface: str, noise: str, seed: int) -> Problem:
    """Return a surface with a noise. A recorded surface is the same for every seed."""
    if surface.startswith(recorded.PREFIX):
        found = recorded.read_surface(surface)
        return Problem(found.space, found.default, found.compute_seconds, found.draw_steps, found.least)
    return make_synthetic_problem(SURFACES[surface](seed), noise)


def make_synthetic_problem(seconds: Surface, noise: str) -> Problem:
    """Return the problem of a function of the synthetic surfaces' knobs."""
    noisy: Noise = next(each for each in (*NOISES, *SHORT) if each.name == noise)
    best = min(find_least(seconds), seconds(DEFAULT))
    return Problem(SPACE, DEFAULT, seconds, lambda knobs, n, rng: noisy.draw_steps(seconds(knobs), n, rng), best)


def select_noises(surface: str, asked: tuple[str, ...]) -> tuple[str, ...]:
    """Return the noises with which a surface is searched."""
    return (RECORDED,) if surface.startswith(recorded.PREFIX) else asked


def cut_short(samples: Array, limit: float) -> tuple[Array, bool]:
    """Return what a job measures of a trial: steps until their median exceeds the limit; and whether it was cut."""
    for count in range(LEAST_SAMPLES, len(samples)):
        if float(np.median(samples[:count])) > limit:
            return samples[:count], True
    return samples, False
