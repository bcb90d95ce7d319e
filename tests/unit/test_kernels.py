"""The reduction kernels, called directly and compared bit by bit with NumPy. NaNs count as equal whatever their payload."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import shutil
import subprocess
import sys
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_double, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

NATIVE = Path(__file__).parents[2] / "engine_ext"
SANITIZED = "KERNELS_SANITIZED"  # set in the environment of the run that test_sanitizers_find_nothing starts
X86 = platform.machine() == "x86_64"
LEVELS = ["plain", "avx2", "avx512"] if X86 else ["plain"]
FLAGS = {
    "plain": [],
    "avx2": ["-mavx2", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mf16c"],
}
DTYPES = ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"]
STORED = {"bfloat16": np.uint16, "bool": np.uint8}
OPS = ["sum", "average", "min", "max", "product"]
CASES = [(d, o) for d in DTYPES for o in OPS if (d, o) != ("bool", "average")]
LENGTHS = [0, 1, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 127, 511, 1025, 4097]
NO_SOURCE, EVERY_SOURCE = -1, -2
SHIM = """
#include "data/kernels.h"
#include "platform/cpu.h"
/* One reduction on a thread whose float environment is `theirs`; returns what it is afterwards. */
uint64_t reduce_in(uint64_t theirs, int guarded, const engine_kernels *k, const engine_reduction *r,
                   const void *const *sources, void *const *destinations, size_t n) {
  uint64_t before = engine_float_save(), saved = 0, after;
  engine_float_restore(theirs);
  if (guarded) saved = engine_float_enter();
  k->reduce(r, sources, destinations, n);
  if (guarded) engine_float_leave(saved);
  after = engine_float_save();
  engine_float_restore(before);
  return after;
}
"""

# ---- the library ----------------------------------------------------------------------------------------------------------


class Accumulation(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("widen", CFUNCTYPE(None, c_void_p, c_void_p, c_size_t)),
        ("combine", CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_size_t)),
        ("fold", CFUNCTYPE(None, c_void_p, c_void_p, c_size_t)),
        ("finish", CFUNCTYPE(None, c_void_p, c_void_p, c_double, c_double, c_size_t)),
    ]


class TypeKernels(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("scale", CFUNCTYPE(None, c_void_p, c_void_p, c_double, c_size_t)),
        ("ops", Accumulation * len(OPS)),
    ]


class Reduction(ctypes.Structure):
    _fields_ = [
        *((name, c_int) for name in ("dtype", "op", "count", "unscaled", "copies", "streaming")),
        *((name, c_double) for name in ("prescale", "divisor", "postscale")),
    ]


class Kernels(ctypes.Structure):
    _fields_ = [
        ("copy", CFUNCTYPE(None, c_void_p, c_void_p, c_size_t)),
        ("copy_streaming", CFUNCTYPE(None, c_void_p, c_void_p, c_size_t)),
        ("pack", CFUNCTYPE(None, c_int, c_double, c_int, c_void_p, c_void_p, c_size_t)),
        ("reduce", CFUNCTYPE(None, POINTER(Reduction), POINTER(c_void_p), POINTER(c_void_p), c_size_t)),
        ("types", TypeKernels * len(DTYPES)),
    ]


def build(directory: Path) -> Path:
    """Compile the kernels as the build does, with sanitizers if asked."""
    compiler = os.environ.get("CC", "gcc")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C compiler {compiler!r}")
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g"] if SANITIZED in os.environ else ["-O3"]
    shim = directory / "shim.c"
    shim.write_text(SHIM)
    common = [compiler, "-std=c11", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-Wall", "-Wextra", "-Werror", *sanitize]
    sources = [(NATIVE / "data" / f"kernels_{level}.c", FLAGS[level]) for level in LEVELS]
    sources += [(NATIVE / "data" / "kernels.c", []), (NATIVE / "platform" / "cpu.c", []), (shim, [])]
    objects = [directory / f"{source.stem}.o" for source, _ in sources]
    running = [
        subprocess.Popen([*common, *flags, f"-I{NATIVE}", "-c", source, "-o", obj])
        for (source, flags), obj in zip(sources, objects, strict=True)
    ]
    assert [process.wait() for process in running] == [0] * len(running)
    library = directory / "kernels.so"
    subprocess.run([compiler, "-shared", *sanitize, *objects, "-o", library], check=True)
    return library


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    lib = ctypes.CDLL(str(build(tmp_path_factory.mktemp("kernels"))))
    lib.engine_kernels_get.restype = POINTER(Kernels)
    lib.engine_kernels_name.restype = c_char_p
    lib.reduce_in.restype = c_uint64
    lib.reduce_in.argtypes = [c_uint64, c_int, POINTER(Kernels), POINTER(Reduction), POINTER(c_void_p), POINTER(c_void_p), c_size_t]
    return lib


def kernels_of(library: ctypes.CDLL, level: str) -> Kernels:
    table = library.engine_kernels_get(LEVELS.index(level))
    if not table:
        pytest.skip(f"this processor has no {level}")
    return table.contents


@pytest.fixture(params=LEVELS)
def kernels(request: pytest.FixtureRequest, library: ctypes.CDLL) -> Kernels:
    return kernels_of(library, request.param)


def runnable(library: ctypes.CDLL) -> list[Kernels]:
    tables = [library.engine_kernels_get(level) for level in range(len(LEVELS))]
    return [table.contents for table in tables if table]


# ---- calling it -----------------------------------------------------------------------------------------------------------


def stored(dtype: str) -> np.dtype:
    return np.dtype(STORED.get(dtype, dtype))


GUARD = 0xA5


class Buffer:
    """`n` elements, `offset` elements past a 64-byte boundary, between guard bytes."""

    def __init__(self, dtype: np.dtype, n: int, offset: int = 0) -> None:
        self.memory = np.full(n * dtype.itemsize + 256 + offset * dtype.itemsize, GUARD, np.uint8)
        start = -self.memory.ctypes.data % 64 + 64 + offset * dtype.itemsize
        self.span = slice(start, start + n * dtype.itemsize)
        self.values = self.memory[self.span].view(dtype)

    @property
    def address(self) -> int:
        return self.memory.ctypes.data + self.span.start

    def assert_guards(self) -> None:
        assert (self.memory[: self.span.start] == GUARD).all()
        assert (self.memory[self.span.stop :] == GUARD).all()


def buffer_of(values: np.ndarray, offset: int = 0) -> Buffer:
    buffer = Buffer(values.dtype, len(values), offset)
    buffer.values[:] = values
    return buffer


@dataclass
class Spec:
    dtype: str
    op: str
    unscaled: int = NO_SOURCE
    prescale: float = 1.0
    divisor: float = 1.0
    postscale: float = 1.0

    def native(self, count: int, copies: int, streaming: bool) -> Reduction:
        return Reduction(
            DTYPES.index(self.dtype), OPS.index(self.op), count, self.unscaled, copies, streaming,
            self.prescale, self.divisor, self.postscale,
        )  # fmt: skip


def pointers(buffers: list[Buffer]) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(buffers))(*(b.address for b in buffers))


def call_reduce(kernels: Kernels, spec: Spec, sources: list[Buffer], destinations: list[Buffer], streaming: bool = False) -> None:
    native = spec.native(len(sources), len(destinations), streaming)
    kernels.reduce(ctypes.byref(native), pointers(sources), pointers(destinations), len(sources[0].values))
    for b in [*sources, *destinations]:
        b.assert_guards()


def reduced(kernels: Kernels, spec: Spec, sources: list[np.ndarray], offset: int = 0) -> np.ndarray:
    out = Buffer(sources[0].dtype, len(sources[0]), offset)
    call_reduce(kernels, spec, [buffer_of(s, offset) for s in sources], [out])
    return out.values


# ---- what it should compute -----------------------------------------------------------------------------------------------


def bf16_to_f32(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def widened(dtype: str, x: np.ndarray) -> np.ndarray:
    if dtype == "bfloat16":
        return bf16_to_f32(x)
    return x.astype(np.float32) if dtype == "float16" else (x != 0).astype(np.uint8) if dtype == "bool" else x.copy()


def rounded(dtype: str, x: np.ndarray) -> np.ndarray:
    return f32_to_bf16(x) if dtype == "bfloat16" else x.astype(stored(dtype))


def truncated(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Toward zero, saturating: by Python's integers, which have no width."""
    limits = np.iinfo(dtype)
    return np.array([min(max(int(v) if np.isfinite(v) else limits.max * int(np.sign(v)) * 2, limits.min), limits.max) for v in x], dtype)


def scaled(dtype: str, x: np.ndarray, factor: float) -> np.ndarray:
    if x.dtype.kind == "i" or dtype == "uint8":
        return truncated(x.astype(np.float64) * factor, x.dtype)
    wide = widened(dtype, x)
    with np.errstate(all="ignore"):
        return rounded(dtype, wide * wide.dtype.type(factor))


def combined(dtype: str, op: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if dtype == "bool":
        return a & b if op in ("min", "product") else a | b
    if op in ("sum", "average"):
        return a + b
    if op == "product":
        return a * b
    return np.where((a < b if op == "min" else a > b) | (a != a), a, b)  # noqa: PLR0124  NaN is what differs from itself


def expected(spec: Spec, sources: list[np.ndarray]) -> np.ndarray:
    dtype = spec.dtype
    integer = dtype.startswith(("int", "uint"))
    with np.errstate(all="ignore"):
        inputs = [
            scaled(dtype, s, spec.prescale) if spec.prescale != 1 and spec.unscaled in (k, EVERY_SOURCE) else s
            for k, s in enumerate(sources)
        ]
        wide = [widened(dtype, s).astype(np.int64) if integer and spec.op == "average" else widened(dtype, s) for s in inputs]
        acc = wide[0]
        for s in wide[1:]:
            acc = combined(dtype, spec.op, acc, s)
        if not integer:
            if spec.divisor != 1:
                acc = acc / acc.dtype.type(spec.divisor)
            if spec.postscale != 1:
                acc = acc * acc.dtype.type(spec.postscale)
            return rounded(dtype, acc)
        if spec.divisor != 1:
            divisor = acc.dtype.type(spec.divisor)
            down = acc // divisor
            acc = down + ((down < 0) & (down * divisor != acc))
        if spec.op == "average":
            acc = np.clip(acc, np.iinfo(stored(dtype)).min, np.iinfo(stored(dtype)).max)
        if spec.postscale != 1:
            acc = truncated(acc.astype(np.float64) * spec.postscale, stored(dtype))
        return acc.astype(stored(dtype))


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(f"u{x.dtype.itemsize}")


def is_nan(dtype: str, x: np.ndarray) -> np.ndarray:
    if dtype == "bfloat16":
        x = bf16_to_f32(x)
    return np.isnan(x) if x.dtype.kind == "f" else np.zeros(len(x), bool)


def assert_equal_bits(dtype: str, got: np.ndarray, want: np.ndarray) -> None:
    same = (bits(got) == bits(want)) | (is_nan(dtype, got) & is_nan(dtype, want))
    if not same.all():
        i = int(np.argmin(same))
        pytest.fail(f"{(~same).sum()} of {len(same)} differ, first at {i}: got {bits(got)[i]:#x}, expected {bits(want)[i]:#x}")


def numbers(dtype: str, n: int, seed: int) -> np.ndarray:
    """Every kind of number: small ones of both signs, any bit pattern, and the special ones."""
    rng = np.random.default_rng(seed)
    kind = stored(dtype)
    anything = rng.integers(0, 256, n * kind.itemsize, np.uint8).view(kind)
    if dtype == "bool":
        return np.where(rng.random(n) < 0.5, np.uint8(0), anything)
    if kind.kind == "i" or dtype == "uint8":
        limits = np.iinfo(kind)
        edges = rng.choice(np.array([limits.min, limits.max, 0, 1, limits.max - 1], kind), n)
        return np.where(rng.random(n) < 0.8, anything, edges)
    small = rng.standard_normal(n).astype(np.float32) * np.exp2(rng.integers(-20, 14, n)).astype(np.float32)
    top = {"float16": 65504.0, "bfloat16": 3.3895314e38, "float32": 3.4028235e38, "float64": 1.7976931348623157e308}[dtype]
    least = {"float16": 6e-8, "bfloat16": 9.2e-41, "float32": 1e-45, "float64": 5e-324}[dtype]
    special = rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan, top, -top, least, -least, 1.0, -1.0], n)
    with np.errstate(all="ignore"):
        plain, edges = rounded(dtype, small), rounded(dtype, special.astype(np.float64 if dtype == "float64" else np.float32))
    return np.choose(rng.integers(0, 3, n), [plain, anything, edges]).astype(kind)


def ranks(dtype: str, count: int, n: int, seed: int = 0) -> list[np.ndarray]:
    return [numbers(dtype, n, 1000 * seed + k) for k in range(count)]


# ---- reductions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_reduction_of_every_length_and_alignment(kernels: Kernels, dtype: str, op: str) -> None:
    for seed, n in enumerate(LENGTHS):
        for count in (1, 2, 3, 5):
            spec = Spec(dtype, op, divisor=count if op == "average" else 1)
            sources = ranks(dtype, count, n, seed)
            assert_equal_bits(dtype, reduced(kernels, spec, sources, (seed + count) % 9), expected(spec, sources))


@pytest.mark.parametrize("dtype", DTYPES[:-1])
@pytest.mark.parametrize("op", ["sum", "average", "min"])
def test_factors_and_divisors(kernels: Kernels, dtype: str, op: str) -> None:
    factors = [(1.0, 3.0, 1.0), (0.1, 1.0, 1.0), (1.0, 1.0, 1 / 3), (-2.5, 6.0, 1e3), (1e30, 4.0, 1.0), (1.0, 2.0**40, 0.5)]
    for seed, (prescale, divisor, postscale) in enumerate(factors):
        for count in (1, 2, 4):
            for unscaled in (0, count - 1, NO_SOURCE, EVERY_SOURCE):
                if dtype != "int64" and dtype not in DTYPES[:4] and op != "average" and divisor > 100:
                    continue  # a divisor that does not fit the dtype
                spec = Spec(dtype, op, unscaled, prescale, divisor, postscale)
                sources = ranks(dtype, count, 259, seed)
                assert_equal_bits(dtype, reduced(kernels, spec, sources), expected(spec, sources))


@pytest.mark.parametrize("dtype", DTYPES[:-1])
def test_it_does_not_matter_who_scales(kernels: Kernels, dtype: str) -> None:
    sources = ranks(dtype, 3, 3001)
    scaled_by_ranks = []
    for source in sources:
        packed = Buffer(source.dtype, len(source), 3)
        kernels.pack(DTYPES.index(dtype), 0.3, False, packed.address, buffer_of(source, 1).address, len(source))
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
    """A running total beyond the dtype comes back; additions too small for its precision are not lost."""
    if dtype == "float16":
        sources = [rounded(dtype, np.full(67, x, np.float32)) for x in (huge, huge, -huge)]
        assert (reduced(kernels, Spec(dtype, "sum"), sources).astype(np.float32) == np.float16(huge)).all()
    one, tiny = (rounded(dtype, np.full(67, x, np.float32)) for x in (1.0, 2.0**-9 if dtype == "bfloat16" else 2.0**-12))
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
    for dtype in ("int8", "uint8", "int32"):
        top, least = np.iinfo(dtype).max, np.iinfo(dtype).min
        high, low = np.full(37, top, dtype), np.full(37, least, dtype)
        assert (reduced(kernels, Spec(dtype, "sum"), [high, np.ones(37, dtype)]) == least).all()
        assert (reduced(kernels, Spec(dtype, "average", divisor=3), [high] * 3) == top).all()
        assert (reduced(kernels, Spec(dtype, "average", divisor=3), [low] * 3) == least).all()
    minus, zero = np.full(5, -1, np.int32), np.zeros(5, np.int32)
    assert (reduced(kernels, Spec("int32", "average", divisor=2), [minus, zero]) == 0).all()  # toward zero


# ---- where results go -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_result_replaces_sources(kernels: Kernels, dtype: str, op: str, streaming: bool) -> None:
    """As with tensors in shared memory: every rank's tensor is read, and then overwritten."""
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
    for n in (0, 1, 2, 63, 64, 65, 127, 128, 200, 4096, 10007):
        for to, source in ((0, 0), (1, 0), (0, 1), (63, 5), (17, 17), (33, 64)):
            original = buffer_of(numbers("uint8", n, n), source)
            destination = Buffer(byte, n, to)
            getattr(kernels, copy)(destination.address, original.address, n)
            destination.assert_guards()
            assert (destination.values == original.values).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("streaming", [False, True])
def test_pack(kernels: Kernels, dtype: str, streaming: bool) -> None:
    for prescale in (1.0,) if dtype == "bool" else (1.0, 0.7):
        for n in LENGTHS:
            source, slot = buffer_of(numbers(dtype, n, n), 1), Buffer(stored(dtype), n, n % 7)
            kernels.pack(DTYPES.index(dtype), prescale, streaming, slot.address, source.address, n)
            slot.assert_guards()
            want = source.values if prescale == 1 else scaled(dtype, source.values, prescale)
            assert_equal_bits(dtype, slot.values, want)


# ---- conversions ----------------------------------------------------------------------------------------------------------


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
    """`tail`: one number at a time, so that the conversion of what is left of a vector is tried on every value too."""
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
    """Every number halfway between two neighbours, its own neighbours, and many others."""
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


# ---- levels ---------------------------------------------------------------------------------------------------------------


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
    library: ctypes.CDLL, case: tuple[str, str], count: int, n: int, offset: int, prescale: float, unscaled: int, divisor: int,
    postscale: float, seed: int,
) -> None:  # fmt: skip
    dtype, op = case
    spec = Spec(dtype, op) if dtype == "bool" else Spec(dtype, op, min(unscaled, count - 1), prescale, divisor, postscale)
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
        {"dtype": 9}, {"dtype": -1}, {"op": 5}, {"count": 0}, {"copies": 0}, {"unscaled": 2}, {"unscaled": -3}, {"divisor": 0.0},
        {"divisor": -2.0}, {"divisor": float("nan")}, {"prescale": float("inf")}, {"postscale": float("nan")},
        {"dtype": 6, "divisor": 1.5}, {"dtype": 7, "divisor": 1e300}, {"dtype": 8, "op": 1}, {"dtype": 8, "prescale": 2.0},
    ],
)  # fmt: skip
def test_what_cannot_be_reduced_is_refused(library: ctypes.CDLL, wrong: dict[str, float]) -> None:
    right = Spec("float32", "sum").native(2, 1, False)
    assert library.engine_reduction_check(ctypes.byref(right)) == 0
    for field, value in wrong.items():
        setattr(right, field, value)
    assert library.engine_reduction_check(ctypes.byref(right)) == -errno.EINVAL


# ---- surroundings ---------------------------------------------------------------------------------------------------------


def test_flushing_of_denormals_stays_with_the_user(library: ctypes.CDLL, kernels: Kernels) -> None:
    flushing = 0x9FC0 if X86 else 1 << 24
    denormal = np.full(33, 1e-40, np.float32)
    spec = Spec("float32", "sum").native(2, 1, False)
    for guarded, want in ((1, denormal + denormal), (0, np.zeros(33, np.float32))):
        sources, out = [buffer_of(denormal), buffer_of(denormal)], Buffer(denormal.dtype, 33)
        after = library.reduce_in(flushing, guarded, ctypes.byref(kernels), ctypes.byref(spec), pointers(sources), pointers([out]), 33)
        assert (out.values == want).all()
        assert after & flushing == flushing


@pytest.mark.skipif(SANITIZED in os.environ, reason="this is the sanitized run")
def test_sanitizers_find_nothing() -> None:
    compiler = os.environ.get("CC", "gcc")
    found = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=False).stdout.strip()
    if not os.path.isabs(found):
        pytest.skip("no address sanitizer")
    chosen = "length_and_alignment or factors or replaces or mirror or copies or pack or round_trip or special"
    environment = {**os.environ, SANITIZED: "1", "LD_PRELOAD": found, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-c", os.devnull, "--noconftest", "-p", "no:cacheprovider", "-k", chosen, __file__],
        env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
