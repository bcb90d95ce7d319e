"""Reference results of reductions: in float64 (longdouble for float64), and exact for whole numbers.

It follows the table in `docs/reference/operations.md`. Values of bfloat16 are uint16 with its bits, because NumPy lacks
that dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.driver import BFLOAT16

Values = NDArray[Any]
FLOATS = ("float16", BFLOAT16, "float32", "float64")
WHOLE = ("int8", "uint8", "int16", "uint16", "int32", "int64", "bool")
DTYPES = (*FLOATS, *WHOLE)
OPS = ("sum", "average", "min", "max", "product")


@lru_cache(maxsize=4)
def draw_values(rank: int, count: int, dtype: str) -> Values:
    """Return a rank's values, the same in every process: floats of many magnitudes, whole numbers that overflow."""
    generator = np.random.default_rng([rank, count, DTYPES.index(dtype)])
    if dtype in FLOATS:
        values = generator.standard_normal(count) * 2.0 ** generator.integers(-4, 5, count)
        return round_values(values, dtype)
    if dtype == "bool":
        return generator.integers(0, 2, count).astype(bool)
    return generator.integers(0, 256, 8 * count, dtype=np.uint8).view(np.uint64).astype(dtype)


def round_values(values: Values, dtype: str) -> Values:
    """Round floats to a dtype, to nearest even."""
    if dtype != BFLOAT16:
        return values.astype(dtype)
    bits = values.astype(np.float32).view(np.uint32)
    halves = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), halves).astype(np.uint16)


def widen_values(values: Values, dtype: str) -> Values:
    """Convert floats to a dtype in which their sums are sufficiently exact."""
    if dtype == BFLOAT16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return values.astype(np.longdouble if dtype == "float64" else np.float64)


def get_spacing(values: Values, dtype: str) -> Values:
    """Return the distance of neighbouring numbers of a dtype at the given values."""
    size = np.abs(values).astype(np.float64)
    if dtype == BFLOAT16:
        return np.spacing(np.maximum(size, 2.0**-126).astype(np.float32)).astype(np.float64) * 2.0**16
    least = np.finfo(dtype).tiny
    return np.spacing(np.maximum(size, least).astype(dtype)).astype(np.float64)


def error(
    got: Values,
    given: Sequence[Values],
    dtype: str,
    op: str,
    prescale: float = 1.0,
    postscale: float = 1.0,
    wire: str = "",
) -> float:
    """Return the error of a result of floats, at its worst element.

    Its unit is the distance of neighbouring numbers (of `wire`) at the largest of the values and the result. Infinity
    if one is a NaN or an infinity and the other is not. `given` holds the input values by rank; `wire` is the dtype on
    the wire, if it is another one.
    """
    values = [widen_values(each, dtype) * prescale for each in given]
    wanted = {
        "sum": lambda: reduce(np.add, values),
        "average": lambda: reduce(np.add, values) / len(values),
        "min": lambda: reduce(np.minimum, values),
        "max": lambda: reduce(np.maximum, values),
        "product": lambda: reduce(np.multiply, values),
    }[op]()
    with np.errstate(over="ignore", invalid="ignore"):
        wanted, result = wanted * postscale, widen_values(got, dtype)
        size = np.abs(wanted)
        for each in values:
            size = np.maximum(size, np.abs(each))
        size = np.where(np.isfinite(size), size, np.abs(wanted))
        odd = ~(np.isfinite(wanted) & np.isfinite(result))
        same = (wanted == result) | (np.isnan(wanted) & np.isnan(result))
        if bool((odd & ~same).any()):
            return float("inf")
        off = np.abs(np.where(odd, 0, result - wanted)) / np.where(
            odd, 1, get_spacing(np.where(odd, 1, size), wire or dtype)
        )
    return float(off.max(initial=0.0))


def reduce_whole(given: Sequence[Values], op: str) -> Values | None:
    """Return the result of a reduction of whole numbers; None if it is undefined."""
    first = given[0]
    if first.dtype == bool:
        if op == "average":
            return None
        return np.any(given, axis=0) if op in ("sum", "max") else np.all(given, axis=0)
    if op in ("min", "max"):
        return np.asarray(reduce(np.minimum if op == "min" else np.maximum, given))
    with np.errstate(over="ignore"):
        wide_ = [each.astype(np.int64) for each in given]
        total = reduce(np.multiply if op == "product" else np.add, wide_)
        if op == "average":
            quotient = np.abs(total) // len(given)  # toward zero; -2^63 is its own absolute, which wraps back
            total = np.where(total < 0, -quotient, quotient)
        return np.asarray(total).astype(first.dtype)
