"""Tensors of any size, shape, layout and NumPy-like library; no setting changes a bit of a result."""

from __future__ import annotations

import array as arrays
import hashlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

import engine
from engine.native import setup

from ..on_ranks import on_ranks, per_size, spare
from .arrays import check_equal, check_same_on_all, numbers, refused, small_numbers
from .operation_table import Array, expected

pytestmark = on_ranks(1, 2, 3, spare(4))

KIB = 1 << 10
ONE_SHOT, SMALLEST_CHUNK, CHUNK, SLOT = (
    32 * KIB,
    64 * KIB,
    512 * KIB,
    1024 * KIB,
)  # engine_ext/operations/allreduce.pyx, operation.pyx; layout.h


def lengths(item: int, size: int) -> list[int]:
    """Element counts around every size at which the engine changes its algorithm."""
    limits = [64, 64 * size, ONE_SHOT // size, SMALLEST_CHUNK, 2 * SMALLEST_CHUNK, 2 * CHUNK, 2 * SLOT]
    around = {(limit + step * item) // item for limit in limits for step in (-1, 0, 1)}
    more_than_the_slots = (2 * 4 * CHUNK + 3 * SMALLEST_CHUNK) // item + 5
    return sorted({0, 1, 2, 3, 5, 7, 31, 33, 997, more_than_the_slots} | around)


# ---- sizes


def plan(size: int) -> list[tuple[str, str, int]]:
    """Dtype, operation and length."""
    kinds = (("float32", "Sum"), ("float16", "Average"), ("int8", "Sum"), ("float64", "Max"), ("bool", "Sum"))
    return [
        (dtype, op, count)
        for dtype, op in kinds
        for count in lengths(np.dtype(dtype).itemsize, size)
        if count * np.dtype(dtype).itemsize < 3 << 20 or dtype in ("float32", "float16")
    ]


def inputs(row: tuple[str, str, int], size: int) -> list[Array]:
    dtype, _, count = row
    return [small_numbers(dtype, count, other) for other in range(size)]


@cache
def together() -> list[Array]:
    """Results of the whole plan, in flight together."""
    handles = [
        engine.allreduce_async_(small_numbers(dtype, count, engine.rank()), getattr(engine, op), f"{number}")
        for number, (dtype, op, count) in enumerate(plan(engine.size()))
    ]
    return list(map(engine.synchronize, handles))


@pytest.mark.sample(90)
@per_size("row", plan)
def test_a_size_in_and_out_of_place(row: tuple[str, str, int], rank: int, size: int) -> None:
    dtype, op, _ = row
    brought = inputs(row, size)
    want = expected(dtype, op, brought)
    mine = brought[rank].copy()
    apart = engine.allreduce(mine, getattr(engine, op))
    kept = mine.copy()
    inplace = engine.allreduce_(mine, getattr(engine, op))
    assert inplace is mine
    check_equal(dtype, kept, brought[rank])
    check_equal(dtype, apart, want)
    check_equal(dtype, mine, want)


@pytest.mark.sample(90)
@per_size("row", plan)
def test_a_size_among_all_others(row: tuple[str, str, int], size: int) -> None:
    dtype, op, _ = row
    check_equal(dtype, together()[plan(size).index(row)], expected(dtype, op, inputs(row, size)))


def test_more_than_the_fusion_threshold(rank: int, size: int) -> None:
    """They run alone and beside small ones; 64-bit offsets are not needed, many chunks are."""

    def values(count: int, rank: int) -> np.ndarray:
        return np.resize(np.roll(np.arange(1021, dtype=np.float32), rank * 7), count)

    count = (65 << 20) // 4 + 3
    large = values(count, rank)
    small = {n: engine.allreduce_async(values(n, rank), engine.Sum, f"small {n}") for n in (1, 100, 50_000)}
    handle = engine.allreduce_async_(large, engine.Sum, "large")
    small |= {n: engine.allreduce_async(values(n, rank), engine.Sum, f"small {n}") for n in (2, 200, 60_000)}
    results = {n: engine.synchronize(each) for n, each in small.items()}
    engine.synchronize(handle)
    for n, got in results.items():
        check_equal("float32", got, sum((values(n, other) for other in range(1, size)), values(n, 0)))
    period = np.zeros(1021, np.float32)
    for other in range(size):
        period = period + values(1021, other)
    assert np.array_equal(large, np.resize(period, count))


# ---- layouts


Make = Callable[[int], Array]


def plain(shape: Any, dtype: str = "float32") -> Make:
    return lambda rank: small_numbers(dtype, shape, rank, 0)


def unaligned(dtype: str, count: int, offset: int) -> Make:
    def make(rank: int) -> Array:
        source = small_numbers(dtype, count, rank)
        memory = np.zeros(source.nbytes + 64, np.uint8)
        view = memory[offset : offset + source.nbytes].view(dtype)
        view[:] = source
        return view

    return make


LAYOUTS: dict[str, Make] = {
    "0-d": plain(()),
    "one element": plain((1,)),
    "no elements": plain((0,)),
    "no elements, three dimensions": plain((3, 0, 2)),
    "three dimensions": plain((3, 5, 7)),
    "twelve dimensions": plain((1, 2) * 6),
    "fourteen dimensions": plain((1, 2) * 7),
    "transposed": lambda rank: small_numbers("float32", (40, 30), rank).T,
    "every third": lambda rank: small_numbers("float32", 3000, rank)[::3],
    "reversed": lambda rank: small_numbers("float32", 1000, rank)[::-1],
    "a column": lambda rank: small_numbers("float32", (100, 7), rank)[:, 3],
    "columns": lambda rank: small_numbers("float32", (100, 7), rank)[:, 2:5],
    "Fortran order": lambda rank: np.asfortranarray(small_numbers("float32", (6, 7, 8), rank)),
    "channels last": lambda rank: small_numbers("float32", (2, 5, 6, 3), rank).transpose(0, 3, 1, 2),
    **{
        f"unaligned {dtype} [{count}] at {offset}": unaligned(dtype, count, offset)
        for dtype in ("float16", "float32", "float64", "int32", "int64")
        for offset in (1, 2, 3)
        for count in (7, 3000, 90_000)
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout(layout: str, rank: int, size: int) -> None:
    """It is reduced out of place and in place."""
    make = LAYOUTS[layout]
    brought = [np.ascontiguousarray(make(other)) for other in range(size)]
    mine = make(rank)
    dtype = str(mine.dtype)
    want = expected(dtype, "Sum", brought).reshape(mine.shape)  # ascontiguousarray makes a scalar 1-d
    apart = engine.allreduce(mine, engine.Sum)
    unchanged = np.array_equal(mine, make(rank))
    target = make(rank)
    result = engine.allreduce_(target, engine.Sum)
    assert unchanged, "the input was written to"
    assert result is target
    check_equal(dtype, np.asarray(apart), want)
    check_equal(dtype, np.asarray(target), want)


def test_fourteen_dimensions_gathered(rank: int, size: int) -> None:
    got = engine.allgather(np.full((1, 2) * 7, rank, np.int32))
    assert got.shape == (size, 2, *(1, 2) * 6)
    assert (got == np.arange(size).reshape(size, *(1,) * 13)).all()


def read_only(rank: int) -> Array:
    array = small_numbers("float32", 10, rank)
    array.flags.writeable = False
    return array


def test_read_only_apart(rank: int, size: int) -> None:
    want = expected("float32", "Sum", [small_numbers("float32", 10, other) for other in range(size)])
    check_equal("float32", engine.allreduce(read_only(rank), engine.Sum), want)


def test_read_only_in_place(rank: int) -> None:
    refused(lambda: engine.allreduce_(read_only(rank), engine.Sum), "read-only")
    refused(lambda: engine.broadcast_(read_only(rank), 0), "read-only")


def test_a_scalar_of_numpy(rank: int, size: int) -> None:
    got = engine.allreduce(np.float32(rank + 1), engine.Sum)
    assert got.shape == () and got == size * (size + 1) / 2
    refused(lambda: engine.allreduce_(np.float32(1)), "read-only")


def test_a_memoryview_an_array_of_the_standard_library_a_bytearray(rank: int, size: int) -> None:
    for make in (lambda: memoryview(arrays.array("f", [rank, 1])), lambda: arrays.array("f", [rank, 1])):
        mine = make()
        assert engine.allreduce(mine, engine.Sum).tolist() == [size * (size - 1) / 2, size]
        engine.allreduce_(mine, engine.Sum)
        assert list(mine) == [size * (size - 1) / 2, size]
    assert bytes(engine.allreduce(bytearray(b"\1\2"), engine.Sum)) == bytes([size, 2 * size])


@pytest.mark.parametrize("kind", [np.ndarray, arrays.array], ids=["array", "standard library"])
def test_memory_in_flight_stays_where_it_is(kind: type, size: int) -> None:
    """Move its memory: refused until nobody holds the handle of the call, and allowed then."""
    tensor: Any = np.ones(5, np.float32) if kind is np.ndarray else arrays.array("f", [1.0] * 5)
    grow = (lambda: tensor.resize(9)) if kind is np.ndarray else (lambda: tensor.append(1.0))
    handle = engine.allreduce_async_(tensor, engine.Sum)
    with pytest.raises((ValueError, BufferError)):
        grow()
    assert list(handle.wait()) == [size] * 5
    del handle
    grow()
    assert len(tensor) > 5


def test_a_subclass(size: int) -> None:
    mine = np.ma.masked_array(np.ones(3, np.float32), mask=[0, 1, 0])
    got = engine.allreduce(mine, engine.Sum)
    assert type(got) is np.ndarray and got.tolist() == [size] * 3


def test_the_longs_of_c(size: int) -> None:
    for dtype in (np.longlong, np.int_, np.intc):
        assert engine.allreduce(np.ones(3, dtype), engine.Sum).tolist() == [size] * 3


# ---- settings


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "no fusion": {"fusion_threshold": 0},
    "tiny threshold": {"fusion_threshold": 1000},
    "huge threshold": {"fusion_threshold": "4G"},
    "no cycle": {"cycle_time_ms": 0},
    "long cycle": {"cycle_time_ms": 50},
    "cached": {"stores": "cached"},
    "streaming": {"stores": "streaming"},
    "no spinning": {"spin_us": 0},
    "much spinning": {"spin_us": 1000},
    "plain kernels": {"kernels": "plain"},
    "avx2 kernels": {"kernels": "avx2"},
    "avx512 kernels": {"kernels": "avx512"},
}


def mixture() -> str:
    """Digest of the results of a mixture of all operations, which must not depend on any setting."""
    rank, size = engine.rank(), engine.size()
    digest = hashlib.sha256()
    for repeat in range(2):
        handles = []
        for count in (1, 3, 64, 1000, 16_384 // size, 33_000, 150_001, 500_001):
            for dtype in ("float32", "float16", "float64", "int8"):
                for op, pre, post in ((engine.Sum, 1.0, 1.0), (engine.Average, 0.3, 1.0), (engine.Product, 1.0, 0.7)):
                    if count > 40_000 and (op is not engine.Sum or dtype in ("int8", "float64")):
                        continue
                    mine = INPUTS.setdefault((dtype, count), numbers(dtype, count, rank, count))
                    handles.append(engine.allreduce_async(mine, op, f"{count} {dtype} {op}", pre, post))
        for handle in reversed(handles) if repeat else handles:
            got = engine.synchronize(handle)
            # The sign of a NaN is left open.
            digest.update(np.where(got != got, got.dtype.type(0), got).tobytes())
        check_same_on_all([np.frombuffer(digest.digest(), np.uint8)])
    for each in large(rank, size):
        digest.update(np.where(each != each, each.dtype.type(0), each).tobytes())
    return digest.hexdigest()


def large(rank: int, size: int) -> Iterator[Any]:
    """Run every kind on tensors of several chunks, with elements of 1, 2, 4 and 8 bytes."""
    for dtype, count in (("int8", 1_600_003), ("float16", 700_001), ("float32", 400_001), ("float64", 200_003)):
        mine = INPUTS.setdefault((dtype, count), numbers(dtype, count, rank, count))
        if dtype != "int8" and size & (size - 1) == 0:
            yield engine.allreduce(mine, engine.Adasum, f"adasum {dtype}")
        yield engine.reducescatter(mine, engine.Sum, f"scatter {dtype}")
        yield from engine.alltoall(mine, [count - size + 1] + [1] * (size - 1), f"to all {dtype}")
        yield engine.allgather(mine[rank:], f"gather {dtype}")
        yield engine.broadcast(mine, size - 1, f"from the last {dtype}")


INPUTS: dict[Any, Any] = {}


@pytest.mark.slow
@on_ranks(2, 3, world=None)
def test_no_setting_changes_a_bit(rank: int) -> None:
    """Each setting has a world of its own; knobs share one."""
    digests: dict[str, str] = {}
    for name, settings in SETTINGS.items():
        if settings.get("kernels", "plain") in setup.kernel_levels():
            engine.init(**settings)
            digests[name] = mixture()
            engine.shutdown()
    engine.init()
    digests["first"] = mixture()
    for name, knobs in {
        "small chunks": {"chunk_bytes": 4096},
        "odd chunks": {"chunk_bytes": 100_001},
        "chunks a byte above the smallest": {"chunk_bytes": 65_537},
        "chunks a byte below the largest": {"chunk_bytes": (1 << 20) - 1},
        "large chunks": {"chunk_bytes": 1 << 20},
        "streaming": {"stores": "streaming"},
        "cached": {"stores": "cached"},
        "threshold": {"fusion_threshold": 70_001},
        "cycle": {"cycle_time_ms": 0},
    }.items():
        if rank == 0:
            engine.set_knobs(**knobs)
        digests[f"knob: {name}"] = mixture()
    assert len(digests) > 12 and len(set(digests.values())) == 1, digests


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_dtypes_that_a_package_adds_to_numpy(dtype: str, rank: int, size: int) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = getattr(ml_dtypes, dtype)
    mine = np.arange(12).reshape(3, 4).astype(kind)
    gathered = engine.allgather(mine if rank == 0 else mine[:0])
    assert gathered.dtype == kind and np.array_equal(gathered, mine)
    sent = mine if rank == 0 else np.zeros_like(mine)
    assert np.array_equal(engine.broadcast(sent, 0), mine)
    if dtype == "bfloat16":
        total = engine.allreduce(mine, engine.Sum)
        assert total.dtype == kind and np.array_equal(total.astype(np.float32), mine.astype(np.float32) * size)
        target = mine.copy()
        assert engine.allreduce_(target, engine.Sum) is target and np.array_equal(target, total)
