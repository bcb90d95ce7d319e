"""Expected improvement in log space, and the candidates among which its maximum is sought."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import erfcx, logsumexp, ndtr

from autotune.space import Choice, Space
from autotune.surrogate import spread_points

Array = NDArray[np.float64]

SPREAD = 384  # candidates over the whole space
NEAR = 96  # candidates around each of the best settings
NEAREST = 64  # candidates around the best of all these
REACH = 0.25  # share of a number's range by which a trial may be away from settings known to be good
C1 = math.log(2 * math.pi) / 2  # C1 and C2 are the constants of `log_improvement`
C2 = math.log(math.pi / 2) / 2


def log_improvement(z: Array) -> Array:
    """Return log(phi(z) + z Phi(z)), the log of a normal variable's expected improvement in its standard deviations.

    S. Ament et al., Unexpected improvements to expected improvement for Bayesian optimization, arXiv:2310.20708.
    """
    near = np.maximum(z, -1.0)
    plain = np.log(np.exp(-(near**2) / 2 - C1) + near * ndtr(near))
    far = np.minimum(z, -1.0)
    tail = -(far**2) / 2 - C1 + np.log1p(-np.exp(np.log(erfcx(-far / math.sqrt(2)) * -far) + C2))
    return np.asarray(np.where(z > -1.0, plain, tail))


def log_expected_improvement(mean: Array, deviation: Array, best: Array, weights: Array) -> Array:
    """Return each point's log expected improvement on `best`: shapes (s, m), (s, m), (s,), (s,) to (m,)."""
    logs = np.log(deviation) + log_improvement((best[:, None] - mean) / deviation)
    return np.asarray(logsumexp(logs, axis=0, b=weights[:, None]))


def draw_candidates(space: Space, centres: Array, rng: np.random.Generator) -> Array:
    """Return encoded settings over the whole space and around `centres`, of shape (k, w)."""
    everywhere = space.encode_shares(spread_points(SPREAD, len(space.knobs), rng.random(len(space.knobs))))
    return np.concatenate([everywhere, *(draw_neighbours(space, centre, 0.12, NEAR, rng) for centre in centres)])


def select_within_reach(space: Space, x: Array, good: Array) -> Array:
    """Return the settings whose numbers are all near those of a good one: shapes (m, w), (n, w) to (k, w), k > 0.

    Step times may grow by orders of magnitude towards the end of a range, without any sign near the default. A search
    that expands from known settings meets such a slope where it is gentle.
    """
    whole = np.array([isinstance(knob, Choice) for knob in space.knobs.values()])
    first = np.diff(space.groups, prepend=-1) > 0  # a knob's first column, which is at its low end if the knob is off
    numbers = first & ~whole[space.groups]
    if not numbers.any():
        return x
    apart = np.abs(x[:, None, numbers] - good[None][:, :, numbers]).max(axis=2).min(axis=1)
    near = apart <= REACH
    return x[near] if near.any() else x[[int(np.argmin(apart))]]


def draw_neighbours(space: Space, centre: Array, reach: float, n: int, rng: np.random.Generator) -> Array:
    """Return settings that differ from `centre` in some knobs: shape (n, w)."""
    moved = centre + reach * rng.standard_normal((n, space.width))
    width = len(space.knobs)
    turned = rng.random((n, width)) < max(0.5, 1.0 / width)
    turned[np.arange(n), rng.integers(width, size=n)] = True
    moved = np.where(turned[:, space.groups], moved, centre)
    switched = space.apart & (rng.random((n, width)) < 0.25)
    anywhere = space.encode_shares(rng.random((n, width)))
    return space.snap_coordinates(np.where(switched[:, space.groups], anywhere, moved))
