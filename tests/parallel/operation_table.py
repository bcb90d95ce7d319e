"""What each operation does for each dtype, once: the words of docs/operations.md and the NumPy code that tests expect.

A dtype is named as users name it. bfloat16 is stored as uint16, since NumPy has no such dtype. Run this file to write
the page anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
Reduce = Callable[[str, Sequence[Array]], Array]  # dtype and the ranks' values to the accumulator
PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
OPS = ("Sum", "Average", "Min", "Max", "Product")
HALVES, FLOATS = ("float16", "bfloat16"), ("float32", "float64")
INTEGERS, BOOL = ("int8", "uint8", "int32", "int64"), ("bool",)
DTYPES = (*HALVES, *FLOATS, *INTEGERS, *BOOL)


def stored(dtype: str) -> np.dtype[np.generic]:
    """The NumPy dtype that holds the bits of `dtype`."""
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


def bfloat16_of(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def widen(dtype: str, x: Array) -> Array:
    """Into the type that sums are kept in."""
    if dtype == "bfloat16":
        return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return x.astype(np.float32) if dtype == "float16" else x


def narrow(dtype: str, x: Array) -> Array:
    """Round to the dtype, once."""
    return bfloat16_of(x) if dtype == "bfloat16" else x.astype(stored(dtype))


def saturate(x: NDArray[np.float64], kind: np.dtype[np.generic]) -> Array:
    """Toward zero, to the nearest number that there is."""
    limits = np.iinfo(kind)
    low, high = float(limits.min), float(limits.max)  # int64: high is 2**63, just outside
    result = np.clip(np.trunc(x), low, np.nextafter(high, 0) if kind == np.int64 else high).astype(kind)
    return np.where(x >= high, limits.max, result).astype(kind)


def scale(dtype: str, x: Array, factor: float) -> Array:
    """What a factor does to the inputs."""
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
# Of equal values, -0 and +0 too, the later rank's; a NaN stays.
least = _fold(lambda a, b: np.where((a < b) | (a != a), a, b))
greatest = _fold(lambda a, b: np.where((a > b) | (a != a), a, b))
either = _fold(lambda a, b: a | b)
both = _fold(lambda a, b: a & b)


@dataclass(frozen=True)
class Cell:
    """One operation on one group of dtypes."""

    text: str
    reduce: Reduce | None  # None: refused


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
CELLS = {(dtype, op): cell for group, row in TABLE.items() for dtype in group for op, cell in row.items()}


def expected(dtype: str, op: str, values: Sequence[Array], prescale: float = 1.0, postscale: float = 1.0) -> Array:
    """The result of an allreduce of one array of each rank, in rank order."""
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
    """Equal bits, or both NaN, element by element."""
    bits = f"u{stored(dtype).itemsize}"
    equal = np.ascontiguousarray(a).view(bits) == np.ascontiguousarray(b).view(bits)
    if dtype in (*HALVES, *FLOATS):
        wide_a, wide_b = widen(dtype, a), widen(dtype, b)
        return equal | ((wide_a != wide_a) & (wide_b != wide_b))
    return equal


NOTES = """
Values are combined in the order of the ranks, 0 first, for every element. So a result has the same bits on every rank,
whatever the fusion threshold, the chunk size, the kernels or the kind of store.

`Average` divides by the world size. A rank that contributes nothing to an operation counts as the operation's identity
(0, infinity, 1), and is counted in the divisor.

Overflow of a float is an infinity. Denormal numbers are kept. Of equal values (`-0` and `+0` too) `Min` and `Max` take
the later rank's. Only the sign and payload of a NaN are left open.

`prescale_factor` multiplies every rank's values before they are combined, and rounds to the dtype: in float32 for
float16, bfloat16 and float32 (the factor is rounded to float32 too), in float64 for float64.
`postscale_factor` multiplies the result, after the division of `Average`, before the one rounding.

Factors on integers multiply in float64, truncate toward zero and saturate; above 2^53 an int64 loses its last bits.
A factor on bool is refused, and so is one that is not finite.

With `compression=Compression.fp16` or `bf16`, float32 and float64 are rounded to that dtype by every rank, reduced as
the table says for it, and widened: [compression.md](compression.md).

Any nonzero byte of a bool tensor is true; results are 0 or 1.

All other dtypes (complex, other integers, big-endian arrays) are refused with `UnsupportedTensorError`, on the rank
that submits them, and the engine goes on.

`reducescatter` gives each rank its rows of what `allreduce` gives, bit by bit. The rows are divided in rank
order; where they do not divide evenly, the first ranks have one more.

`broadcast`, `allgather` and `alltoall` copy bytes, for the same dtypes.
"""


def page() -> str:
    """docs/operations.md."""
    header = ["| dtype | " + " | ".join(f"`{op}`" for op in OPS) + " |", "|---" * (len(OPS) + 1) + "|"]
    rows = ["| " + " | ".join([", ".join(group), *(row[op].text for op in OPS)]) + " |" for group, row in TABLE.items()]
    what = "What `allreduce` and `reducescatter` compute. The tests expect what this table says: both are made of one."
    title = f"# Operations\n\n{what}"
    return "\n\n".join([title, "\n".join(header + rows), NOTES.lstrip()])


if __name__ == "__main__":
    PAGE.write_text(page())
