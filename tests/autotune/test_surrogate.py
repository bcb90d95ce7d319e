"""The surrogate and its acquisition against plain formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autotune.acquisition import log_expected_improvement, log_improvement
from autotune.score import TrialScore, estimate_location
from autotune.surrogate import KINSHIP, MEAN_SD, Surrogate, spread_points

from .surfaces import SPACE


def made(n: int = 9, epochs: list[int] | None = None) -> Surrogate:
    rng = np.random.default_rng(0)
    x = SPACE.encode_shares(rng.random((n, 3)))
    y = 0.1 * x[:, 0] - 0.2 * x[:, 1] + 0.01 * rng.normal(size=n)
    of = np.array(epochs if epochs is not None else [0] * n)
    return Surrogate(x, y, np.full(n, 0.01), of, SPACE.groups, seed=1)


def covariance(surrogate: Surrogate, draw: np.ndarray, a: np.ndarray, b: np.ndarray, kin: np.ndarray) -> np.ndarray:
    """Return the Matern 5/2 covariance with a length scale for each knob, computed directly."""
    scales = np.exp(draw[:3])[SPACE.groups]
    out = np.empty((len(a), len(b)))
    for i, one in enumerate(a):
        for j, other in enumerate(b):
            r = math.sqrt(5 * float((((one - other) / scales) ** 2).sum()))
            out[i, j] = math.exp(2 * draw[3]) * (1 + r + r * r / 3) * math.exp(-r)
    return out * np.where(kin, 1.0, KINSHIP) + MEAN_SD**2 * kin


@pytest.mark.parametrize("epochs", [None, [0, 0, 0, 0, 1, 1, 1, 1, 1]])
def test_predictions_are_those_of_the_textbook(epochs: list[int] | None) -> None:
    surrogate = made(epochs=epochs)
    points = SPACE.encode_shares(np.random.default_rng(2).random((5, 3)))
    mean, deviation = surrogate.predict(points, 1 if epochs else 0)
    of = surrogate.epochs
    for s, draw in enumerate(surrogate.draws):
        known = covariance(surrogate, draw, surrogate.x, surrogate.x, of[:, None] == of[None, :])
        known += np.diag(np.full(9, 0.01**2 + math.exp(2 * draw[4]) + 1e-10))
        cross = covariance(surrogate, draw, points, surrogate.x, np.broadcast_to(of == (1 if epochs else 0), (5, 9)))
        prior = math.exp(2 * draw[3]) + MEAN_SD**2
        assert np.allclose(mean[s], cross @ np.linalg.solve(known, surrogate.y), atol=1e-8)
        variance = prior - np.einsum("ij,ji->i", cross, np.linalg.solve(known, cross.T))
        assert np.allclose(deviation[s] ** 2, variance, atol=1e-8)


def test_a_difference_of_neighbours_is_surer_than_its_parts() -> None:
    surrogate = made(3)
    a, b = SPACE.encode_shares(np.array([[0.95, 0.05, 0.2], [0.9, 0.05, 0.2]]))
    mean, deviation = surrogate.predict_mixture(np.stack([a, b]), 0)
    gap, of_gap = surrogate.predict_difference(a, b, 0)
    assert gap == pytest.approx(mean[0] - mean[1], abs=1e-9)
    assert 0 < of_gap < math.hypot(*deviation)
    assert surrogate.predict_difference(a, a, 0) == (pytest.approx(0.0), pytest.approx(0.0, abs=1e-4))


def test_the_knob_that_matters_has_the_shortest_lengthscale() -> None:
    rng = np.random.default_rng(3)
    x = SPACE.encode_shares(rng.random((24, 3)))
    surrogate = Surrogate(x, 0.2 * np.sin(6 * x[:, 1]), np.full(24, 0.003), np.zeros(24, int), SPACE.groups, 0)
    logs = surrogate.weights @ surrogate.draws[:, :3]  # of the lengthscales
    assert int(np.argmin(logs)) == 1


@pytest.mark.parametrize("z", [-30.0, -6.0, -1.0, -0.5, 0.0, 2.0, 8.0])
def test_the_logarithm_of_the_improvement_is_right_also_far_out(z: float) -> None:
    steps = np.linspace(0.0, 40.0, 2_000_001)  # the integral of t phi(t - z) dt, scaled by phi(z)
    integral = np.trapezoid(steps * np.exp(-(steps**2) / 2 + steps * z), steps)
    expected = math.log(integral) - z * z / 2 - math.log(2 * math.pi) / 2
    assert log_improvement(np.array([z]))[0] == pytest.approx(expected, abs=1e-4)


def test_expected_improvement_is_the_average_over_draws() -> None:
    surrogate = made()
    points = SPACE.encode_shares(np.random.default_rng(5).random((3, 3)))
    best = np.full(len(surrogate.weights), -0.05)
    mean, deviation = surrogate.predict(points, 0)
    rng = np.random.default_rng(0)
    drawn = mean[:, None, :] + deviation[:, None, :] * rng.standard_normal((1, 200_000, 1))
    sampled = surrogate.weights @ np.maximum(best[:, None, None] - drawn, 0.0).mean(axis=1)
    assert np.allclose(np.exp(log_expected_improvement(mean, deviation, best, surrogate.weights)), sampled, rtol=0.03)


def test_points_of_the_sequence_are_spread_evenly() -> None:
    points = spread_points(64, 2, np.array([0.3, 0.8]))
    cells = np.unique(np.floor(points * 4).astype(int), axis=0)
    assert len(cells) == 16
    assert points.min() >= 0.0 and points.max() < 1.0


def test_a_third_of_outliers_hardly_moves_the_location() -> None:
    rng = np.random.default_rng(0)
    samples = rng.normal(1.0, 0.01, 400)
    samples[:80] = 50.0
    assert abs(estimate_location(samples) - 1.0) < 0.01
    assert abs(estimate_location(samples) - float(np.mean(samples))) > 5


def test_the_stated_error_is_the_error_that_is_made() -> None:
    rng = np.random.default_rng(0)
    scores = [TrialScore(list(np.exp(rng.normal(-2.0, 0.05, 30))), 0.05) for _ in range(400)]
    made_, stated = np.std([score.log for score in scores]), np.mean([score.error for score in scores])
    assert stated == pytest.approx(made_, rel=0.12)
    assert np.mean([score.log for score in scores]) == pytest.approx(-2.0, abs=0.002)
