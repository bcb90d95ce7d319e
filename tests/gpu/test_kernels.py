"""Kernels of the GPU plane: the shipped PTX, run on the CPU, equals NumPy bit by bit.

No GPU is needed or used: this does not show how a device runs the text, or how fast.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable
from ctypes import c_double, c_uint32, c_uint64
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from tests.standins.ptx import Device, UnknownError, build, translate
from tests.unit.kernel_library import DTYPES, OPS, Buffer, Spec, buffer_of, stored
from tests.unit.kernel_reference import assert_equal_bits, bits, expected, numbers, ranks, rounded, truncated, widened
from tools import gpu_kernels

PTX = gpu_kernels.TEXT.read_text()
NATIVE = Path(gpu_kernels.SOURCE).parents[1]

HALVES = ["float16", "bfloat16"]
WIDE = ["float32", "float64"]
INTEGERS = DTYPES[4:-1]
PAIRS = [(d, d) for d in DTYPES[:-1]] + [(wide, half) for wide in WIDE for half in HALVES]
LENGTHS = [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 127, 500, 1025, 4097, 9001]
PIECE = 2048  # bytes of the slab that a warp processes at once
POISON = 0xA5


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Device:
    return Device(build(PTX, tmp_path_factory.mktemp("ptx")))


# ---- plans: places of tensors in the slab ----------------------------------------------------------------------------


def item(dtype: str) -> int:
    return stored(dtype).itemsize


@dataclass
class Row:
    tensor: Buffer | None  # None if this rank has none
    offset: int  # bytes from the start of the slab
    count: int  # elements


@dataclass
class Plan:
    """Tensors of one dtype between guards, their places in a slab of another dtype, and the launch of a kernel."""

    tensor: str
    wire: str
    rng: np.random.Generator
    lengths: list[int]
    aligned: bool = False
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        place, unit = 0, item(self.wire)
        for number, count in enumerate(self.lengths):
            place += 0 if self.aligned else unit * int(self.rng.choice([0, 0, 1, 3, 16 // unit]))
            if self.aligned or self.rng.random() < 0.6:
                place = -(-place // 16) * 16
            tensor = None
            if self.rng.random() < 0.8 or self.aligned:
                offset = 0 if self.aligned else int(self.rng.choice([0, 0, 16, *range(1, 9)]))
                tensor = buffer_of(numbers(self.tensor, count, int(self.rng.integers(2**31)) + number), offset)
            self.rows.append(Row(tensor, place, count))
            place += count * unit
        self.slab = Buffer(stored(self.wire), place // unit + 20, 0 if self.aligned else int(self.rng.integers(0, 9)))
        self.grid, self.block = int(self.rng.integers(1, 5)), int(self.rng.choice([1, 7, 32, 33, 64, 100]))

    def bytes_of(self, row: Row) -> int:
        return row.count * item(self.wire)

    @property
    def end(self) -> int:
        """Return the end of the last row in the slab."""
        return self.rows[-1].offset + self.bytes_of(self.rows[-1]) if self.rows else 0

    def table(self) -> np.ndarray:
        return table_of(
            [(row.tensor.address if row.tensor else 0, row.offset, self.bytes_of(row)) for row in self.rows]
        )

    def run(self, device: Device, kernel: str, *arguments: c_uint64 | c_double, packs: bool) -> None:
        """Launch a kernel; it may touch only the table, the tensors and their places in the slab."""
        table = self.table()
        allowed = [(table.ctypes.data, table.ctypes.data + table.nbytes, False)]
        for row in self.rows:
            start, length = self.slab.address + row.offset, self.bytes_of(row)
            if length and (packs or row.tensor):
                allowed.append((start, start + length, packs))
            if length and row.tensor:
                allowed.append((row.tensor.address, row.tensor.address + row.tensor.values.nbytes, not packs))
        device.allow(allowed)
        where = (table.ctypes.data, len(self.rows), self.end, self.slab.address)
        numbers_ = (*(c_uint64(each) for each in where), *arguments)
        device.launch(kernel, self.grid, self.block, *numbers_)
        self.slab.assert_guards()
        for row in self.rows:
            if row.tensor:
                row.tensor.assert_guards()

    def in_slab(self, row: Row, memory: np.ndarray) -> np.ndarray:
        start = row.offset // item(self.wire)
        return memory[start : start + row.count]


def table_of(rows: list[tuple[int, int, int]]) -> np.ndarray:
    """Return the table's bytes: its rows and, if several, the number of each piece's first row, as in kernels.cu."""
    if len(rows) == 1:
        return np.frombuffer(np.array(rows, np.uint64).tobytes(), np.uint8)
    end = rows[-1][1] + rows[-1][2] if rows else 0
    ends = np.array([offset + size for _, offset, size in rows], np.uint64)
    begins = np.arange(-(-end // PIECE), dtype=np.uint64) * np.uint64(PIECE)
    first = np.searchsorted(np.maximum.accumulate(ends), begins, side="right") if rows else np.zeros(0, np.int64)
    before = np.array([rows[row][1] for row in first], np.uint64) < begins
    numbers = np.append(2 * first + before, 2 * len(rows)).astype(np.uint32)
    return np.frombuffer(np.array(rows, np.uint64).tobytes() + numbers.tobytes(), np.uint8)


def drawn(tensor: str, wire: str, seed: int) -> Plan:
    rng = np.random.default_rng([seed, *(tensor + wire).encode()])
    return Plan(tensor, wire, rng, [int(n) for n in rng.choice(LENGTHS, rng.integers(0, 12))])


def computed(values: np.ndarray, tensor: str, of: str, to: str, divisor: float, factor: float) -> np.ndarray:
    """Return what a kernel computes: divide and multiply in the tensor's compute type, and round."""
    if tensor in INTEGERS:
        wide = [abs(int(v)) // int(divisor) * (1 if v >= 0 else -1) for v in values]
        limits = np.iinfo(stored(to))
        whole = np.array([min(max(v, limits.min), limits.max) for v in wide], stored(to))
        return whole if factor == 1 else truncated(whole.astype(np.float64) * factor, stored(to))
    kind = np.float64 if tensor == "float64" else np.float32
    with np.errstate(all="ignore"):
        x = widened(of, values).astype(kind)
        x = (x if divisor == 1 else x / kind(divisor)) * kind(factor)
        return rounded(to, x.astype(np.float32) if to in HALVES else x)


def identity_of(dtype: str, op: str) -> np.ndarray:
    """Return the element that leaves others unchanged."""
    kind = stored(dtype)
    if op in ("sum", "average"):
        return np.zeros(1, kind)
    if op == "product":
        return rounded(dtype, np.ones(1, np.float32)) if dtype in HALVES else np.ones(1, kind)
    if dtype == "bool":
        return np.array([op == "min"], kind)
    if dtype in INTEGERS:
        return np.array([np.iinfo(kind).max if op == "min" else np.iinfo(kind).min], kind)
    infinity = np.array([np.inf if op == "min" else -np.inf], np.float64 if dtype == "float64" else np.float32)
    return rounded(dtype, infinity)


def repeated(identity: np.ndarray) -> c_uint64:
    """Return the identity repeated to 8 bytes, as the kernels take it."""
    return c_uint64(int(np.repeat(identity, 8 // identity.itemsize).view(np.uint64)[0]))


def check_pack(device: Device, plan: Plan, divisor: float = 1, factor: float = 1, op: str = "sum") -> None:
    identity = identity_of(plan.wire, op)
    want = plan.slab.values.copy()
    for row in plan.rows:
        place = plan.in_slab(row, want)
        if row.tensor is None:
            place[:] = identity
        elif plan.tensor == "bool":
            place[:] = row.tensor.values != 0
        else:
            place[:] = computed(row.tensor.values, plan.tensor, plan.tensor, plan.wire, divisor, factor)
    numbers_ = (repeated(identity), c_double(divisor), c_double(factor))
    plan.run(device, f"pack_{plan.tensor}_{plan.wire}", *numbers_, packs=True)
    assert_equal_bits(plan.wire, plan.slab.values, want)  # also between the tensors


def check_unpack(device: Device, plan: Plan, divisor: float = 1, factor: float = 1) -> None:
    plan.slab.values[:] = numbers(plan.wire, len(plan.slab.values), int(plan.rng.integers(2**31)))
    before = plan.slab.values.copy()
    plan.run(device, f"unpack_{plan.tensor}_{plan.wire}", c_double(divisor), c_double(factor), packs=False)
    assert (bits(plan.slab.values) == bits(before)).all()
    for row in plan.rows:
        if row.tensor:
            want = computed(plan.in_slab(row, before), plan.tensor, plan.wire, plan.tensor, divisor, factor)
            assert_equal_bits(plan.tensor, row.tensor.values, want)


# ---- pack and unpack -------------------------------------------------------------------------------------------------

FACTORS = [1.0, 1.0, 0.1, -2.5, 1e30, 2.0**-20]


@pytest.mark.sample(20)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("tensor", "wire"), PAIRS)
def test_plans_are_packed_and_unpacked_to_the_bit(device: Device, tensor: str, wire: str, seed: int) -> None:
    plan = drawn(tensor, wire, seed)
    divisor, factor, op = (
        float(plan.rng.choice([1, 1, 3, 4])),
        float(plan.rng.choice(FACTORS)),
        str(plan.rng.choice(OPS)),
    )
    check_pack(device, plan, divisor, factor, op)
    check_unpack(device, plan, divisor, factor)


@pytest.mark.parametrize(("tensor", "wire"), [*PAIRS, ("bool", "bool")])
def test_aligned_tensors_are_packed_to_the_bit(device: Device, tensor: str, wire: str) -> None:
    """Training has this case: every tensor and its place begin at a multiple of 16 bytes."""
    plan = Plan(tensor, wire, np.random.default_rng(1), [3, 4096, 0, 17, 20000, 8], aligned=True)
    check_pack(device, plan)
    if tensor != "bool":
        check_unpack(device, plan)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("op", ["sum", "min"])
def test_bool_becomes_zero_or_one(device: Device, op: str, seed: int) -> None:
    check_pack(device, drawn("bool", "bool", seed), op=op)


def every(half: str) -> np.ndarray:
    """Return all bit patterns."""
    return np.arange(65536, dtype=np.uint16).view(stored(half))


@pytest.mark.parametrize("half", HALVES)
def test_every_half_is_widened(device: Device, half: str) -> None:
    plan = Plan("float32", half, np.random.default_rng(0), [65536], aligned=True)
    plan.slab.values[:65536] = every(half)
    plan.run(device, f"unpack_float32_{half}", c_double(1), c_double(1), packs=False)
    tensor = plan.rows[0].tensor
    assert tensor
    assert_equal_bits("float32", tensor.values, widened(half, every(half)))


def check_rounding(device: Device, half: str) -> None:
    """Check float32 around each half: half way to the next, just beside it, and NaNs that rounding would spoil."""
    plan = Plan("float32", half, np.random.default_rng(0), [65536], aligned=True)
    tensor = plan.rows[0].tensor
    assert tensor
    wide = widened(half, every(half))
    between = {"float16": 2**12, "bfloat16": 2**15}[half]
    for off in (-1, 0, 1):
        with np.errstate(all="ignore"):
            tensor.values[:] = (wide.view(np.uint32) + np.uint32(between + off)).view(np.float32)
        check_pack(device, plan)
    tiny = np.float32(2.0**-25 if half == "float16" else 2.0**-134)  # half the dtype's least positive number
    for value, want in ((tiny, 0), (np.nextafter(tiny, np.float32(1)), 1)):
        tensor.values[:] = value
        check_pack(device, plan)
        assert (bits(plan.slab.values[:65536]) == want).all()


@pytest.mark.parametrize("half", HALVES)
def test_every_rounding_to_a_half(device: Device, half: str) -> None:
    check_rounding(device, half)


def test_average_of_float16_does_not_overflow(device: Device) -> None:
    """Values are divided before they are summed, so the sum is the average."""
    plan = Plan("float16", "float16", np.random.default_rng(0), [100], aligned=True)
    tensor = plan.rows[0].tensor
    assert tensor
    tensor.values[:] = 60000
    check_pack(device, plan, divisor=4)
    assert (plan.slab.values[:100] == 15000).all()


@pytest.mark.parametrize("unit", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("seed", range(4))
def test_bytes_are_moved_at_any_alignment(device: Device, unit: int, seed: int) -> None:
    """Elements of any dtype, and data without any alignment (unit 1)."""
    rng = np.random.default_rng([seed, unit])
    plan = drawn("uint8", "uint8", seed)
    plan.lengths = [int(n) * unit for n in rng.choice(LENGTHS[:14], 9)]
    plan.rows = []
    plan.__post_init__()
    want = plan.slab.values.copy()
    identity = rng.integers(1, 256, min(unit, 8), np.uint8)
    for row in plan.rows:
        source = row.tensor.values if row.tensor else np.resize(identity, row.count)
        plan.in_slab(row, want)[:] = source
    plan.run(device, "pack_bytes", c_uint64(int(np.resize(identity, 8).view(np.uint64)[0])), packs=True)
    assert (plan.slab.values == want).all()
    for row in plan.rows:
        if row.tensor:
            row.tensor.values[:] = POISON
    plan.run(device, "unpack_bytes", packs=False)
    for row in plan.rows:
        if row.tensor:
            assert (row.tensor.values == plan.in_slab(row, want)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_absent_tensors_are_the_identity_of_each_operation(device: Device, dtype: str) -> None:
    """The identity is that of data/executor.pyx: reducing with it changes nothing except the sign of a zero."""
    for op in OPS:
        if (dtype, op) == ("bool", "average"):
            continue
        plan = Plan(dtype, dtype, np.random.default_rng(3), [0, 5, 100, 4099])
        for row in plan.rows:
            row.tensor = None
        check_pack(device, plan, op=op)
        others = numbers(dtype, 1000, 5)
        both = [others, np.repeat(identity_of(dtype, op), 1000)]
        got, want = (widened(dtype, expected(Spec(dtype, op), sources)) for sources in (both, both[:1]))
        assert np.array_equal(got, want, equal_nan=dtype in HALVES + WIDE)


@pytest.mark.slow
def test_ten_thousand_tensors(device: Device) -> None:
    """The tensors are small, with many in a piece; some are empty and some absent."""
    rng = np.random.default_rng(2)
    plan = Plan("float32", "float32", rng, [int(n) for n in rng.integers(0, 120, 10000)])
    plan.grid, plan.block = 40, 32
    check_pack(device, plan)
    check_unpack(device, plan, factor=0.5)


def test_empty_tables_and_empty_tensors(device: Device) -> None:
    for lengths in ([], [0], [0, 0, 0], [0, 1, 0]):
        plan = Plan("float32", "float16", np.random.default_rng(4), lengths, aligned=True)
        check_pack(device, plan)
        check_unpack(device, plan)


def mapped(size: int) -> np.ndarray:
    """Return memory that is only allocated where it is touched."""
    no_reserve = 0x4000  # mmap.MAP_NORESERVE, from Python 3.13 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)


def check_large(device: Device) -> None:
    """Check one tensor of more than 2^32 elements: the blocks, of one warp each, at its end."""
    count = 2**32 + 12345
    tensor, slab = mapped(count * 4), mapped(count * 2)
    table = table_of([(tensor.ctypes.data, 0, count * 2)])
    values = numbers("float32", 4000, 7)
    tensor.view(np.float32)[-4000:] = values
    blocks = -(-count * 2 // PIECE)
    device.allow([])
    arguments = [c_uint64(x) for x in (table.ctypes.data, 1, count * 2, slab.ctypes.data, 0)]
    for block in range(blocks - 1 - 8000 // PIECE - 1, blocks):
        device.launch("pack_float32_float16", blocks, 32, *arguments, c_double(1), c_double(1), only=block)
    assert_equal_bits("float16", slab.view(np.float16)[-4000:], computed(values, "float32", "float32", "float16", 1, 1))


def test_tensors_of_more_than_two_to_the_32_elements(device: Device) -> None:
    check_large(device)


# ---- the ordered reduction -------------------------------------------------------------------------------------------


def check_reduction(
    device: Device,
    spec: Spec,
    sources: list[np.ndarray],
    *,
    aligned: bool = True,
    own: int | None = None,
    in_place: bool = False,
    threads: tuple[int, int] = (2, 32),
) -> None:
    """Check a reduction of all ranks' parts in a row; that of rank `own`, if given, and the result may be elsewhere."""
    count, n, kind = len(sources), len(sources[0]), stored(spec.dtype)
    unit = max(1, 16 // kind.itemsize)
    gap = (-n % unit + unit if aligned else 3) * kind.itemsize
    stride = n * kind.itemsize + gap
    offset = 0 if aligned else 1
    parts = Buffer(kind, count * stride // kind.itemsize, offset)
    elsewhere = buffer_of(sources[own] if own is not None else sources[0][:0], offset)
    start = parts.address
    for k, source in enumerate(sources):
        if k != own:
            parts.values[k * stride // kind.itemsize :][:n] = source
    result = elsewhere if in_place else Buffer(kind, n, offset)
    allowed = [(start + k * stride, start + k * stride + n * kind.itemsize, False) for k in range(count) if k != own]
    if own is not None and not in_place:
        allowed.append((elsewhere.address, elsewhere.address + n * kind.itemsize, False))
    allowed.append((result.address, result.address + n * kind.itemsize, True))
    device.allow([each for each in allowed if each[0] < each[1]] or [(0, 0, False)])
    before = parts.values.copy()
    device.launch(
        f"reduce_{spec.dtype}", *threads,
        c_uint64(result.address), c_uint64(start), c_uint64(stride), c_uint64(elsewhere.address),
        c_uint32(count if own is None else own), c_uint32(count), c_uint64(n), c_uint32(OPS.index(spec.op)),
        c_double(spec.divisor), c_double(spec.postscale),
    )  # fmt: skip
    assert_equal_bits(spec.dtype, result.values, expected(spec, sources))
    assert (bits(parts.values) == bits(before)).all()
    for buffer in (parts, elsewhere, result):
        buffer.assert_guards()


CASES = [(d, o) for d in DTYPES for o in OPS if (d, o) != ("bool", "average")]


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_parts_are_reduced_as_on_the_cpu(device: Device, dtype: str, op: str) -> None:
    """The bits are those of docs/reference/operations.md, as those of the CPU's are in tests/unit/test_kernels.py."""
    for seed, n in enumerate([0, 1, 5, 16, 33, 257, 1030]):
        for count in (1, 2, 3, 8):
            spec = Spec(dtype, op, divisor=count if op == "average" else 1)
            own = seed % (count + 1)
            check_reduction(
                device, spec, ranks(dtype, count, n, seed),
                aligned=seed % 3 != 0, own=own if own < count else None, in_place=own < count and seed % 2 == 0,
            )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES[:-1])
@pytest.mark.parametrize("op", ["sum", "average", "min"])
def test_factors_after_the_reduction(device: Device, dtype: str, op: str) -> None:
    for seed, (divisor, factor) in enumerate([(3.0, 1.0), (7.0, 1 / 3), (6.0, 1e3), (4.0, -0.5), (3.0, 1e30)]):
        spec = Spec(dtype, op, divisor=divisor if op == "average" else 1, postscale=factor)
        check_reduction(device, spec, ranks(dtype, 3, 259, seed))


def check_order(device: Device) -> None:
    for values in ((1e8, 1.0, -1e8, 1.0), (1.0, -1e8, 1.0, 1e8)):
        check_reduction(device, Spec("float32", "sum"), [np.full(9, x, np.float32) for x in values])


def test_parts_are_summed_in_rank_order(device: Device) -> None:
    check_order(device)


def check_nans(device: Device, dtype: str = "float32") -> None:
    values = [[np.nan, 1.0, 0.0, -0.0, np.inf], [1.0, np.nan, -0.0, 0.0, -np.inf], [1.0] * 5]
    parts = [rounded(dtype, np.array(part, np.float32).repeat(17)) for part in values]
    for op in ("min", "max"):
        check_reduction(device, Spec(dtype, op), parts[:2])
        check_reduction(device, Spec(dtype, op), parts)


@pytest.mark.parametrize("dtype", HALVES + WIDE)
def test_min_and_max_keep_nan_and_take_the_later_of_equals(device: Device, dtype: str) -> None:
    check_nans(device, dtype)


def check_large_reduction(device: Device) -> None:
    count, n = 2, 2**33 + 16
    parts, result = mapped(count * n), mapped(n)
    sources = ranks("int8", count, 512, 3)
    for k, source in enumerate(sources):
        parts[(k + 1) * n - 512 : (k + 1) * n] = source.view(np.uint8)
    device.allow([])
    blocks = n // 16 // 32 + 1
    device.launch(
        "reduce_int8", blocks, 32,
        *(c_uint64(x) for x in (result.ctypes.data, parts.ctypes.data, n, 0)), c_uint32(count), c_uint32(count),
        c_uint64(n), c_uint32(0), c_double(1), c_double(1), only=blocks - 1,
    )  # fmt: skip
    assert_equal_bits("int8", result.view(np.int8)[-16:], expected(Spec("int8", "sum"), sources)[-16:])


def test_more_than_two_to_the_32_elements_are_reduced(device: Device) -> None:
    check_large_reduction(device)


# ---- the shipped text ------------------------------------------------------------------------------------------------


def test_the_text_was_made_of_the_source_with_these_options() -> None:
    assert gpu_kernels.describe_staleness(PTX) is None


def test_an_edited_text_or_source_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "edited" in str(gpu_kernels.describe_staleness(PTX.replace("add.rn.f32", "add.rz.f32", 1)))
    other = tmp_path / "kernels.cu"
    other.write_text(gpu_kernels.SOURCE.read_text() + "\n")
    monkeypatch.setattr(gpu_kernels, "SOURCE", other)
    assert "make gpu-kernels" in str(gpu_kernels.describe_staleness(PTX))


def test_the_text_is_for_old_drivers_and_gpus() -> None:
    assert re.findall(r"^\.(?:version|target) .*", PTX, re.MULTILINE) == [".version 6.0", ".target sm_60"]


def test_kernels_exist_for_every_dtype_and_operation_of_the_engine() -> None:
    header = (NATIVE / "kernels" / "kernels.h").read_text()
    source = gpu_kernels.SOURCE.read_text()
    ops = re.findall(r"ROW\(ENGINE_(\w+), +\"\w+\"\)", header)[:-1]  # not Adasum
    enum = re.search(r"enum \{ (SUM.*?) \}", source)
    assert enum and enum[1].split(", ") == ops == [op.upper() for op in OPS]
    kernels = set(re.findall(r"\.entry (\w+)\(", PTX))
    ways = {f"{way}_{tensor}_{wire}" for way in ("pack", "unpack") for tensor, wire in PAIRS}
    assert kernels == ways | {"pack_bool_bool", "pack_bytes", "unpack_bytes"} | {f"reduce_{dtype}" for dtype in DTYPES}


def test_floats_are_rounded_at_every_step() -> None:
    """Without a rounding mode a device may fuse a product and a sum; denormals are not flushed."""
    assert not re.search(r"\b(?:add|sub|mul)\.f(?:32|64)|\b(?:fma|mad)\.\w*\.?f(?:32|64)|\.ftz|\.approx|div\.full", PTX)


# ---- the tests themselves: broken kernels are found ------------------------------------------------------------------


def pack_of(tensor: str, wire: str, *, aligned: bool) -> Callable[[Device], None]:
    def check(device: Device) -> None:
        for seed in range(6):
            plan = drawn(tensor, wire, seed)
            if aligned:
                plan = Plan(tensor, wire, plan.rng, [1, 33, 5000, 12], aligned=True)
            check_pack(device, plan, op="min")

    return check


def unpack_of(tensor: str, wire: str) -> Callable[[Device], None]:
    return lambda device: check_unpack(device, Plan(tensor, wire, np.random.default_rng(5), [1, 33, 5000, 12], True))


def average_of(dtype: str) -> Callable[[Device], None]:
    return lambda device: check_reduction(device, Spec(dtype, "average", divisor=3), ranks(dtype, 3, 300, 1))


@dataclass
class Mutant:
    """A kernel with one change, at the first place or everywhere, and the check that has to notice it."""

    kernel: str
    pattern: str
    instead: str
    check: Callable[[Device], None]
    first: bool = False


FLOATS, TO_HALF, TO_BFLOAT16 = "pack_float32_float32", "pack_float32_float16", "pack_float32_bfloat16"
ALIGNED, UNALIGNED = (pack_of("float32", "float32", aligned=aligned) for aligned in (True, False))
ALIGNED_BFLOAT16 = pack_of("float32", "bfloat16", aligned=True)

MUTANTS = {
    "a vector read 4 bytes off": Mutant(FLOATS, r"(ld\.global\.v4\.u32 .*\[%rd\d+)\]", r"\1+4]", ALIGNED),
    "an element read 4 bytes off": Mutant(FLOATS, r"(ld\.global\.f32 .*\[%rd\d+)\]", r"\1+4]", UNALIGNED),
    "an element written 4 bytes off": Mutant(
        "unpack_float32_float16", r"(st\.global\.f32 \[%rd\d+)\]", r"\1+4]", unpack_of("float32", "float16"),
    ),
    "a vector taken for aligned": Mutant(FLOATS, r"(and\.b64 .*), 15;", r"\1, 7;", UNALIGNED),
    "a row that goes on into the next piece is left out": Mutant(
        FLOATS, r"(and\.b32\s+%r\d+, %r\d+), 1;(\nmov\.u32\s+%r\d+, 1;)", r"\1, 0;\2", ALIGNED
    ),
    "teams that take the same rows": Mutant(
        FLOATS, r"(sub\.s32\s+%r\d+, %r1, %r\d+;\n)add\.s32\s+(%r\d+), %r\d+, (%r\d+);", r"\1mov.b32 \2, \3;", UNALIGNED
    ),
    "a lost tail": Mutant(
        TO_HALF, r"(and\.b32 .*), -4;", r"\1, -1;", pack_of("float32", "float16", aligned=True)
    ),
    "a lost byte of the identity": Mutant(
        "pack_int16_int16", r"(and\.b32 .*), 56;", r"\1, 48;", pack_of("int16", "int16", aligned=False)
    ),
    "a bfloat16 cut instead of rounded": Mutant(TO_BFLOAT16, r"(add\.s32 .*), 32767;", r"\1, 0;", ALIGNED_BFLOAT16),
    "a tie rounded up": Mutant(TO_BFLOAT16, r"(add\.s32 .*), 32767;", r"\1, 32768;", ALIGNED_BFLOAT16),
    "a NaN rounded as a number": Mutant(
        TO_BFLOAT16, r"(setp\.gt\.u32 .*), 2139095040;", r"\1, 4294967295;",
        lambda device: check_rounding(device, "bfloat16"),
    ),
    "a place in the slab cut to 32 bits": Mutant(
        TO_HALF, r"(max\.u64\s+(%rd\d+), [^\0]*?)add\.s64\s+(%rd\d+), \2, (%rd\d+);",
        r"\1and.b64 \3, \2, 4294967295;\nadd.s64 \3, \3, \4;", check_large,
    ),
    "an offset in a part cut to 32 bits": Mutant(
        "reduce_int8", r"(shl\.b64\s+(%rd\d+), %rd\d+, 4;)", r"\1\nand.b64 \2, \2, 4294967295;", check_large_reduction
    ),
    "a lost NaN": Mutant("reduce_float32", r"setp\.nan\.f32", "setp.num.f32", check_nans),
    "the earlier of equals": Mutant("reduce_float32", r"setp\.lt\.f32", "setp.le.f32", check_nans),
    "a sum rounded too often": Mutant(
        "reduce_float16", r"(add\.rn\.f32\s+(%f\d+), .*;)",
        r"\1\ncvt.rn.f16.f32 %rs0, \2;\ncvt.f32.f16 \2, %rs0;", average_of("float16"),
    ),
    "an average that is not divided": Mutant(
        "reduce_int32", r"(div\.rn\.f64 .*), %fd\d+;", r"\1, 0d3FF0000000000000;", average_of("int32")
    ),
}  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name: str, tmp_path: Path) -> None:
    mutant = MUTANTS[name]
    start = PTX.index(f".entry {mutant.kernel}(")
    end = PTX.index("\n}", start)
    kernel = re.sub(r"\n\t+", "\n", PTX[start:end])
    body, changes = re.subn(mutant.pattern, mutant.instead, kernel, count=int(mutant.first))
    assert changes, "the pattern is no longer in the text"
    changed = Device(build(PTX[:start] + body + PTX[end:], tmp_path, [mutant.kernel]))
    with pytest.raises((AssertionError, RuntimeError, pytest.fail.Exception)):
        mutant.check(changed)


@pytest.mark.parametrize(
    ("pattern", "instead"),
    [
        (r"cvt\.rn\.f16\.f32", "cvt.rz.f16.f32"),
        (r"mul\.rn\.f32", "mul.f32"),
        (r"%tid\.x", "%laneid"),
        (r"ld\.global\.f32", "ld.f32"),
        (r"\.reg \.pred", ".shared .pred"),
        (r"ret;", "bar.sync 0;\nret;"),
    ],
)
def test_what_the_translator_does_not_know_is_an_error(pattern: str, instead: str) -> None:
    text, changes = re.subn(pattern, instead, PTX)
    assert changes
    with pytest.raises(UnknownError):
        translate(text, ["pack_float32_float16"])
