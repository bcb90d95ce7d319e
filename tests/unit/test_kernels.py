"""The reduction kernels, called directly and compared bit by bit with NumPy."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import itertools
import os
import shutil
import subprocess
import sys
import timeit
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .kernel_library import (
    DTYPES,
    EVERY_SOURCE,
    NO_SOURCE,
    OPS,
    SANITIZED,
    X86,
    Buffer,
    Kernels,
    Spec,
    buffer_of,
    call_reduce,
    pointers,
    reduced,
    runnable,
    stored,
)
from .kernel_reference import assert_equal_bits, bits, expected, numbers, ranks, rounded, scaled, widened

CASES = [(d, o) for d in DTYPES for o in OPS if (d, o) != ("bool", "average")]
LENGTHS = [0, 1, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 127, 511, 1025, 4097]


# ---- reductions ----


@pytest.mark.sample(36)
@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_reduction_of_every_length_and_alignment(kernels: Kernels, dtype: str, op: str) -> None:
    for seed, n in enumerate(LENGTHS):
        for count in (1, 2, 3, 5):
            spec = Spec(dtype, op, divisor=count if op == "average" else 1)
            sources = ranks(dtype, count, n, seed)
            assert_equal_bits(dtype, reduced(kernels, spec, sources, (seed + count) % 9), expected(spec, sources))


@pytest.mark.sample(20)
@pytest.mark.parametrize("dtype", DTYPES[:-1])
@pytest.mark.parametrize("op", ["sum", "average", "min"])
def test_factors_and_divisors(kernels: Kernels, dtype: str, op: str) -> None:
    factors = [
        (1.0, 3.0, 1.0),
        (0.1, 1.0, 1.0),
        (1.0, 1.0, 1 / 3),
        (-2.5, 6.0, 1e3),
        (1e30, 4.0, 1.0),
        (1.0, 2.0**40, 0.5),
    ]
    for seed, (prescale, divisor, postscale) in enumerate(factors):
        for count in (1, 2, 4):
            for unscaled in (0, count - 1, NO_SOURCE, EVERY_SOURCE):
                if dtype != "int64" and dtype not in DTYPES[:4] and op != "average" and divisor > 100:
                    continue  # the divisor does not fit the dtype
                spec = Spec(dtype, op, unscaled, prescale, divisor, postscale)
                sources = ranks(dtype, count, 259, seed)
                assert_equal_bits(dtype, reduced(kernels, spec, sources), expected(spec, sources))


@pytest.mark.parametrize("dtype", DTYPES[:-1])
def test_it_does_not_matter_who_scales(kernels: Kernels, dtype: str) -> None:
    sources = ranks(dtype, 3, 3001)
    scaled_by_ranks = []
    for source in sources:
        packed = Buffer(source.dtype, len(source), 3)
        index = DTYPES.index(dtype)
        kernels.pack(index, index, 0.3, False, packed.address, buffer_of(source, 1).address, len(source))
        packed.assert_guards()
        scaled_by_ranks.append(packed.values.copy())
        assert_equal_bits(dtype, packed.values, scaled(dtype, source, 0.3))
    want = reduced(kernels, Spec(dtype, "sum"), scaled_by_ranks)
    for own in range(3):
        offered = [source if k == own else scaled_by_ranks[k] for k, source in enumerate(sources)]
        assert_equal_bits(dtype, reduced(kernels, Spec(dtype, "sum", own, 0.3), offered), want)
    assert_equal_bits(dtype, reduced(kernels, Spec(dtype, "sum", EVERY_SOURCE, 0.3), sources), want)


def test_sum_is_in_rank_order(kernels: Kernels) -> None:
    sources = [np.array([x], np.float32) for x in (1e8, 1.0, -1e8, 1.0)]
    assert reduced(kernels, Spec("float32", "sum"), sources)[0] == 1.0  # ((1e8 + 1) - 1e8) + 1
    assert reduced(kernels, Spec("float32", "sum"), sources[::-1])[0] == 0.0


@pytest.mark.parametrize(("dtype", "huge"), [("float16", 60000.0), ("bfloat16", 3e38)])
def test_halves_round_once(kernels: Kernels, dtype: str, huge: float) -> None:
    """A sum recovers from a running total beyond the dtype's range; additions below its precision are not lost."""
    if dtype == "float16":
        sources = [rounded(dtype, np.full(67, x, np.float32)) for x in (huge, huge, -huge)]
        assert (reduced(kernels, Spec(dtype, "sum"), sources).astype(np.float32) == np.float16(huge)).all()
    one, tiny = (
        rounded(dtype, np.full(67, x, np.float32)) for x in (1.0, 2.0**-9 if dtype == "bfloat16" else 2.0**-12)
    )
    got = widened(dtype, reduced(kernels, Spec(dtype, "sum"), [one] + [tiny] * 8))
    assert (got > 1).all()


def test_min_and_max_of_special_numbers(kernels: Kernels) -> None:
    a = np.array([np.nan, 1.0, 0.0, -0.0, np.inf], np.float32).repeat(17)
    b = np.array([1.0, np.nan, -0.0, 0.0, -np.inf], np.float32).repeat(17)
    for op, last in (("min", -np.inf), ("max", np.inf)):
        got = reduced(kernels, Spec("float32", op), [a, b])[::17]
        assert np.isnan(got[:2]).all()
        assert list(np.signbit(got[2:4])) == [True, False]  # equal: the later rank's zero
        assert got[4] == last


def test_bool_is_zero_or_one(kernels: Kernels) -> None:
    a, b = np.array([0, 0, 2, 255, 128, 7], np.uint8), np.array([0, 1, 0, 254, 1, 8], np.uint8)
    for op, want in (("sum", a | b), ("max", a | b), ("product", (a != 0) & (b != 0)), ("min", (a != 0) & (b != 0))):
        assert (reduced(kernels, Spec("bool", op), [a, b]) == (want != 0)).all()
    assert (reduced(kernels, Spec("bool", "sum"), [a]) == (a != 0)).all()


def test_integers_wrap_but_averages_do_not(kernels: Kernels) -> None:
    for dtype in ("int8", "uint8", "int16", "uint16", "int32"):
        top, least = np.iinfo(dtype).max, np.iinfo(dtype).min
        high, low = np.full(37, top, dtype), np.full(37, least, dtype)
        assert (reduced(kernels, Spec(dtype, "sum"), [high, np.ones(37, dtype)]) == least).all()
        assert (reduced(kernels, Spec(dtype, "average", divisor=3), [high] * 3) == top).all()
        assert (reduced(kernels, Spec(dtype, "average", divisor=3), [low] * 3) == least).all()
    minus, zero = np.full(5, -1, np.int32), np.zeros(5, np.int32)
    assert (reduced(kernels, Spec("int32", "average", divisor=2), [minus, zero]) == 0).all()  # toward zero


# ---- where results go ----


@pytest.mark.sample(54)
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_result_replaces_sources(kernels: Kernels, dtype: str, op: str, streaming: bool) -> None:
    """The target is one of the sources, as in shared memory: every rank's tensor is read, then overwritten."""
    for count in (1, 2, 3, 4):
        for own in range(count):
            spec = Spec(dtype, op, divisor=count if op == "average" else 1)
            values = ranks(dtype, count, 5003, own)
            want = expected(spec, values)
            tensors = [buffer_of(v, k) for k, v in enumerate(values)]
            order = [tensors[own], *(t for k, t in enumerate(tensors) if k != own)]
            call_reduce(kernels, spec, tensors, order, streaming)
            for t in tensors:
                assert_equal_bits(dtype, t.values, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1, 5, 33])
def test_streaming_mirror(kernels: Kernels, dtype: str, offset: int) -> None:
    for n in [*LENGTHS, 20011]:
        values = ranks(dtype, 2, n, n)
        tensor, other, mirror = buffer_of(values[0], 2), buffer_of(values[1]), Buffer(stored(dtype), n, offset)
        call_reduce(kernels, Spec(dtype, "sum"), [tensor, other], [tensor, mirror], streaming=True)
        want = expected(Spec(dtype, "sum"), values)
        assert_equal_bits(dtype, tensor.values, want)
        assert_equal_bits(dtype, mirror.values, want)


@pytest.mark.parametrize("copy", ["copy", "copy_streaming"])
def test_copies_at_any_byte(kernels: Kernels, copy: str) -> None:
    byte = np.dtype(np.uint8)
    for n in (0, 1, 2, 63, 64, 65, 127, 128, 200, 1023, 1024, 1055, 1151, 1152, 1153, 4096, 10007):
        for to, source in ((0, 0), (1, 0), (0, 1), (63, 5), (17, 17), (33, 64)):
            original = buffer_of(numbers("uint8", n, n), source)
            destination = Buffer(byte, n, to)
            getattr(kernels, copy)(destination.address, original.address, n)
            destination.assert_guards()
            assert (destination.values == original.values).all()


def test_copies_are_as_fast_at_any_offset_in_a_page(kernels: Kernels) -> None:
    """AMD's `rep movsb` takes twenty times as long 1 to 31 bytes past the source's offset; others pass anyhow."""
    n = 1 << 16
    memory = np.ones(4 * n, np.uint8)
    source = -(-memory.ctypes.data // 4096) * 4096
    room = source + n

    def seconds(offset: int) -> float:
        rounds = timeit.repeat(lambda: kernels.copy(room + offset, source, n), number=20, repeat=20)
        return min(rounds)

    usual = seconds(0)
    slow = {offset: times for offset in range(4, 65, 4) if (times := seconds(offset) / usual) > 4}
    assert not slow


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("streaming", [False, True])
def test_pack(kernels: Kernels, dtype: str, streaming: bool) -> None:
    for prescale in (1.0,) if dtype == "bool" else (1.0, 0.7):
        for n in LENGTHS:
            source, slot = buffer_of(numbers(dtype, n, n), 1), Buffer(stored(dtype), n, n % 7)
            index = DTYPES.index(dtype)
            kernels.pack(index, index, prescale, streaming, slot.address, source.address, n)
            slot.assert_guards()
            want = source.values if prescale == 1 else scaled(dtype, source.values, prescale)
            assert_equal_bits(dtype, slot.values, want)


# ---- compressed tensors ----


WIRES = [(tensor, wire) for tensor in ("float32", "float64") for wire in ("float16", "bfloat16")]


def compressed(tensor: np.ndarray, wire: str, factor: float = 1.0) -> np.ndarray:
    """Tensor as a rank sends it: scaled in its own dtype, then rounded to `wire` by way of float32."""
    with np.errstate(all="ignore"):
        return rounded(wire, (tensor * tensor.dtype.type(factor)).astype(np.float32))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("tensor", "wire"), WIRES)
def test_pack_casts_and_unpack_widens(kernels: Kernels, tensor: str, wire: str, streaming: bool) -> None:
    dtypes = DTYPES.index(wire), DTYPES.index(tensor)
    for prescale in (1.0, 0.7):
        for n in LENGTHS:
            source, slot = buffer_of(numbers(tensor, n, n), n % 5), Buffer(stored(wire), n, n % 7)
            kernels.pack(*dtypes, prescale, streaming, slot.address, source.address, n)
            slot.assert_guards()
            assert_equal_bits(wire, slot.values, compressed(source.values, wire, prescale))
            back = Buffer(stored(tensor), n, n % 3)
            kernels.unpack(*dtypes, back.address, slot.address, n)
            back.assert_guards()
            assert_equal_bits(tensor, back.values, widened(wire, slot.values).astype(tensor))


@pytest.mark.parametrize("dtype", DTYPES)
def test_unpack_copies_what_is_not_compressed(kernels: Kernels, dtype: str) -> None:
    slot, back = buffer_of(numbers(dtype, 1025, 1), 3), Buffer(stored(dtype), 1025, 1)
    kernels.unpack(DTYPES.index(dtype), DTYPES.index(dtype), back.address, slot.address, 1025)
    assert (bits(back.values) == bits(slot.values)).all()


@pytest.mark.sample(14)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("tensor", "wire"), WIRES)
def test_reduction_of_compressed_tensors(kernels: Kernels, tensor: str, wire: str, op: str) -> None:
    """The result replaces the own tensor, reduced with the others' packed ones; a mirror gets the wire format."""
    for seed, n in enumerate([*LENGTHS, 20011]):
        for count in (1, 2, 3):
            own, prescale, streaming = seed % count, (1.0, 0.3)[seed % 2], bool(seed % 3)
            tensors = ranks(tensor, count, n, seed)
            packed = [compressed(each, wire, prescale) for each in tensors]
            divisor = float(count) if op == "average" else 1.0
            spec = Spec(wire, op, own, prescale, divisor, (1.0, 1.7)[seed % 2], tensor)
            sources = [buffer_of(tensors[k] if k == own else packed[k], seed % 4) for k in range(count)]
            mirror = Buffer(stored(wire), n, seed % 5)
            native = spec.native(count, 2, streaming)
            kernels.reduce(ctypes.byref(native), pointers(sources), pointers([sources[own], mirror]), n)
            for each in [*sources, mirror]:
                each.assert_guards()
            want = expected(Spec(wire, op, divisor=divisor, postscale=spec.postscale), packed)
            assert_equal_bits(wire, mirror.values, want)
            assert_equal_bits(tensor, sources[own].values, widened(wire, want).astype(tensor))


@pytest.mark.sample(50)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("tensor", "wire"), [*((each, each) for each in DTYPES), *WIRES])
def test_stretches_have_the_bits_of_the_whole(kernels: Kernels, tensor: str, wire: str, op: str) -> None:
    """Sums pass from host to host in two or three stretches, with the own tensor in any of them."""
    if wire == "bool" and op == "average":
        return
    accumulator = kernels.types[DTYPES.index(wire)].ops[OPS.index(op)].size
    for seed, (n, cuts) in enumerate(itertools.product((63, 4097), ((1,), (3,), (2, 3), (1, 4)))):
        own, streaming = seed % 5, bool(seed % 2)
        factors = (1.0, 1.0) if wire == "bool" else ((1.0, 0.3)[seed % 2], (1.0, 1.7)[seed % 3 > 1])
        spec = Spec(wire, op, own, factors[0], 5.0 if op == "average" else 1.0, factors[1], tensor)
        values = ranks(tensor, 5, n, seed)
        sources = [
            buffer_of(each if k == own or wire == tensor else compressed(each, wire), k)
            for k, each in enumerate(values)
        ]
        whole = [Buffer(stored(tensor), n), Buffer(stored(wire), n)]
        call_reduce(kernels, spec, sources, whole)
        before: Buffer | None = None
        bounds = [0, *cuts, 5]
        for begin, end in itertools.pairwise(bounds):
            part = dataclasses.replace(spec, unscaled=own - begin if begin <= own < end else NO_SOURCE)
            native, given = part.native(end - begin, 2, streaming), pointers(sources[begin:end])
            earlier = before.address if before else None
            if end < 5:
                after = Buffer(np.dtype(np.uint8), n * accumulator)
                kernels.reduce_onward(ctypes.byref(native), earlier, given, after.address, n)
                after.assert_guards()
                before = after
            else:
                found = [Buffer(stored(tensor), n, 1), Buffer(stored(wire), n, 3)]
                kernels.reduce_last(ctypes.byref(native), earlier, given, pointers(found), n)
                for k in range(2):
                    found[k].assert_guards()
                    assert_equal_bits((tensor, wire)[k], found[k].values, whole[k].values)


# ---- conversions ----


def widen(kernels: Kernels, dtype: str, x: np.ndarray) -> np.ndarray:
    out = np.empty(len(x), np.float32)
    kernels.types[DTYPES.index(dtype)].ops[0].widen(out.ctypes.data, x.ctypes.data, len(x))
    return out


def narrow(kernels: Kernels, dtype: str, x: np.ndarray) -> np.ndarray:
    out = np.empty(len(x), stored(dtype))
    kernels.types[DTYPES.index(dtype)].ops[0].finish(out.ctypes.data, x.ctypes.data, 1.0, 1.0, len(x))
    return out


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("tail", [0, 1])
def test_every_half_survives_the_round_trip(kernels: Kernels, dtype: str, tail: int) -> None:
    """`tail` converts one number at a time, so that the scalar remainder of a vector is tried on every value too."""
    every = np.arange(65536, dtype=np.uint16).view(stored(dtype))
    if tail:
        wide = np.concatenate([widen(kernels, dtype, every[i : i + 1]) for i in range(0, 65536, 13)])
        every = every[::13]
        back = np.concatenate([narrow(kernels, dtype, wide[i : i + 1]) for i in range(len(wide))])
    else:
        wide = widen(kernels, dtype, every)
        back = narrow(kernels, dtype, wide)
    assert_equal_bits("float32", wide, widened(dtype, every))
    assert_equal_bits(dtype, back, every)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_to_nearest_even(kernels: Kernels, dtype: str) -> None:
    """Covers every number halfway between two neighbours, its own neighbours, and many others."""
    every = np.arange(65536, dtype=np.uint16)
    low = bits(widened(dtype, every.view(stored(dtype)))).astype(np.int64)
    step = {"float16": 1 << 12, "bfloat16": 1 << 15}[dtype]  # half a last place, as float32 bits, for normal numbers
    around = [low + d * step + e for d in (-1, 0, 1) for e in (-1, 0, 1)]
    denormal = bits(np.arange(1, 2048, dtype=np.float32) * np.float32(2.0**-25)).astype(np.int64)
    around += [denormal + e for e in (-1, 0, 1)]
    random = np.random.default_rng(0).integers(0, 1 << 32, 300_000)
    x = np.concatenate([*around, random]).astype(np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        assert_equal_bits(dtype, narrow(kernels, dtype, x), rounded(dtype, x))


# ---- Adasum: inner products and weighted sums ----


def inner(kernels: Kernels, dtype: str, rows: list[np.ndarray], cut: int = 0, offset: int = 0) -> np.ndarray:
    """Lanes of each pair's inner product, computed in two calls if `cut` is given."""
    lanes = (ctypes.c_double * (8 * len(rows) * (len(rows) + 1) // 2))()
    for part in (slice(0, cut), slice(cut, None)):
        buffers = [buffer_of(row[part], offset) for row in rows]
        kernels.inner(DTYPES.index(dtype), lanes, pointers(buffers), len(rows), len(buffers[0].values))
    return np.array(lanes).reshape(-1, 8)


def weigh(kernels: Kernels, dtype: str, rows: list[np.ndarray], weights: np.ndarray, offset: int = 0) -> np.ndarray:
    buffers = [buffer_of(row, offset) for row in rows]
    factors = (ctypes.c_double * len(rows))(*weights)
    out = Buffer(rows[0].dtype, len(rows[0]), offset)
    for into in (out, buffers[-1]):  # The second time, the result replaces a row.
        kernels.weigh(DTYPES.index(dtype), into.address, pointers(buffers), factors, len(rows), len(rows[0]))
    for b in [*buffers, out]:
        b.assert_guards()
    assert out.values.tobytes() == buffers[-1].values.tobytes()
    return out.values


def float_rows(dtype: str, count: int, n: int) -> list[np.ndarray]:
    values = np.random.default_rng([count, n]).standard_normal((count, n))
    return [rounded(dtype, row if dtype == "float64" else row.astype(np.float32)) for row in values]


@pytest.mark.sample(14)
@pytest.mark.parametrize("dtype", DTYPES[:4])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9, 256])
def test_inner_products(kernels: Kernels, library: ctypes.CDLL, dtype: str, count: int) -> None:
    for n in (0, 1, 7, 8, 17, 1025) if count < 256 else (9,):
        rows = float_rows(dtype, count, n)
        got = inner(kernels, dtype, rows, offset=3)
        numbers = [widened(dtype, row).astype(np.float64) for row in rows]
        want = [[numbers[i][k::8] @ numbers[j][k::8] for k in range(8)] for i in range(count) for j in range(i, count)]
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
        assert inner(kernels, dtype, rows, cut=n // 2 // 8 * 8).tobytes() == got.tobytes()
        assert all(inner(other, dtype, rows).tobytes() == got.tobytes() for other in runnable(library))


@pytest.mark.parametrize("dtype", DTYPES[:4])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_weighted_sums(kernels: Kernels, library: ctypes.CDLL, dtype: str, count: int) -> None:
    weights = np.random.default_rng(count).standard_normal(count)
    for n in (0, 1, 7, 17, 513, 1025):
        rows = float_rows(dtype, count, n)
        got = weigh(kernels, dtype, rows, weights, offset=3)
        want = np.zeros(n)
        for weight, row in zip(weights, rows, strict=True):
            want = want + weight * widened(dtype, row).astype(np.float64)
        assert_equal_bits(dtype, got, rounded(dtype, want if dtype == "float64" else want.astype(np.float32)))
        assert all(weigh(other, dtype, rows, weights).tobytes() == got.tobytes() for other in runnable(library))


# ---- levels ----


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_levels_give_equal_bits(library: ctypes.CDLL, dtype: str, op: str) -> None:
    for count in (2, 3):
        for divisor, postscale in ((1, 1),) if dtype == "bool" else ((1, 1), (2, 1), (3, 1), (3, 0.37)):
            spec = Spec(dtype, op, divisor=divisor, postscale=postscale)
            sources = ranks(dtype, count, 9973, count)
            results = [reduced(k, spec, sources) for k in runnable(library)]
            for other in results[1:]:
                assert_equal_bits(dtype, other, results[0])


@settings(max_examples=150, deadline=None)
@given(
    case=st.sampled_from(CASES),
    count=st.integers(1, 5),
    n=st.integers(0, 300),
    offset=st.integers(0, 15),
    prescale=st.sampled_from([1.0, 0.5, 1 / 3, -1.0, 1e-3, 70000.0]),
    unscaled=st.integers(-2, 4),
    divisor=st.integers(1, 100),
    postscale=st.sampled_from([1.0, 2.0, 0.1, -7.3]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_reduction(
    library: ctypes.CDLL, case: tuple[str, str], count: int, n: int, offset: int, prescale: float, unscaled: int,
    divisor: int, postscale: float, seed: int,
) -> None:  # fmt: skip
    dtype, op = case
    spec = (
        Spec(dtype, op) if dtype == "bool" else Spec(dtype, op, min(unscaled, count - 1), prescale, divisor, postscale)
    )
    sources = ranks(dtype, count, n, seed)
    assert library.engine_reduction_check(ctypes.byref(spec.native(count, 1, False))) == 0
    want = expected(spec, sources)
    for k in runnable(library):
        assert_equal_bits(dtype, reduced(k, spec, sources, offset), want)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40), st.integers(1, 5), st.integers(1, 2**20))
def test_integer_average_is_exact(library: ctypes.CDLL, values: list[int], count: int, divisor: int) -> None:
    source = np.array(values, np.int32)
    want = [abs(v * count) // divisor * (1 if v > 0 else -1) for v in values]
    if any(not -(2**31) <= w < 2**31 for w in want):
        divisor, want = count, values
    for k in runnable(library):
        assert list(reduced(k, Spec("int32", "average", divisor=divisor), [source] * count)) == want


def test_names_and_levels(library: ctypes.CDLL) -> None:
    best = library.engine_kernels_best()
    assert library.engine_kernels_get(best)
    assert library.engine_kernels_level(b"auto") == best
    assert library.engine_kernels_level(b"plain") == 0
    assert library.engine_kernels_level(b"sse9") == -errno.EINVAL
    assert [library.engine_kernels_name(i) for i in range(4)] == [b"plain", b"avx2", b"avx512", None]
    assert not library.engine_kernels_get(3)
    for i in range(3):
        available = bool(library.engine_kernels_get(i))
        assert library.engine_kernels_level(library.engine_kernels_name(i)) == (i if available else -errno.ENOTSUP)


def test_sizes(kernels: Kernels) -> None:
    for i, dtype in enumerate(DTYPES):
        assert kernels.types[i].size == stored(dtype).itemsize
        wide = {"float16": 4, "bfloat16": 4}.get(dtype, stored(dtype).itemsize)
        assert kernels.types[i].ops[OPS.index("sum")].size == wide
    assert not kernels.types[DTYPES.index("bool")].ops[OPS.index("average")].combine


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": 11}, {"dtype": -1}, {"op": 5}, {"count": 0}, {"copies": 0}, {"unscaled": 2}, {"unscaled": -3},
        {"divisor": 0.0}, {"divisor": -2.0}, {"divisor": float("nan")}, {"prescale": float("inf")},
        {"postscale": float("nan")}, {"dtype": 8, "tensor": 8, "divisor": 1.5},
        {"dtype": 9, "tensor": 9, "divisor": 1e300}, {"dtype": 10, "tensor": 10, "op": 1},
        {"dtype": 10, "tensor": 10, "prescale": 2.0},
        {"tensor": 0}, {"tensor": 3}, {"dtype": 0, "tensor": 1}, {"dtype": 0, "tensor": 4}, {"dtype": 4},
    ],
)  # fmt: skip
def test_what_cannot_be_reduced_is_refused(library: ctypes.CDLL, wrong: dict[str, float]) -> None:
    right = Spec("float32", "sum").native(2, 1, False)
    assert library.engine_reduction_check(ctypes.byref(right)) == 0
    for field, value in wrong.items():
        setattr(right, field, value)
    assert library.engine_reduction_check(ctypes.byref(right)) == -errno.EINVAL


# ---- surroundings ----


def test_flushing_of_denormals_stays_with_the_user(library: ctypes.CDLL, kernels: Kernels) -> None:
    flushing = 0x9FC0 if X86 else 1 << 24
    denormal = np.full(33, 1e-40, np.float32)
    spec = Spec("float32", "sum").native(2, 1, False)
    for guarded, want in ((1, denormal + denormal), (0, np.zeros(33, np.float32))):
        sources, out = [buffer_of(denormal), buffer_of(denormal)], Buffer(denormal.dtype, 33)
        after = library.reduce_in(
            flushing, guarded, ctypes.byref(kernels), ctypes.byref(spec), pointers(sources), pointers([out]), 33
        )
        assert (out.values == want).all()
        assert after & flushing == flushing


@pytest.mark.slow
@pytest.mark.skipif(SANITIZED in os.environ, reason="this is the sanitized run")
@pytest.mark.timeout(900)
def test_sanitizers_find_nothing() -> None:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    found = subprocess.run(
        ["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not os.path.isabs(found):
        pytest.skip("no address sanitizer")
    chosen = (
        "any_reduction or exact or wrap or mirror or copies or round_trip or special or inner or weighted or "
        "compressed or casts or test_block_kernels"
    )
    sanitized = {
        SANITIZED: "1",
        "CC": "gcc",
        "LD_PRELOAD": found,
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
    }
    options = [
        "-q",
        "-x",
        "-c",
        os.devnull,
        "--noconftest",
        "-p",
        "tests.unit.conftest",
        "--import-mode=append",
        "-p",
        "no:cacheprovider",
        "-k",
        chosen,
    ]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, __file__, str(Path(__file__).with_name("test_block_kernels.py"))],
        env={**os.environ, **sanitized}, capture_output=True, text=True, check=False, timeout=880,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
