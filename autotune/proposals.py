"""Proposals of a search: the most promising setting, and the least known one."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from autotune.acquisition import (
    NEAREST,
    draw_candidates,
    draw_neighbours,
    log_expected_improvement,
    select_within_reach,
)
from autotune.search_state import SearchState
from autotune.space import Knobs
from autotune.surrogate import Surrogate

Array = NDArray[np.float64]

NEARLY = 0.1  # logarithm of a ratio of times up to which a setting is expected to be nearly as fast as the best

# Power of the steps lost by the nearest trial, in multiples of one trial's limit, by which a setting's value is
# divided.
WARNED = 2.0


class Proposals:
    """Settings that a search may try next."""

    def __init__(self, state: SearchState) -> None:
        self._state = state
        self._found: tuple[object, tuple[Knobs, float]] | None = None

    def find_most_promising(self) -> tuple[Knobs, float]:
        """Return the setting with the greatest expected improvement within the budget, and that improvement."""
        state, surrogate = self._state, self._state.get_surrogate()
        if self._found is not None and self._found[0] is surrogate:
            return self._found[1]
        rng = np.random.default_rng([state.seed, state.asked, state.epoch.number])
        x, seen = self._draw_candidates(surrogate, rng)
        means, _ = surrogate.predict(seen, state.epoch.number)
        best = means.min(axis=1)
        value = self._compute_value(surrogate, x, best)
        closer = draw_neighbours(state.space, x[int(np.argmax(value))], 0.04, NEAREST, rng)
        closer = select_within_reach(state.space, closer, state.select_good_settings())
        x, value = np.concatenate([x, closer]), np.concatenate([value, self._compute_value(surrogate, closer, best)])
        k = int(np.argmax(value))
        self._found = surrogate, (state.space.decode(x[k]), float(math.exp(value[k])))
        return self._found[1]

    def find_least_known(self) -> Knobs | None:
        """Return the setting farthest from all measured ones, among those expected to be nearly as fast as the best."""
        state, surrogate = self._state, self._state.get_surrogate()
        rng = np.random.default_rng([state.seed, state.asked, state.epoch.number, 1])
        x, seen = self._draw_candidates(surrogate, rng)
        expected, _ = surrogate.predict_mixture(x, state.epoch.number)
        best, _ = surrogate.predict_mixture(seen, state.epoch.number)
        x = x[expected < best.min() + NEARLY]
        apart = ((x[:, None] - seen[None]) ** 2).sum(axis=2).min(axis=1)
        return state.space.decode(x[int(np.argmax(apart))]) if len(x) else None

    def compute_improvement(self, knobs: Knobs) -> float:
        """Return the expected improvement of one setting, as a share."""
        state, surrogate = self._state, self._state.get_surrogate()
        number = state.epoch.number
        means, _ = surrogate.predict(state.history.encode_settings(state.history.list_measured(number)), number)
        return float(np.exp(self._compute_value(surrogate, state.space.encode(knobs)[None], means.min(axis=1)))[0])

    def _draw_candidates(self, surrogate: Surrogate, rng: np.random.Generator) -> tuple[Array, Array]:
        """Return candidates, and the settings measured in this epoch: shapes (m, w) and (n, w)."""
        state, number = self._state, self._state.epoch.number
        seen = state.history.encode_settings(state.history.list_measured(number))
        means, _ = surrogate.predict_mixture(seen, number)
        x = draw_candidates(state.space, seen[np.argsort(means, kind="stable")[:3]], rng)
        return select_within_reach(state.space, x, state.select_good_settings()), seen

    def _compute_value(self, surrogate: Surrogate, x: Array, best: Array) -> Array:
        """Return log expected improvement, reduced for settings that would probably exceed the budget."""
        state, budget = self._state, self._state.get_budget()
        each = surrogate.predict(x, state.epoch.number)
        value = log_expected_improvement(*each, best, surrogate.weights)
        mean, deviation = surrogate.mix_predictions(*each)
        standing = state.history.encode_settings([state.epoch.standing])
        mean = mean - surrogate.predict_mixture(standing, state.epoch.number)[0]
        z = mean / deviation
        loss = mean * ndtr(z) + deviation * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
        value -= np.maximum(0.0, loss / budget.compute_trial_share(state.left) - 1.0)
        return np.asarray(value - WARNED * np.log1p(self._get_nearest_losses(x) / budget.at_once))

    def _get_nearest_losses(self, x: Array) -> Array:
        """Return the steps lost by the trial nearest to each setting, as the surrogate softens large losses."""
        worst = self._state.history.find_worst_losses(self._state.epoch.number)
        if max(worst.values(), default=0.0) <= self._state.get_budget().at_once:
            return np.zeros(len(x))
        told = {told.key: told.x for told in self._state.list_trials()}
        at = np.array(list(told.values()))
        nearest = np.argmin(((x[:, None, :] - at[None]) ** 2).sum(axis=2), axis=1)
        return np.asarray(np.array([worst[key] for key in told])[nearest])
