"""Gaussian process with a Matern 5/2 kernel, whose hyperparameters are averaged over instead of fitted.

With a dozen trials, many hyperparameters explain the data, and the most likely ones are overconfident. So predictions
are averaged over several, weighted by their likelihood. These are found by importance sampling in two rounds. The first
draws from the prior, the second from a normal distribution fitted to the result of the first. There is no optimizer and
no restart: equal input gives equal output.

Shapes: n observations, m points, w columns, g knobs, s hyperparameter samples.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

Array = NDArray[np.float64]
Numbers = NDArray[np.int64]

DRAWS = 96  # hyperparameters drawn in each round
KEPT = 12  # maximum number of draws over which predictions are averaged
ENOUGH = 0.98  # share of the weight of the kept draws; the least likely ones are dropped
JITTER = 1e-10
LARGE = 1e15  # larger than the square of any whitened value

# Prior on logarithms of: the lengthscales (in a unit cube), the amplitude, and the noise between trials (the last two
# in logarithms of seconds).
LENGTHSCALE = (math.log(0.6), 0.75)
AMPLITUDE = (math.log(0.15), 0.8)
NOISE = (math.log(0.004), 0.8)
MEAN_SD = 0.3  # standard deviation of the constant mean
KINSHIP = 0.6  # correlation of a surface with its state before a drift


def spread_points(n: int, width: int, shift: Array) -> Array:
    """Return evenly spread points in the unit cube: shape (n, width). `shift`, of shape (width,), moves them around.

    M. Roberts, The unreasonable effectiveness of quasirandom sequences, 2018.
    """
    ratio = 2.0
    for _ in range(64):  # the root of x^(width+1) = x + 1
        ratio = (1.0 + ratio) ** (1.0 / (width + 1))
    steps = ratio ** -np.arange(1.0, width + 1)
    return np.asarray((shift + np.arange(1, n + 1)[:, None] * steps) % 1.0)


def apply_matern(squared: Array) -> Array:
    """Apply the Matern 5/2 function to squared distances. This is the hot spot, so allocations are avoided."""
    distance = np.multiply(squared, 5.0)
    np.sqrt(distance, out=distance)
    decay = np.exp(-distance)
    polynomial = distance / 3.0
    polynomial += 1.0
    polynomial *= distance
    polynomial += 1.0
    polynomial *= decay
    return np.asarray(polynomial)


class Surrogate:
    """Posterior of the surface, given observations.

    `x` has encoded settings, (n, w), `y` logarithms of seconds, (n,), best near 0, and `errors` their standard errors.
    `epochs` counts the drifts before each observation: those of an older epoch are of a surface similar to today's.
    `groups` has the number of the knob of each column, (w,). An observation may be the mean of several trials, as many
    as `counts` says; its error is then that of one trial. `scatter` is the sum of squares of these trials around their
    mean, which shows how much trials of one setting differ.
    """

    def __init__(
        self,
        x: Array,
        y: Array,
        errors: Array,
        epochs: Numbers,
        groups: Numbers,
        seed: int,
        counts: Numbers | None = None,
        scatter: Array | None = None,
    ) -> None:
        self.x, self.y, self.epochs, self.groups = x, y, epochs, groups
        self._errors = errors
        self._counts = np.ones(len(y), dtype=np.int64) if counts is None else counts
        self._scatter = np.zeros(len(y)) if scatter is None else scatter
        self._knobs = int(groups.max()) + 1
        below = np.tril_indices(len(y))
        self._below = below[0] * len(y) + below[1]
        self._squared = self._compute_distances(x, x)[:, below[0], below[1]]
        self._same = (epochs[below[0]] == epochs[below[1]]).astype(np.float64)
        self._kin = np.where(self._same > 0.0, 1.0, KINSHIP)
        mean = np.array([LENGTHSCALE[0]] * self._knobs + [AMPLITUDE[0], NOISE[0]])
        deviation = np.array([LENGTHSCALE[1]] * self._knobs + [AMPLITUDE[1], NOISE[1]])
        shift = np.random.default_rng(seed).random(len(mean))
        unit = ndtri(np.clip(spread_points(2 * DRAWS, len(mean), shift), 1e-6, 1 - 1e-6))
        first = mean + deviation * unit[:DRAWS]
        likely = self._compute_likelihood(first)
        weights = np.exp(likely - likely.max())
        weights /= weights.sum()
        centre = weights @ first
        around = (first - centre) * np.sqrt(weights)[:, None]
        covariance = around.T @ around + np.diag((0.3 * deviation) ** 2)
        root = np.linalg.cholesky(covariance)
        second = centre + unit[DRAWS:] @ root.T
        prior = -0.5 * np.sum(((second - mean) / deviation) ** 2, axis=1) - np.log(deviation).sum()
        proposed = -0.5 * np.sum(unit[DRAWS:] ** 2, axis=1) - np.log(np.diag(root)).sum()
        likely_second = self._compute_likelihood(second) + prior - proposed
        draws = np.concatenate([first, second])
        logs = np.concatenate([likely, likely_second])
        best = np.argsort(-logs, kind="stable")[:KEPT]
        share = np.exp(logs[best] - logs[best[0]])
        count = int(np.searchsorted(np.cumsum(share), ENOUGH * share.sum())) + 1
        best = best[:count]
        self.draws, self.weights = draws[best], share[:count]
        self.weights /= self.weights.sum()
        root = np.linalg.cholesky(self._compute_covariance(self.draws))
        self._inverse = np.linalg.inv(root)  # (s, n, n): few, well conditioned, and used many times
        self._alpha = np.einsum("sji,sj->si", self._inverse, self._inverse @ y)

    @property
    def noise(self) -> float:
        """Standard deviation between trials of one setting, beyond what their own samples explain."""
        return float(self.weights @ np.exp(self.draws[:, -1]))

    def predict(self, x: Array, epoch: int) -> tuple[Array, Array]:
        """Return mean and deviation of the surface, without noise, for each hyperparameter sample: shapes (s, m)."""
        cross = self._compute_cross_covariance(x, epoch)
        mean = np.einsum("smn,sn->sm", cross, self._alpha)
        half = cross @ self._inverse.transpose(0, 2, 1)
        variance = (np.exp(2 * self.draws[:, -2]) + MEAN_SD**2)[:, None] - np.einsum("smn,smn->sm", half, half)
        return mean, np.sqrt(np.maximum(variance, JITTER))

    def predict_mixture(self, x: Array, epoch: int) -> tuple[Array, Array]:
        """Return mean and standard deviation over all hyperparameters: shapes (m,)."""
        return self.mix_predictions(*self.predict(x, epoch))

    def mix_predictions(self, mean: Array, deviation: Array) -> tuple[Array, Array]:
        """Return mean and standard deviation over all hyperparameters, given those of each: shapes (s, m) to (m,)."""
        average = self.weights @ mean
        return average, np.sqrt(self.weights @ (deviation**2 + (mean - average) ** 2))

    def predict_difference(self, a: Array, b: Array, epoch: int) -> tuple[float, float]:
        """Return mean and standard deviation of the surface at `a` minus that at `b`, each of shape (w,)."""
        both = np.stack([a, b])
        cross = self._compute_cross_covariance(both, epoch)
        mean = np.einsum("smn,sn->sm", cross, self._alpha)
        half = cross @ self._inverse.transpose(0, 2, 1)
        apart = self._compute_kernel(self.draws, self._compute_distances(both, both))[:, 0, 1]
        prior = 2.0 * np.exp(2 * self.draws[:, -2]) * (1.0 - apart)
        gap = mean[:, 0] - mean[:, 1]
        variance = np.maximum(prior - np.sum((half[:, 0] - half[:, 1]) ** 2, axis=1), JITTER)
        average = float(self.weights @ gap)
        return average, math.sqrt(float(self.weights @ (variance + (gap - average) ** 2)))

    def _compute_distances(self, a: Array, b: Array) -> Array:
        """Return squared distances for each knob: shape (g, len(a), len(b))."""
        squared = (a[:, None, :] - b[None, :, :]) ** 2
        return np.stack([squared[:, :, self.groups == g].sum(axis=2) for g in range(self._knobs)])

    def _compute_kernel(self, draws: Array, squared: Array) -> Array:
        scales = np.exp(-2.0 * draws[:, : self._knobs])
        return apply_matern(np.tensordot(scales, squared, axes=1))

    def _compute_covariance(self, draws: Array) -> Array:
        """Return the covariance of the observations as a lower triangle: shape (s, n, n)."""
        n = len(self.y)
        kernel = self._compute_kernel(draws, self._squared)
        kernel *= np.exp(2 * draws[:, -2])[:, None]
        kernel *= self._kin
        kernel += MEAN_SD**2 * self._same
        found = np.zeros((len(draws), n * n))
        found[:, self._below] = kernel
        found[:, :: n + 1] += self._compute_trial_variance(draws) / self._counts
        return found.reshape(len(draws), n, n)

    def _compute_trial_variance(self, draws: Array) -> Array:
        """Return the variance of one trial of each observation around the surface: shape (s, n)."""
        return np.asarray(self._errors**2 + np.exp(2 * draws[:, -1])[:, None] + JITTER)

    def _compute_cross_covariance(self, x: Array, epoch: int) -> Array:
        """Return the covariance of points with the observations: shape (s, m, n)."""
        kernel = self._compute_kernel(self.draws, self._compute_distances(x, self.x))
        same = self.epochs == epoch
        kernel *= np.exp(2 * self.draws[:, -2])[:, None, None] * np.where(same, 1.0, KINSHIP)
        kernel += MEAN_SD**2 * same
        return kernel

    def _compute_likelihood(self, draws: Array) -> Array:
        """Return the logarithm of the marginal likelihood of each draw: shape (s,)."""
        n = len(self.y)
        with_y = np.zeros((len(draws), n + 1, n + 1))  # the last row of its Cholesky root is the whitened y
        with_y[:, :n, :n] = self._compute_covariance(draws)
        with_y[:, n, :n] = self.y
        with_y[:, n, n] = LARGE
        root = np.linalg.cholesky(with_y)
        whitened, diagonal = root[:, n, :n], np.diagonal(root, axis1=1, axis2=2)[:, :n]
        likely = -0.5 * np.sum(whitened**2, axis=1) - np.log(diagonal).sum(axis=1)
        of_one = self._compute_trial_variance(draws)
        within = -0.5 * ((self._counts - 1) * np.log(of_one) + self._scatter / of_one).sum(axis=1)
        return np.asarray(likely + within)
