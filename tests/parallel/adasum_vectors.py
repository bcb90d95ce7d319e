"""Vectors for Adasum, and the tolerance of its results against the paper's formula."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..adasum_reference import adasum
from .operation_table import Array, narrow, widen

# Half a place of the dtype beside the largest number of the result; what float64 loses in sums beside that.
CLOSE = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-46}


def vector(dtype: str, shape: Any, rank: int, seed: int = 0) -> Array:
    """Vector of a rank, computable on every rank; the vectors of all ranks partly agree."""
    common = np.random.default_rng([seed, 77]).standard_normal(shape)
    own = np.random.default_rng([seed, rank]).standard_normal(shape)
    values = ((own + 0.7 * common) * 2.0 ** (rank % 3)).astype(np.float64 if dtype == "float64" else np.float32)
    return np.array(narrow(dtype, values)).reshape(shape)


def check_close(dtype: str, got: Array, ranks: list[Array], factor: float = 1.0) -> None:
    """Raise unless `got` is the formula's result, rounded once."""
    check_rounded(dtype, got, factor * adasum([widen(dtype, each).astype(np.float64) for each in ranks]))


def check_rounded(dtype: str, got: Array, want: Array, beside: float = 0.0) -> None:
    """Raise unless `got` is `want`, in float64, rounded once, for numbers up to `beside` or the largest of `want`."""
    assert got.shape == want.shape
    error = np.abs(widen(dtype, got).astype(np.float64) - want).max(initial=0.0)
    room = 1.01 * CLOSE[dtype] * np.abs(want).max(initial=beside)
    assert error <= room, f"off by {error}, which is more than {room}"
