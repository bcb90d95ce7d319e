"""Adasum as arXiv 2006.02924 writes it, in NumPy and float64: what the tests expect."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def pair(a: Vector, b: Vector) -> Vector:
    """Combine the vectors of two ranks, or of two halves of the ranks."""
    both = np.dot(a.ravel(), b.ravel())
    return _coefficient(both, a) * a + _coefficient(both, b) * b


def _coefficient(both: float, of: Vector) -> float:
    squared = np.dot(of.ravel(), of.ravel())
    return 1.0 if squared == 0 else 1.0 - both / (2.0 * squared)


def adasum(ranks: Sequence[Vector]) -> Vector:
    """Combine one vector of each rank, in the order of ranks: neighbours first, then pairs of pairs."""
    level = [np.asarray(each, np.float64) for each in ranks]
    while len(level) > 1:
        level = [pair(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0]
