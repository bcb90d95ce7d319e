"""float32 and float64 that travel as float16 and bfloat16, and custom compressors."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import engine
from engine import Compression
from engine.session import runtime

from ..on_ranks import on_ranks, spare
from .arrays import check_equal, check_same_on_all, numbers, refused
from .halves import KINDS, LENGTHS, MANY, MARKERS, SCALES, compressed
from .operation_table import OPS, Array, expected

pytestmark = on_ranks(1, 2, 3, spare(4))

PLAN = [
    *(
        (dtype, wire, op, pre, post, count)
        for dtype, wire in KINDS
        for op in OPS
        for pre, post in SCALES
        for count in LENGTHS
    ),
    *((dtype, wire, "Average", 1.0, 1.0, MANY) for dtype, wire in KINDS),
]
each_of_the_plan = pytest.mark.parametrize(
    "at",
    range(len(PLAN)),
    ids=[f"{dtype}-as-{wire}-{op}-x{pre}-x{post}-[{count}]" for dtype, wire, op, pre, post, count in PLAN],
)


@cache
def in_flight_together() -> tuple[list[Array], list[Array]]:
    """Results of the whole plan, in flight together, each beside an uncompressed sum."""
    handles, plain = [], []
    for at, (dtype, wire, op, pre, post, count) in enumerate(PLAN):
        submit = engine.allreduce_async_ if at % 2 else engine.allreduce_async
        mine = numbers(dtype, count, engine.rank(), at)
        handles.append(submit(mine, getattr(engine, op), f"{at}", pre, post, compression=MARKERS[wire]))
        plain.append(engine.allreduce_async(np.full(3, engine.rank(), dtype), engine.Sum, f"plain {at}"))
    return list(map(engine.synchronize, handles)), list(map(engine.synchronize, plain))


@pytest.mark.sample(60)
@each_of_the_plan
def test_fused(at: int, size: int) -> None:
    dtype, wire, op, pre, post, count = PLAN[at]
    results, plain = in_flight_together()
    values = [numbers(dtype, count, each, at) for each in range(size)]
    check_equal(dtype, results[at], compressed(dtype, wire, op, values, pre, post))
    assert plain[at].tolist() == [size * (size - 1) / 2] * 3


def test_fused_results_are_the_same_on_all_ranks() -> None:
    check_same_on_all(in_flight_together()[0])


@each_of_the_plan
def test_alone(at: int, rank: int) -> None:
    dtype, wire, op, pre, post, count = PLAN[at]
    results, _ = in_flight_together()
    mine = numbers(dtype, count, rank, at)
    got = engine.allreduce(mine, getattr(engine, op), None, pre, post, compression=MARKERS[wire])
    assert got.tobytes() == results[at].tobytes(), "other bits than in a fused batch"


class ToHalf:
    """Compressor for NumPy, as scripts for Horovod have them."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor.astype(np.float16), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor.astype(ctx)


class Doubling(engine.Compressor):
    """Compressor that works in Python and lets the engine cast."""

    wire = "bfloat16"

    def __init__(self) -> None:
        self.calls = 0

    def compress(self, tensor: Any) -> tuple[Any, Any]:  # type: ignore[override]
        self.calls += 1
        return tensor * 2, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor / 2


@pytest.mark.parametrize("rows", [1, 7, 900])
@pytest.mark.parametrize(("dtype", "wire"), KINDS)
def test_reducescatter_of_rows(dtype: str, wire: str, rows: int, rank: int, size: int) -> None:
    inputs = [numbers(dtype, (rows, 33), each, rows) for each in range(size)]
    got = engine.reducescatter(inputs[rank], engine.Sum, None, 0.5, 3.0, compression=MARKERS[wire])
    whole = compressed(dtype, wire, "Sum", inputs, 0.5, 3.0)
    check_equal(dtype, got, np.array_split(whole, size)[rank])


@pytest.mark.parametrize("in_place", [False, True])
def test_a_group_of_mixed_dtypes(in_place: bool, rank: int, size: int) -> None:
    dtypes = ("float32", "int32", "float64", "float32", "float16")
    inputs = [[numbers(dtype, 50 + k, each, k) for k, dtype in enumerate(dtypes)] for each in range(size)]
    reduce = engine.grouped_allreduce_ if in_place else engine.grouped_allreduce
    mine = [each.copy() for each in inputs[rank]]
    got = reduce(mine, engine.Sum, compression=Compression.fp16)
    for k, dtype in enumerate(dtypes):
        values = [each[k] for each in inputs]
        wide = dtype in ("float32", "float64")
        want = compressed(dtype, "float16", "Sum", values) if wide else expected(dtype, "Sum", values)
        check_equal(dtype, got[k], want)
        assert (got[k] is mine[k]) == in_place


@pytest.mark.parametrize("dtype", ["float16", "int32", "int64", "bool"])
def test_other_dtypes_are_not_compressed(dtype: str, rank: int, size: int) -> None:
    inputs = [numbers(dtype, 1000, each) for each in range(size)]
    got = engine.allreduce(inputs[rank], engine.Sum, compression=Compression.fp16)
    check_equal(dtype, got, expected(dtype, "Sum", inputs))


def test_memory_that_ranks_share(rank: int, size: int) -> None:
    memory = runtime.current_engine().share(4 * 10_000)
    inputs = [numbers("float32", 10_000, each) for each in range(size)]
    mine = np.frombuffer(memory, np.float32)
    mine[:] = inputs[rank]
    got = engine.allreduce_(mine, engine.Average, "shared", compression=Compression.fp16)
    check_equal("float32", np.array(got), compressed("float32", "float16", "Average", inputs))
    entry = next(
        each for each in runtime.current_engine().history() if each["name"] == "shared" and each["type"] == "batch"
    )
    assert entry["algorithm"] != "shared"
    assert entry["bytes"] == 2 * 10_000, "bytes are counted as they travel"


def test_strides(rank: int, size: int) -> None:
    inputs = [numbers("float32", (60, 40), each) for each in range(size)]
    mine = inputs[rank].copy()
    engine.allreduce_(mine[::2, ::3], engine.Sum, compression=Compression.bf16)
    want = inputs[rank].copy()
    want[::2, ::3] = compressed("float32", "bfloat16", "Sum", [each[::2, ::3] for each in inputs])
    check_equal("float32", mine, want)


@pytest.mark.parametrize("count", [10, 30_000])
def test_a_compressor_as_for_horovod(count: int, rank: int, size: int) -> None:
    inputs = [numbers("float32", count, each, 5) for each in range(size)]
    want = compressed("float32", "float16", "Average", inputs)
    check_equal("float32", engine.allreduce(inputs[rank], compression=ToHalf), want)
    mine = inputs[rank].copy()
    assert engine.allreduce_(mine, compression=ToHalf) is mine
    check_equal("float32", mine, want)
    mine = inputs[rank].copy()
    handle = engine.allreduce_async(mine, compression=ToHalf())
    check_equal("float32", handle.wait(), want)
    assert handle.wait() is handle.wait()
    check_equal("float32", mine, inputs[rank])
    for got in engine.grouped_allreduce([inputs[rank]] * 2, compression=ToHalf):
        check_equal("float32", got, want)
    both = [inputs[rank].copy(), inputs[rank].copy()]
    engine.synchronize(engine.grouped_allreduce_async_(both, compression=ToHalf))
    for got in both:
        check_equal("float32", got, want)


@pytest.mark.parametrize("count", [10, 30_000])
def test_a_compressor_of_both_kinds(count: int, rank: int, size: int) -> None:
    inputs = [numbers("float32", count, each, 5) for each in range(size)]
    doubling = Doubling()
    got = engine.allreduce(inputs[rank], compression=doubling)
    with np.errstate(over="ignore", invalid="ignore"):
        doubled = [each * np.float32(2) for each in inputs]
    check_equal("float32", got, compressed("float32", "bfloat16", "Average", doubled) / np.float32(2))
    assert doubling.calls == 1


def test_a_reduce_scatter_with_a_compressor_of_ones_own(rank: int, size: int) -> None:
    inputs = [numbers("float32", (9, 5), each) for each in range(size)]
    want = compressed("float32", "float16", "Sum", inputs)
    got = engine.reducescatter(inputs[rank], engine.Sum, compression=ToHalf)
    check_equal("float32", got, np.array_split(want, size)[rank])


def test_what_is_no_compression(size: int) -> None:
    x = np.ones(3)
    refused(lambda: engine.allreduce(x, compression="fp16"), "'fp16'", TypeError)
    refused(lambda: engine.allreduce(x, compression=3), "compress(tensor)", TypeError)
    refused(lambda: engine.allreduce(x, compression=engine.Scheme()), "DistributedOptimizer", TypeError)
    odd = type("Odd", (engine.Compressor,), {"wire": "int8"})
    refused(lambda: engine.allreduce(x, compression=odd), "'int8'", ValueError)
    assert engine.allreduce(x, engine.Sum, "after that").tolist() == [size] * 3


def summed(values: list[float], compression: Any, dtype: str = "float32", op: int = engine.Sum) -> list[float]:
    got: list[float] = engine.allreduce(np.array(values, dtype), op, compression=compression).tolist()
    return got


wide = pytest.mark.parametrize("dtype", ["float32", "float64"])


@wide
def test_overflow(dtype: str, rank: int, size: int) -> None:
    alone = 70_000.0 if rank == 0 else 0.0
    assert summed([alone, -alone], Compression.fp16, dtype) == [np.inf, -np.inf]
    assert summed([65_504.0], Compression.fp16, dtype, engine.Average) == [65_504.0]
    assert np.isinf(summed([65_504.0], Compression.fp16, dtype)[0]) == (size > 1)
    assert summed([2.0**127 if rank == 0 else 0.0], Compression.bf16, dtype) == [2.0**127]


@wide
def test_NaN(dtype: str, rank: int, size: int) -> None:
    mine = [np.nan if rank == size - 1 else 1.0]
    for op in (engine.Sum, engine.Min, engine.Max, engine.Product):
        for compression in (Compression.fp16, Compression.bf16):
            assert np.isnan(summed(mine, compression, dtype, op)).all()


@wide
def test_denormals(dtype: str, size: int) -> None:
    assert summed([2.0**-24], Compression.fp16, dtype) == [size * 2.0**-24]
    assert summed([2.0**-26], Compression.fp16, dtype) == [0.0]
    assert summed([2.0**-130], Compression.bf16, dtype) == [size * 2.0**-130]


def test_float64_beyond_float32(rank: int) -> None:
    assert summed([1e300 if rank == 0 else 0.0], Compression.bf16, "float64") == [np.inf]


def test_sums_do_not_lose_what_a_half_cannot_hold(rank: int, size: int) -> None:
    mine = [1.0 if rank == 0 else 2.0**-12]
    want = np.float16(1 + (size - 1) * 2.0**-12)  # each alone would be lost in float16
    assert summed(mine, Compression.fp16) == [float(want)]
