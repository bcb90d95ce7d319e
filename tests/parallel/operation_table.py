"""Effect of each operation on each dtype: the words of docs/reference/operations.md and the tests' NumPy reference.

A dtype is named as users name it. bfloat16 is stored as uint16, since NumPy has no such dtype. Run this module to
print the table of the page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
Reduce = Callable[[str, Sequence[Array]], Array]  # from dtype and the ranks' values to the accumulator
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "operations.md"
OPS = ("Sum", "Average", "Min", "Max", "Product")
HALVES, FLOATS = ("float16", "bfloat16"), ("float32", "float64")
INTEGERS, BOOL = ("int8", "uint8", "int16", "uint16", "int32", "int64"), ("bool",)
MOVED = ("uint32", "uint64", "complex64", "complex128")  # NumPy's; torch has more
DTYPES = (*HALVES, *FLOATS, *INTEGERS, *BOOL)


def stored(dtype: str) -> np.dtype[np.generic]:
    """NumPy dtype that holds the bits of `dtype`."""
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


def bfloat16_of(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def widen(dtype: str, x: Array) -> Array:
    """Convert to the dtype in which sums are kept."""
    if dtype == "bfloat16":
        return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return x.astype(np.float32) if dtype == "float16" else x


def narrow(dtype: str, x: Array) -> Array:
    """Round to the dtype, once."""
    return bfloat16_of(x) if dtype == "bfloat16" else x.astype(stored(dtype))


def saturate(x: NDArray[np.float64], kind: np.dtype[np.generic]) -> Array:
    """Truncate toward zero, and clamp to the dtype's range."""
    limits = np.iinfo(kind)
    low, high = float(limits.min), float(limits.max)  # int64: high is 2**63, just out of range
    result = np.clip(np.trunc(x), low, np.nextafter(high, 0) if kind == np.int64 else high).astype(kind)
    return np.where(x >= high, limits.max, result).astype(kind)


def scale(dtype: str, x: Array, factor: float) -> Array:
    """Multiply inputs by a factor."""
    if factor == 1.0:
        return x
    if dtype in INTEGERS:
        return saturate(x.astype(np.float64) * factor, x.dtype)
    wide = widen(dtype, x)
    return narrow(dtype, wide * wide.dtype.type(factor))


def _fold(step: Callable[[Array, Array], Array]) -> Reduce:
    def reduce(dtype: str, values: Sequence[Array]) -> Array:
        total = widen(dtype, values[0]).copy()
        for value in values[1:]:
            total = step(total, widen(dtype, value))
        return total

    return reduce


def _average(dtype: str, values: Sequence[Array]) -> Array:
    total = sums(dtype, values)
    return total / total.dtype.type(len(values))


def _integer_average(dtype: str, values: Sequence[Array]) -> Array:
    total = sums(dtype, [value.astype(np.int64) for value in values])
    down = total // len(values)
    quotient = down + ((down < 0) & (down * len(values) != total))
    return quotient.astype(stored(dtype))


sums = _fold(lambda a, b: a + b)
products = _fold(lambda a, b: a * b)
# Of equal values, -0 and +0 included, the later rank's wins; a NaN stays.
least = _fold(lambda a, b: np.where((a < b) | (a != a), a, b))
greatest = _fold(lambda a, b: np.where((a > b) | (a != a), a, b))
either = _fold(lambda a, b: a | b)
both = _fold(lambda a, b: a & b)


@dataclass(frozen=True)
class Cell:
    """One operation on one group of dtypes."""

    text: str
    reduce: Reduce | None  # None if refused


TABLE: dict[tuple[str, ...], dict[str, Cell]] = {
    HALVES: {
        "Sum": Cell("added in float32, rounded once", sums),
        "Average": Cell("added and divided in float32, rounded once", _average),
        "Min": Cell("the least; NaN if any is NaN", least),
        "Max": Cell("the greatest; NaN if any is NaN", greatest),
        "Product": Cell("multiplied in float32, rounded once", products),
    },
    FLOATS: {
        "Sum": Cell("added in the dtype", sums),
        "Average": Cell("added, then divided by the world size, in the dtype", _average),
        "Min": Cell("the least; NaN if any is NaN", least),
        "Max": Cell("the greatest; NaN if any is NaN", greatest),
        "Product": Cell("multiplied in the dtype", products),
    },
    INTEGERS: {
        "Sum": Cell("wraps", sums),
        "Average": Cell("the exact sum (of int64: it wraps), divided, truncated toward zero", _integer_average),
        "Min": Cell("the least", least),
        "Max": Cell("the greatest", greatest),
        "Product": Cell("wraps", products),
    },
    BOOL: {
        "Sum": Cell("true on any rank", either),
        "Average": Cell("refused: `UnsupportedTensorError`", None),
        "Min": Cell("true on all ranks", both),
        "Max": Cell("true on any rank", either),
        "Product": Cell("true on all ranks", both),
    },
}
# Adasum has tests of its own (test_adasum.py): its result is no sum of equal bits, but a formula to be met.
ADASUM = {
    HALVES: "combined in float64, rounded by way of float32",
    FLOATS: "combined in float64, rounded once",
    INTEGERS: "refused: `UnsupportedTensorError`",
    BOOL: "refused: `UnsupportedTensorError`",
}
CELLS = {(dtype, op): cell for group, row in TABLE.items() for dtype in group for op, cell in row.items()}


def expected(dtype: str, op: str, values: Sequence[Array], prescale: float = 1.0, postscale: float = 1.0) -> Array:
    """Result of an allreduce of one array of each rank, in rank order."""
    reduce = CELLS[dtype, op].reduce
    assert reduce is not None, f"{op} of {dtype} is refused"
    with np.errstate(all="ignore"):
        total = reduce(dtype, [scale(dtype, value, prescale) for value in values])
        if postscale != 1.0:
            if dtype in INTEGERS:
                total = saturate(total.astype(np.float64) * postscale, total.dtype)
            else:
                total = total * total.dtype.type(postscale)
        return narrow(dtype, total)


def same(dtype: str, a: Array, b: Array) -> NDArray[np.bool_]:
    """Compare element by element: equal bits, or both NaN. Dtypes that are only moved need equal bits."""
    if dtype in MOVED:
        first, second = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b))
        return (first == second).reshape(-1, stored(dtype).itemsize).all(axis=1)
    bits = f"u{stored(dtype).itemsize}"
    equal = np.ascontiguousarray(a).view(bits) == np.ascontiguousarray(b).view(bits)
    if dtype in (*HALVES, *FLOATS):
        wide_a, wide_b = widen(dtype, a), widen(dtype, b)
        return equal | ((wide_a != wide_a) & (wide_b != wide_b))
    return equal


def describe_table() -> str:
    """Return the list of docs/reference/operations.md: what each operation does, by dtype."""
    lines = []
    for group, row in TABLE.items():
        lines.append(f"- **{', '.join(group)}**")
        lines += [
            f"  - `{op}`: {text}" for op, text in [*((op, row[op].text) for op in OPS), ("Adasum", ADASUM[group])]
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(describe_table())
