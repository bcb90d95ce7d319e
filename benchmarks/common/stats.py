"""Summaries of samples, and confidence intervals of ratios."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 4000


@dataclass(frozen=True)
class Summary:
    """Summary of samples of one quantity, in seconds."""

    samples: int
    median: float
    p99: float
    least: float
    mean: float

    @classmethod
    def from_samples(cls, seconds: Sequence[float]) -> Summary:
        """Summarize at least one sample."""
        values = np.asarray(seconds, dtype=np.float64)
        return cls(
            samples=values.size,
            median=float(np.median(values)),
            p99=float(np.percentile(values, 99)),
            least=float(values.min()),
            mean=float(values.mean()),
        )

    def record(self) -> dict[str, float]:
        """Return the summary for a JSON record."""
        return asdict(self)


@dataclass(frozen=True)
class Interval:
    """Estimate with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def record(self) -> dict[str, float]:
        """Return the interval for a JSON record."""
        return asdict(self)


def bootstrap_interval(
    rounds: NDArray[np.float64], statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]], seed: int = 1
) -> Interval:
    """Estimate by a percentile bootstrap over rounds, which are resampled as a whole (Efron 1979).

    Figures have the shape (rounds, variants): the variants of a round ran next to each other, so they stay together.
    `statistic` maps an array of shape (..., rounds, variants) to one of shape (...).
    """
    draws = np.random.default_rng(seed).integers(len(rounds), size=(RESAMPLES, len(rounds)))
    values = statistic(rounds[draws])
    low, high = np.percentile(values, [2.5, 97.5])
    return Interval(value=float(statistic(rounds)), low=float(low), high=float(high))


def estimate_median(of: Sequence[float]) -> Interval:
    """Estimate the median over rounds."""
    return bootstrap_interval(np.asarray(of, dtype=np.float64)[:, None], lambda r: np.median(r[..., 0], axis=-1))


def estimate_ratio(of: Sequence[float], to: Sequence[float]) -> Interval:
    """Estimate the ratio of two medians over the same rounds."""
    rounds = np.stack([np.asarray(of, dtype=np.float64), np.asarray(to, dtype=np.float64)], axis=-1)
    return bootstrap_interval(rounds, lambda r: np.median(r[..., 0], axis=-1) / np.median(r[..., 1], axis=-1))


def estimate_overhead(of: Sequence[float], floor: Sequence[float]) -> Interval:
    """Estimate the median over rounds of a variant's time above the floor of the same round, in seconds."""
    rounds = np.stack([np.asarray(of, dtype=np.float64), np.asarray(floor, dtype=np.float64)], axis=-1)
    return bootstrap_interval(rounds, lambda r: np.median(r[..., 0] - r[..., 1], axis=-1))


def estimate_overhead_ratio(of: Sequence[float], peer: Sequence[float], floor: Sequence[float]) -> Interval:
    """Estimate the ratio of two overheads over the same floor, paired by round."""
    rounds = np.stack([np.asarray(v, dtype=np.float64) for v in (of, peer, floor)], axis=-1)

    def compute_ratio(r: NDArray[np.float64]) -> NDArray[np.float64]:
        ours = np.median(r[..., 0] - r[..., 2], axis=-1)
        theirs = np.median(r[..., 1] - r[..., 2], axis=-1)
        return np.asarray(ours / theirs)

    return bootstrap_interval(rounds, compute_ratio)
