"""Compressed reductions, held against NumPy. Runs on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np

import engine
from engine import Compression, runtime

from .on_ranks import Cases, check_equal, check_same_on_all, numbers, refused
from .operation_table import OPS, Array, expected, narrow, scale, widen

MARKERS: dict[str, Any] = {"float16": Compression.fp16, "bfloat16": Compression.bf16}
KINDS = [(dtype, wire) for dtype in ("float32", "float64") for wire in MARKERS]
SCALES = ((1.0, 1.0), (0.3, -1.7))
LENGTHS = (37, 20_011)
MANY = 700_001  # several chunks, the last one odd


def sent(dtype: str, wire: str, values: Array, prescale: float = 1.0) -> Array:
    """What travels of a rank's values."""
    with np.errstate(all="ignore"):
        return narrow(wire, scale(dtype, values, prescale).astype(np.float32))


def compressed(dtype: str, wire: str, op: str, values: list[Array], pre: float = 1.0, post: float = 1.0) -> Array:
    """The result of a compressed allreduce of one array of each rank."""
    return widen(wire, expected(wire, op, [sent(dtype, wire, each, pre) for each in values], 1.0, post)).astype(dtype)


def reduce_compressed() -> int:
    """Every operation and scale: all in flight at once beside what is not compressed, then again one by one."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()
    plan = [
        (dtype, wire, op, pre, post, count)
        for dtype, wire in KINDS
        for op in OPS
        for pre, post in SCALES
        for count in LENGTHS
    ]
    plan += [(dtype, wire, "Average", 1.0, 1.0, MANY) for dtype, wire in KINDS]
    handles, plain = [], []
    for index, (dtype, wire, op, pre, post, count) in enumerate(plan):
        submit = engine.allreduce_async_ if index % 2 else engine.allreduce_async
        name, mine = f"{index}", numbers(dtype, count, rank, index)
        handles.append(submit(mine, getattr(engine, op), name, pre, post, compression=MARKERS[wire]))
        plain.append(engine.allreduce_async(np.full(3, rank, dtype), engine.Sum, f"plain {index}"))
    results = []
    for index, (dtype, wire, op, pre, post, count) in enumerate(plan):
        with cases.case(f"fused {dtype} as {wire} {op} x{pre} x{post} [{count}]"):
            got = engine.synchronize(handles[index])
            results.append(got)
            values = [numbers(dtype, count, each, index) for each in range(size)]
            check_equal(dtype, got, compressed(dtype, wire, op, values, pre, post))
            assert engine.synchronize(plain[index]).tolist() == [size * (size - 1) / 2] * 3
    check_same_on_all(results)
    for index, (dtype, wire, op, pre, post, count) in enumerate(plan):
        mine = numbers(dtype, count, rank, index)
        got = engine.allreduce(mine, getattr(engine, op), None, pre, post, compression=MARKERS[wire])
        with cases.case(f"alone {dtype} as {wire} {op} x{pre} x{post} [{count}]"):
            assert got.tobytes() == results[index].tobytes(), "other bits than in a fused batch"
    return cases.done(2 * len(plan))


class ToHalf:
    """A compressor as scripts for Horovod have them, for NumPy."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor.astype(np.float16), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor.astype(ctx)


class Doubling(engine.Compressor):
    """Does something in Python, and has the engine cast."""

    wire = "bfloat16"

    def __init__(self) -> None:
        self.calls = 0

    def compress(self, tensor: Any) -> tuple[Any, Any]:  # type: ignore[override]
        self.calls += 1
        return tensor * 2, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor / 2


def other_collectives() -> int:
    """Groups, reduce-scatter, shared memory, strides, what is not compressed, compressors of one's own."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()
    for dtype, wire in KINDS:
        for rows in (1, 7, 900):
            with cases.case(f"reducescatter of {rows} rows of {dtype} as {wire}"):
                inputs = [numbers(dtype, (rows, 33), each, rows) for each in range(size)]
                got = engine.reducescatter(inputs[rank], engine.Sum, None, 0.5, 3.0, compression=MARKERS[wire])
                whole = compressed(dtype, wire, "Sum", inputs, 0.5, 3.0)
                check_equal(dtype, got, np.array_split(whole, size)[rank])
    for in_place in (False, True):
        with cases.case(f"a group of mixed dtypes, in place {in_place}"):
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
    for dtype in ("float16", "int32", "int64", "bool"):
        with cases.case(f"{dtype} is not compressed"):
            inputs = [numbers(dtype, 1000, each) for each in range(size)]
            got = engine.allreduce(inputs[rank], engine.Sum, compression=Compression.fp16)
            check_equal(dtype, got, expected(dtype, "Sum", inputs))
    memory = runtime.engine().share(4 * 10_000)
    with cases.case("memory that ranks share"):
        inputs = [numbers("float32", 10_000, each) for each in range(size)]
        mine = np.frombuffer(memory, np.float32)
        mine[:] = inputs[rank]
        got = engine.allreduce_(mine, engine.Average, "shared", compression=Compression.fp16)
        check_equal("float32", np.array(got), compressed("float32", "float16", "Average", inputs))
        entry = next(
            each for each in runtime.engine().history() if each["name"] == "shared" and each["type"] == "batch"
        )
        assert entry["algorithm"] != "shared"
        assert entry["bytes"] == 2 * 10_000, "bytes are counted as they travel"
    with cases.case("strides"):
        inputs = [numbers("float32", (60, 40), each) for each in range(size)]
        mine = inputs[rank].copy()
        engine.allreduce_(mine[::2, ::3], engine.Sum, compression=Compression.bf16)
        want = inputs[rank].copy()
        want[::2, ::3] = compressed("float32", "bfloat16", "Sum", [each[::2, ::3] for each in inputs])
        check_equal("float32", mine, want)
    for count in (10, 30_000):
        inputs = [numbers("float32", count, each, 5) for each in range(size)]
        want = compressed("float32", "float16", "Average", inputs)
        with cases.case(f"a compressor as for Horovod, {count}"):
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
        with cases.case(f"a compressor of both kinds, {count}"):
            doubling = Doubling()
            got = engine.allreduce(inputs[rank], compression=doubling)
            with np.errstate(over="ignore", invalid="ignore"):
                doubled = [each * np.float32(2) for each in inputs]
            check_equal("float32", got, compressed("float32", "bfloat16", "Average", doubled) / np.float32(2))
            assert doubling.calls == 1
    with cases.case("a reduce-scatter with a compressor of one's own"):
        inputs = [numbers("float32", (9, 5), each) for each in range(size)]
        want = compressed("float32", "float16", "Sum", inputs)
        got = engine.reducescatter(inputs[rank], engine.Sum, compression=ToHalf)
        check_equal("float32", got, np.array_split(want, size)[rank])
    with cases.case("what is no compression"):
        x = np.ones(3)
        refused(lambda: engine.allreduce(x, compression="fp16"), "'fp16'", TypeError)
        refused(lambda: engine.allreduce(x, compression=3), "compress(tensor)", TypeError)
        refused(lambda: engine.allreduce(x, compression=engine.Scheme()), "DistributedOptimizer", TypeError)
        odd = type("Odd", (engine.Compressor,), {"wire": "int8"})
        refused(lambda: engine.allreduce(x, compression=odd), "'int8'", ValueError)
        assert engine.allreduce(x, engine.Sum, "after that").tolist() == [size] * 3
    return cases.done(12 + 2 + 4 + 2 + 4 + 2)


def special_values() -> int:
    """What docs/compression.md promises, in numbers that a reader can check by eye."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()

    def summed(values: list[float], compression: Any, dtype: str = "float32", op: int = engine.Sum) -> list[float]:
        got: list[float] = engine.allreduce(np.array(values, dtype), op, compression=compression).tolist()
        return got

    for dtype in ("float32", "float64"):
        with cases.case(f"overflow of {dtype}"):
            alone = 70_000.0 if rank == 0 else 0.0
            assert summed([alone, -alone], Compression.fp16, dtype) == [np.inf, -np.inf]
            assert summed([65_504.0], Compression.fp16, dtype, engine.Average) == [65_504.0]
            assert np.isinf(summed([65_504.0], Compression.fp16, dtype)[0]) == (size > 1)
            assert summed([2.0**127 if rank == 0 else 0.0], Compression.bf16, dtype) == [2.0**127]
        with cases.case(f"NaN of {dtype}"):
            mine = [np.nan if rank == size - 1 else 1.0]
            for op in (engine.Sum, engine.Min, engine.Max, engine.Product):
                for compression in (Compression.fp16, Compression.bf16):
                    assert np.isnan(summed(mine, compression, dtype, op)).all()
        with cases.case(f"denormals of {dtype}"):
            assert summed([2.0**-24], Compression.fp16, dtype) == [size * 2.0**-24]
            assert summed([2.0**-26], Compression.fp16, dtype) == [0.0]
            assert summed([2.0**-130], Compression.bf16, dtype) == [size * 2.0**-130]
    with cases.case("float64 beyond float32"):
        assert summed([1e300 if rank == 0 else 0.0], Compression.bf16, "float64") == [np.inf]
    with cases.case("sums do not lose what a half cannot hold"):
        mine = [1.0 if rank == 0 else 2.0**-12]
        want = np.float16(1 + (size - 1) * 2.0**-12)  # each alone would be lost in float16
        assert summed(mine, Compression.fp16) == [float(want)]
    return cases.done(8)
