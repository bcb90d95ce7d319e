"""Synthetic surfaces: seconds per step as a function of the knobs, with another minimum for every seed.

They are stand-ins with shapes that step times have, and with known minima. `transport` is a latency and bandwidth model
of fused allreduces that overlap with a backward pass; the others have no such meaning.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune import Choice, Integer, Real, Space

SPACE = Space(
    fusion_threshold=Integer(1 << 16, 1 << 30, log=True),
    cycle_time_ms=Real(0.05, 50.0, log=True),
    stores=Choice(["cached", "streaming"]),
)
DEFAULT = {"fusion_threshold": 1 << 27, "cycle_time_ms": 1.0, "stores": "cached"}
GRID = 48  # points of each number in the exhaustive search

Surface = Callable[[dict[str, Any]], float]


def get_positions(knobs: dict[str, Any]) -> tuple[float, float, bool]:
    """Return the positions of the two numbers in their ranges, and whether stores are streaming."""
    at = SPACE.encode(knobs)
    return float(at[0]), float(at[1]), knobs["stores"] == "streaming"


def make_valley(seed: int) -> Surface:
    """Return a surface with a tilted valley."""
    rng = np.random.default_rng([seed, 1])
    a0, b0, c0 = *rng.uniform(0.2, 0.8, 2), bool(rng.integers(2))

    def compute_seconds(knobs: dict[str, Any]) -> float:
        a, b, c = get_positions(knobs)
        return 0.1 * (1 + 0.8 * (a - a0) ** 2 + 0.6 * (b - b0) ** 2 + 0.5 * (a - a0) * (b - b0) + 0.05 * (c != c0))

    return compute_seconds


def make_narrow(seed: int) -> Surface:
    """Return a surface with a dent in a plain."""
    rng = np.random.default_rng([seed, 2])
    a0, b0, c0 = *rng.uniform(0.25, 0.75, 2), bool(rng.integers(2))

    def compute_seconds(knobs: dict[str, Any]) -> float:
        a, b, c = get_positions(knobs)
        dent = math.exp(-(((a - a0) / 0.25) ** 2 + ((b - b0) / 0.3) ** 2) / 2)
        return 0.1 * (1.15 - 0.15 * dent - 0.03 * (c == c0) + 0.1 * b)

    return compute_seconds


def make_cliff(seed: int) -> Surface:
    """Return a surface whose minimum is beside a cliff to two and a half times the time."""
    edge = float(np.random.default_rng([seed, 3]).uniform(0.35, 0.7))

    def compute_seconds(knobs: dict[str, Any]) -> float:
        a, b, _ = get_positions(knobs)
        falls = a < edge - 0.12 or b > 0.8
        return 0.1 * (1 + 0.5 * abs(a - edge) + 0.3 * max(0.0, b - 0.4)) * (2.5 if falls else 1.0)

    return compute_seconds


def make_fused(total: float, tensors: int, backward: float, latency: float, bandwidth: float) -> Surface:
    """Model batches of `tensors` tensors, `total` bytes in all, overlapping a backward pass of `backward` seconds."""

    def compute_seconds(knobs: dict[str, Any]) -> float:
        threshold, cycle = knobs["fusion_threshold"], 1e-3 * knobs["cycle_time_ms"]
        batches = min(tensors, max(1.0, total / threshold) + backward / cycle)
        overlapped = max(0.0, latency * batches + total / bandwidth - 0.8 * backward)
        last = min(threshold, total) / bandwidth + latency + 0.5 * cycle
        slower = 1.04 if knobs["stores"] == "streaming" else 1.0
        return backward * slower + max(last, overlapped)

    return compute_seconds


def make_transport(seed: int) -> Surface:
    """Return a surface of a backward pass's batches over a link with latency and bandwidth."""
    rng = np.random.default_rng([seed, 4])
    total, tensors = float(rng.choice([2e6, 25e6, 1e8, 4e8])), int(rng.choice([60, 160, 2000]))
    backward, latency = float(rng.uniform(0.05, 0.3)), float(rng.uniform(5e-5, 5e-4))
    bandwidth = float(rng.uniform(1e9, 8e9))

    return make_fused(total, tensors, backward, latency, bandwidth)


def make_hosts(seed: int) -> Surface:
    """Return a surface of many small tensors over many hosts.

    Each batch costs milliseconds, so small thresholds or short cycle times take up to a hundred times the minimum,
    which is beside that slope.
    """
    rng = np.random.default_rng([seed, 22])
    tensors = int(rng.choice([500, 2000, 5000]))
    total = tensors * float(rng.choice([1e3, 4e3, 16e3]))
    backward, latency = float(rng.uniform(0.05, 0.3)), float(rng.uniform(1e-3, 8e-3))
    bandwidth = float(rng.uniform(1e8, 2e9))

    return make_fused(total, tensors, backward, latency, bandwidth)


def make_together(seed: int) -> Surface:
    """Return a surface on which only large thresholds with long cycle times help, fourfold; the rest differs by 2 %."""
    rng = np.random.default_rng([seed, 10])
    a0, b0, c0 = rng.uniform(0.6, 0.8), rng.uniform(0.6, 0.8), bool(rng.integers(2))

    def compute_seconds(knobs: dict[str, Any]) -> float:
        a, b, c = get_positions(knobs)
        inside = 1.0 / ((1.0 + math.exp((a0 - a) / 0.02)) * (1.0 + math.exp((b0 - b) / 0.02)))
        return 0.1 * (4.0 - 3.0 * inside) * (1.0 + 0.02 * (c != c0))

    return compute_seconds


def make_abyss(seed: int) -> Surface:
    """Return a surface whose default takes twice the minimum; small thresholds or long cycles take thirty times."""
    rng = np.random.default_rng([seed, 11])
    a0, b0, c0 = rng.uniform(0.4, 0.6), rng.uniform(0.1, 0.7), bool(rng.integers(2))
    low, high = rng.uniform(0.1, 0.3), rng.uniform(0.8, 0.95)
    at = get_positions(DEFAULT)
    steep = 0.93 / ((at[0] - a0) ** 2 + 0.7 * (at[1] - b0) ** 2)

    def compute_seconds(knobs: dict[str, Any]) -> float:
        a, b, c = get_positions(knobs)
        if a < low or b > high:
            return 3.0
        return 0.1 * (1.0 + steep * ((a - a0) ** 2 + 0.7 * (b - b0) ** 2) + 0.02 * (c != c0))

    return compute_seconds


def make_flat(seed: int) -> Surface:
    """Return a surface on which no knob matters."""
    return lambda knobs: 0.1


SURFACES = {
    "valley": make_valley,
    "narrow": make_narrow,
    "cliff": make_cliff,
    "transport": make_transport,
    "hosts": make_hosts,
    "together": make_together,
    "abyss": make_abyss,
    "flat": make_flat,
}


@dataclass(frozen=True)
class Noise:
    """Multiplicative noise of each step: normal in the logarithm, with occasional outliers that are much slower."""

    name: str
    sd: float
    outliers: float = 0.0  # share of outliers
    size: float = 4.0  # standard deviation of outliers, in multiples of `sd`
    factor: float = 1.0  # minimum factor by which outliers are slower

    def draw_steps(self, seconds: float, n: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Return times of `n` steps that would all take `seconds` without noise: shape (n,)."""
        logs = rng.normal(0.0, self.sd, n)
        slow = np.abs(rng.normal(0.0, self.size * self.sd, n)) + math.log(self.factor)
        return np.asarray(seconds * np.exp(logs + np.where(rng.random(n) < self.outliers, slow, 0.0)))


NOISES = (Noise("3 %", 0.03), Noise("heavy", 0.1, outliers=0.1))
SHORT = (Noise("5 %", 0.05, 0.03, 0.0, 2.0), Noise("8 %", 0.08, 0.03, 0.0, 2.0))
"""Noises of jobs with short trials: three steps in a hundred take twice the time."""


def find_least(surface: Surface) -> float:
    """Return the least time on a grid over all knobs."""
    ends = np.linspace(0.0, 1.0, GRID)
    points = np.array([(a, b, c) for a in ends for b in ends for c in (0.0, 1.0)])
    return min(surface(SPACE.decode(row)) for row in SPACE.encode_shares(points))
