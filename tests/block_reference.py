"""Block scaling and the sums over hosts that are made of it, in NumPy and float64: what the tests expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 64
LEAST_EXPONENT = -117
NAN_SCALE = 255

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def _e4m3_values() -> NDArray[np.float64]:
    """The magnitude of each code from 0 to 126, by the definition of float8 e4m3: 448 is the largest."""
    exponents, mantissas = np.divmod(np.arange(127), 8)
    return np.where(exponents == 0, mantissas * 2.0**-9, (1 + mantissas / 8) * 2.0 ** (exponents - 7.0))


VALUES = _e4m3_values()


def scale_exponents(largest: NDArray[np.float64]) -> NDArray[np.int64]:
    """The least `e`, of at least -117, for which 448 * 2^e is not below each number; 448 is 0.875 * 2^9."""
    fractions, exponents = np.frexp(largest)
    least = np.where(largest > 0, exponents - 9 + (fractions > 0.875), LEAST_EXPONENT)
    return np.maximum(least, LEAST_EXPONENT).astype(np.int64)


def _codes(x: NDArray[np.float64]) -> Bytes:
    """The nearest code of each number, of two equally near ones the even one."""
    magnitude = np.abs(x)
    above = np.searchsorted(VALUES, magnitude)
    below = np.maximum(above - 1, 0)
    up, down = VALUES[above] - magnitude, magnitude - VALUES[below]
    chosen = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return (chosen | np.signbit(x) << 7).astype(np.uint8)


def encode(x: Floats) -> tuple[Bytes, Bytes]:
    """Return the scale byte of each block and the code of each element."""
    blocks = np.zeros((-(-len(x) // BLOCK), BLOCK))
    blocks.flat[: len(x)] = x
    finite = np.isfinite(blocks).all(axis=1)
    blocks[~finite] = 0
    exponents = scale_exponents(np.abs(blocks).max(axis=1, initial=0))
    codes = _codes((blocks * 2.0 ** -exponents[:, None].astype(np.float64)).reshape(-1))[: len(x)]
    return np.where(finite, exponents + 127, NAN_SCALE).astype(np.uint8), codes


def decode(scales: Bytes, codes: Bytes) -> Floats:
    """Return the numbers for which blocks stand."""
    signs = np.where(codes & 128, -1.0, 1.0)
    factors = np.where(scales == NAN_SCALE, np.nan, 2.0 ** (scales.astype(np.float64) - 127))
    wide = signs * VALUES[np.minimum(codes & 127, 126)] * np.repeat(factors, BLOCK)[: len(codes)]
    with np.errstate(over="ignore"):
        return wide.astype(np.float32)


def coded(x: Floats) -> Floats:
    """Return numbers as they are after one coding."""
    return decode(*encode(x))


def taken(values: Any, prescale: float) -> Floats:
    """Return a rank's values, flat, as float32 times a factor: of float64 in float64, of the rest in float32."""
    flat = np.asarray(values).reshape(-1)
    with np.errstate(all="ignore"):
        if flat.dtype == np.float64:
            return (flat * prescale).astype(np.float32)
        return flat.astype(np.float32) * np.float32(prescale)


def blocks_of_ranks(
    values: Sequence[Any], hosts: Sequence[int], average: bool = False, prescale: float = 1.0, postscale: float = 1.0
) -> Any:
    """Return the result of an allreduce with `Compression.fp8` over several hosts, in the dtype of the values.

    `values` holds the tensor of each rank, or None for a rank without one; at least one has to bring it. `hosts` holds
    the number of each rank's host. With `average`, the sum is divided by the number of ranks.
    """
    model = np.asarray(next(each for each in values if each is not None))
    brought = [np.zeros_like(model) if each is None else each for each in values]
    order = sorted(set(hosts), key=list(hosts).index)
    total: Floats | None = None
    with np.errstate(all="ignore"):
        for host in order:
            own: Floats | None = None
            for rank, each in enumerate(brought):
                if hosts[rank] == host:
                    wide = taken(each, prescale)
                    own = wide if own is None else own + wide
            assert own is not None
            total = coded(own) if total is None else total + coded(own)
        assert total is not None
        if average:
            total = total / np.float32(len(values))
        if postscale != 1:
            total = total * np.float32(postscale)
        return coded(total).astype(model.dtype).reshape(model.shape)
