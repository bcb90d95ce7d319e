"""Input arrays that every rank can compute, and checks of results."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

import engine

from .operation_table import BOOL, FLOATS, HALVES, MOVED, Array, narrow, same, stored


def numbers(dtype: str, shape: Any, rank: int, seed: int = 0) -> Array:
    """Array of a rank, computable on every rank: small numbers, random bits, and special values."""
    rng = np.random.default_rng([seed, rank, *dtype.encode()])
    count = int(np.prod(shape))
    kind = stored(dtype)
    if dtype in BOOL:
        return (rng.random(count) < 0.5).reshape(shape)
    anything = rng.integers(0, 256, count * kind.itemsize, np.uint8).view(kind)
    if dtype in MOVED:
        return anything.reshape(shape)
    if dtype in (*HALVES, *FLOATS):
        wide = np.float64 if dtype == "float64" else np.float32
        small = (rng.standard_normal(count) * np.exp2(rng.integers(-8, 8, count))).astype(wide)
        special = rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 1e-40, 6e-8, 65504.0], count).astype(wide)
        with np.errstate(all="ignore"):
            small, special = narrow(dtype, small), narrow(dtype, special)
    else:
        limits = np.iinfo(kind)
        small = rng.integers(max(-9, limits.min), 9, count).astype(kind)
        special = rng.choice(np.array([limits.min, limits.max, 0, 1, limits.max - 1], kind), count)
    return np.choose(rng.integers(0, 3, count), [small, anything, special]).astype(kind).reshape(shape)


def small_numbers(dtype: str, shape: Any, rank: int, seed: int = 0) -> Array:
    """Array of a rank without special values, so that its sums are easy to follow; otherwise as `numbers`."""
    rng = np.random.default_rng([seed, rank])
    whole = rng.integers(0, 2 if dtype in BOOL else 7, int(np.prod(shape)))
    values = whole.astype(np.float32) if dtype in HALVES else whole.astype(stored(dtype))
    return narrow(dtype, values).reshape(shape)


def shares(rows: int, size: int) -> list[int]:
    """First row of each rank's share in a reduce-scatter, and the end."""
    return list(itertools.accumulate((rows // size + (rank < rows % size) for rank in range(size)), initial=0))


def tensor(dtype: str, array: Array) -> Any:
    """Copy of an array as a tensor: of the dtype of ml_dtypes for bfloat16."""
    if dtype != "bfloat16":
        return array.copy()
    import ml_dtypes

    return array.view(ml_dtypes.bfloat16).copy()


def array(dtype: str, tensor: Any) -> Array:
    """Array of a tensor, the inverse of `tensor`."""
    return np.asarray(tensor).view(np.uint16) if dtype == "bfloat16" else np.asarray(tensor)


def check_equal(dtype: str, got: Array, want: Array) -> None:
    """Raise unless shape, dtype and bits are those expected; a NaN equals any other."""
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    assert got.dtype == want.dtype, f"dtype {got.dtype}, expected {want.dtype}"
    equal = same(dtype, got, want).reshape(-1)
    if not equal.all():
        at = int(np.argmin(equal))
        raise AssertionError(
            f"{(~equal).sum()} of {equal.size} differ, first at {at}: got {got.flat[at]!r}, expected {want.flat[at]!r}"
        )


def refused(call: Callable[[], Any], text: str, kind: Any = engine.errors.UnsupportedTensorError) -> str:
    """Check that `call` raises `kind`, one or a tuple, with `text` in its message; return the message."""
    try:
        call()
    except kind as error:
        said = str(error)
    else:
        raise AssertionError(f"not refused with {kind}")
    assert text in said, f"{text!r} is not in {said!r}"
    return said


def check_same_on_all(parts: list[Array]) -> None:
    """Raise unless the bytes of all results are the same on every rank. Collective."""
    engine.check_consistency({str(at): np.frombuffer(part.tobytes(), np.uint8) for at, part in enumerate(parts)})


def works(size: int) -> None:
    """Check that the engine still works: a named, an unnamed and a large operation. Collective."""
    assert engine.allreduce(np.ones(3, np.float32), engine.Sum).tolist() == [size] * 3
    assert engine.allreduce(np.ones(3, np.int64), engine.Sum, "still works").tolist() == [size] * 3
    assert engine.allreduce(np.ones(300_000, np.float32), engine.Sum, "large still works")[-1] == size
