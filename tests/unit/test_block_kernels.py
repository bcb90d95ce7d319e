"""The kernels of block scaling, called directly and compared bit by bit with NumPy, on every level."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ..block_reference import BLOCK, NAN_SCALE, Bytes, Floats, coded, decode, encode, scale_exponents, taken
from .kernel_library import DTYPES, Buffer, Kernels, buffer_of, runnable, stored
from .kernel_reference import assert_equal_bits, numbers, rounded, widened

LENGTHS = [0, 1, 2, 31, 63, 64, 65, 127, 128, 129, 1023, 1025, 4096 + 33]
BYTE, FLOAT = np.dtype(np.uint8), np.dtype(np.float32)
LARGEST = np.finfo(np.float32).max
FLOATS = DTYPES[:4]


def encoded(kernels: Kernels, x: Floats, offset: int = 0) -> tuple[Bytes, Bytes]:
    source = buffer_of(x, offset % 16)
    scales, codes = Buffer(BYTE, -(-len(x) // BLOCK), offset), Buffer(BYTE, len(x), offset + 1)
    kernels.encode(scales.address, codes.address, source.address, len(x))
    for each in (source, scales, codes):
        each.assert_guards()
    return scales.values.copy(), codes.values.copy()


def decoded(kernels: Kernels, scales: Bytes, codes: Bytes, offset: int = 0) -> Floats:
    out, factors, source = (
        Buffer(FLOAT, len(codes), offset % 16),
        buffer_of(scales, offset),
        buffer_of(codes, offset + 3),
    )
    kernels.decode(out.address, factors.address, source.address, len(codes))
    out.assert_guards()
    return out.values.copy()


def added(kernels: Kernels, before: Floats, scales: Bytes, codes: Bytes, offset: int = 0) -> Floats:
    out, factors, source = buffer_of(before, offset % 16), buffer_of(scales, offset), buffer_of(codes, offset)
    kernels.decode_add(out.address, factors.address, source.address, len(codes))
    out.assert_guards()
    return out.values.copy()


def gradients(n: int, seed: int) -> Floats:
    """Finite numbers of very unequal sizes, within blocks and from block to block, with zeros among them."""
    rng = np.random.default_rng([n, seed])
    sizes = np.exp2(rng.integers(-8, 9, n) + np.repeat(rng.integers(-100, 100, n // BLOCK + 1), BLOCK)[:n])
    x = rng.standard_normal(n) * sizes * (rng.random(n) > 0.1)
    return x.astype(np.float32)


def test_codes_of_every_length_and_alignment(kernels: Kernels) -> None:
    for seed, n in enumerate(LENGTHS):
        x = gradients(n, seed)
        scales, codes = encoded(kernels, x, seed)
        want_scales, want_codes = encode(x)
        assert scales.tolist() == want_scales.tolist()
        assert codes.tolist() == want_codes.tolist()
        got = decoded(kernels, scales, codes, seed)
        assert got.tobytes() == decode(scales, codes).tobytes()
        before = gradients(n, seed + 100)
        assert added(kernels, before, scales, codes, seed).tobytes() == (before + got).tobytes()


def test_every_code_with_every_scale(kernels: Kernels) -> None:
    """Products are exact; no encoder writes the codes of NaN, which are numbers here."""
    codes = np.repeat(np.concatenate([np.arange(127), np.arange(128, 255)]).astype(np.uint8), BLOCK)
    for first in range(10, 248, 7):
        scales = (first + np.arange(len(codes) // BLOCK) % (248 - first)).astype(np.uint8)
        assert decoded(kernels, scales, codes).tobytes() == decode(scales, codes).tobytes()


def test_rounding_to_nearest_even_as_ml_dtypes_casts(kernels: Kernels) -> None:
    """Covers every number halfway between two codes and its neighbours; 448 in each block makes the scale one."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    every = decode(np.full(2, 127, np.uint8), np.arange(127, dtype=np.uint8)).astype(np.float64)
    half = ((every[1:] + every[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(half, np.float32(0)), np.nextafter(half, np.float32(1e9))]
    near = np.concatenate([every.astype(np.float32), half, *beside])
    drawn = np.random.default_rng(0).uniform(-448, 448, 20_000).astype(np.float32)
    x = np.concatenate([near, -near, drawn])
    rows = np.full((-(-len(x) // (BLOCK - 1)), BLOCK), 448, np.float32)
    rows[:, 1:].flat[: len(x)] = x
    scales, codes = encoded(kernels, rows.reshape(-1))
    assert set(scales.tolist()) == {127}
    want = rows.reshape(-1).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert (codes == want).all()


def test_coding_twice_changes_nothing(kernels: Kernels) -> None:
    once = decoded(kernels, *encoded(kernels, gradients(10_007, 3)))
    assert decoded(kernels, *encoded(kernels, once)).tobytes() == once.tobytes()


def test_errors_are_those_of_four_significant_bits(kernels: Kernels) -> None:
    """Numbers above 2^-13 of their block's largest have an error of at most 1/16; those below 2^-17 are zero."""
    x = gradients(100 * BLOCK, 1)
    got = decoded(kernels, *encoded(kernels, x)).astype(np.float64)
    largest = np.repeat(np.abs(x.reshape(-1, BLOCK)).max(1), BLOCK)
    exact = (np.abs(x) >= largest * 2.0**-13) & (x != 0)
    assert exact.sum() > len(x) // 2
    assert (np.abs(got - x)[exact] <= np.abs(x)[exact] / 16).all()
    tiny = np.abs(x) < largest * 2.0**-18.9
    assert (got[tiny] == 0).all()


@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("n", [3 * BLOCK, 2 * BLOCK + 5])
def test_what_is_not_finite_makes_its_block_a_nan_and_no_other(kernels: Kernels, wrong: float, n: int) -> None:
    clean = gradients(n, 9)
    want = coded(clean)
    for at in range(n):
        x = clean.copy()
        x[at] = wrong
        scales, codes = encoded(kernels, x)
        got, summed = decoded(kernels, scales, codes), added(kernels, clean, scales, codes)
        block = np.arange(n) // BLOCK == at // BLOCK
        assert scales[at // BLOCK] == NAN_SCALE
        assert set(got[block].view(np.uint32).tolist()) == {0x7FC00000}, "ranks would differ in the bits of a NaN"
        assert np.isnan(summed[block]).all()
        assert got[~block].tobytes() == want[~block].tobytes()
        assert np.isfinite(summed[~block]).all()


def test_denormal_blocks_and_zeros(kernels: Kernels) -> None:
    """The scale is at least 2^-117: the reciprocal of a smaller one would be infinite, and zero times that NaN."""
    for exponent in range(-150, -90):
        x = np.zeros(BLOCK + 1, np.float32)
        x[7::9] = np.float32(2.0**exponent * 1.25)
        x[3] = -x[7]
        scales, codes = encoded(kernels, x)
        assert min(scales) >= 10
        got = decoded(kernels, scales, codes)
        assert got.tobytes() == coded(x).tobytes()
        assert np.isfinite(got).all()
        assert (got[x == 0] == 0).all()
    zeros = np.array([0.0, -0.0] * 40, np.float32)
    assert decoded(kernels, *encoded(kernels, zeros)).tobytes() == zeros.tobytes()
    least = np.full(BLOCK, np.float32(1e-44))
    assert (decoded(kernels, *encoded(kernels, least)) == 0).all()


def test_the_largest_numbers(kernels: Kernels) -> None:
    """A scale byte is at most 247; what rounds up beyond float32's range is an infinity."""
    for value in (3.26e38, -3.26e38, 1e38, 2.0**127):
        scales, codes = encoded(kernels, np.full(5, value, np.float32))
        got = decoded(kernels, scales, codes)
        assert np.isfinite(got).all() and abs(got[0] / value - 1) <= 1 / 16
    scales, codes = encoded(kernels, np.full(5, LARGEST, np.float32))
    assert scales[0] == 247 == scale_exponents(np.array([LARGEST], np.float64))[0] + 127
    assert np.isinf(decoded(kernels, scales, codes)).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_of_every_dtype_and_back(kernels: Kernels, dtype: str) -> None:
    number = DTYPES.index(dtype)
    for seed, n in enumerate(LENGTHS):
        for factor in (1.0, 0.3):
            source, wide = buffer_of(numbers(dtype, n, n), seed % 5), Buffer(FLOAT, n, seed % 7)
            kernels.to_float(number, factor, wide.address, source.address, n)
            values = source.values if dtype == "float64" else widened(dtype, source.values)
            assert_equal_bits("float32", wide.values, taken(values, factor))
            back = Buffer(stored(dtype), n, seed % 3)
            kernels.from_float(number, back.address, wide.address, n)
            with np.errstate(all="ignore"):
                want = wide.values.astype(np.float64) if dtype == "float64" else rounded(dtype, wide.values)
            assert_equal_bits(dtype, back.values, want)
            for each in (source, wide, back):
                each.assert_guards()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=3 * BLOCK), st.integers(0, 8))
def test_all_levels_have_equal_bits(library: ctypes.CDLL, drawn: list[int], shift: int) -> None:
    """Any bits are a float32; `shift` makes them fewer, so that blocks of equal sizes are drawn, too."""
    x = (np.array(drawn, np.uint32) >> np.uint32(shift)).view(np.float32)
    want_scales, want_codes = encode(x)
    for each in runnable(library):
        scales, codes = encoded(each, x, shift)
        assert scales.tolist() == want_scales.tolist()
        assert codes.tolist() == want_codes.tolist()
        assert decoded(each, scales, codes).tobytes() == decoded(runnable(library)[0], scales, codes).tobytes()
