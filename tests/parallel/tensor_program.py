"""Tensors of every size, shape, layout and library. Runs on every rank."""

from __future__ import annotations

import array as arrays
import hashlib
from typing import Any

import numpy as np

import engine
from engine.native import setup

from .on_ranks import Cases, check_equal, check_same_on_all, numbers, refused, small_numbers
from .operation_table import expected

KIB = 1 << 10
ONE_SHOT, SMALLEST_CHUNK, CHUNK, SLOT = (
    32 * KIB,
    64 * KIB,
    512 * KIB,
    1024 * KIB,
)  # engine_ext/control/batch.pyx, layout.h


def lengths(item: int, size: int) -> list[int]:
    """Elements around every size at which the engine changes what it does."""
    limits = [64, 64 * size, ONE_SHOT // size, SMALLEST_CHUNK, 2 * SMALLEST_CHUNK, 2 * CHUNK, 2 * SLOT]
    around = {(limit + step * item) // item for limit in limits for step in (-1, 0, 1)}
    more_than_the_slots = (2 * 4 * CHUNK + 3 * SMALLEST_CHUNK) // item + 5
    return sorted({0, 1, 2, 3, 5, 7, 31, 33, 997, more_than_the_slots} | around)


def sizes() -> int:
    """In place and out of place, alone and all together."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()
    plan = [
        (dtype, op, count)
        for dtype, op in (
            ("float32", "Sum"),
            ("float16", "Average"),
            ("int8", "Sum"),
            ("float64", "Max"),
            ("bool", "Sum"),
        )
        for count in lengths(np.dtype(dtype).itemsize, size)
        if count * np.dtype(dtype).itemsize < 3 << 20 or dtype in ("float32", "float16")
    ]
    alone = []
    for dtype, op, count in plan:
        name = f"{dtype} {op} [{count}]"
        inputs = [small_numbers(dtype, count, other) for other in range(size)]
        want = expected(dtype, op, inputs)
        mine = inputs[rank].copy()
        apart = engine.allreduce(mine, getattr(engine, op))
        kept = mine.copy()
        inplace = engine.allreduce_(mine, getattr(engine, op))
        with cases.case(name):
            assert inplace is mine
            check_equal(dtype, kept, inputs[rank])
            check_equal(dtype, apart, want)
            check_equal(dtype, mine, want)
        alone.append(want)
    handles = [
        engine.allreduce_async_(small_numbers(dtype, count, rank), getattr(engine, op), f"{number}")
        for number, (dtype, op, count) in enumerate(plan)
    ]
    for want, handle, (dtype, op, count) in zip(alone, handles, plan, strict=True):
        got = engine.synchronize(handle)
        with cases.case(f"together {dtype} {op} [{count}]"):
            check_equal(dtype, got, want)
    return cases.done(2 * len(plan))


def large() -> int:
    """More than the fusion threshold, alone and beside small ones; 64-bit offsets are not needed, many chunks are."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()

    def values(count: int, rank: int) -> np.ndarray:
        return np.resize(np.roll(np.arange(1021, dtype=np.float32), rank * 7), count)

    count = (65 << 20) // 4 + 3
    large = values(count, rank)
    small = [engine.allreduce_async(values(n, rank), engine.Sum, f"small {n}") for n in (1, 100, 50_000)]
    handle = engine.allreduce_async_(large, engine.Sum, "large")
    small += [engine.allreduce_async(values(n, rank), engine.Sum, f"small {n}") for n in (2, 200, 60_000)]
    for n, each in zip((1, 100, 50_000, 2, 200, 60_000), small, strict=True):
        got = engine.synchronize(each)
        with cases.case(f"small {n}"):
            check_equal("float32", got, sum((values(n, other) for other in range(1, size)), values(n, 0)))
    engine.synchronize(handle)
    with cases.case("large"):
        period = np.zeros(1021, np.float32)
        for other in range(size):
            period = period + values(1021, other)
        assert np.array_equal(large, np.resize(period, count))
    return cases.done(7)


def numpy_layouts() -> int:
    """Scalars, dimensions, views that are not contiguous, not aligned or read-only, and what else lends memory."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()

    def both(name: str, make: Any, dtype: str = "float32") -> None:
        """`make(rank)` gives an array of one's own; it is reduced apart and in place."""
        want = expected(dtype, "Sum", [np.ascontiguousarray(make(other)) for other in range(size)])
        mine = make(rank)
        want = want.reshape(mine.shape)  # ascontiguousarray makes a scalar 1-d
        apart = engine.allreduce(mine, engine.Sum)
        unchanged = np.array_equal(mine, make(rank))
        target = make(rank)
        result = engine.allreduce_(target, engine.Sum)
        with cases.case(name):
            assert unchanged, "the input was written to"
            assert result is target
            check_equal(dtype, np.asarray(apart), want)
            check_equal(dtype, np.asarray(target), want)

    def plain(shape: Any, dtype: str = "float32", seed: int = 0) -> Any:
        return lambda rank: small_numbers(dtype, shape, rank, seed)

    both("0-d", plain(()))
    both("one element", plain((1,)))
    both("no elements", plain((0,)))
    both("no elements, three dimensions", plain((3, 0, 2)))
    both("three dimensions", plain((3, 5, 7)))
    both("twelve dimensions", plain((1, 2) * 6))
    both("fourteen dimensions", plain((1, 2) * 7))
    with cases.case("fourteen dimensions, gathered"):
        got = engine.allgather(np.full((1, 2) * 7, rank, np.int32))
        assert got.shape == (size, 2, *(1, 2) * 6)
        assert (got == np.arange(size).reshape(size, *(1,) * 13)).all()
    both("transposed", lambda rank: small_numbers("float32", (40, 30), rank).T)
    both("every third", lambda rank: small_numbers("float32", 3000, rank)[::3])
    both("reversed", lambda rank: small_numbers("float32", 1000, rank)[::-1])
    both("a column", lambda rank: small_numbers("float32", (100, 7), rank)[:, 3])
    both("columns", lambda rank: small_numbers("float32", (100, 7), rank)[:, 2:5])
    both("Fortran order", lambda rank: np.asfortranarray(small_numbers("float32", (6, 7, 8), rank)))
    both("channels last", lambda rank: small_numbers("float32", (2, 5, 6, 3), rank).transpose(0, 3, 1, 2))
    for dtype in ("float16", "float32", "float64", "int32", "int64"):
        for offset in (1, 2, 3):
            for count in (7, 3000, 90_000):

                def unaligned(rank: int, dtype: str = dtype, offset: int = offset, count: int = count) -> Any:
                    source = small_numbers(dtype, count, rank)
                    memory = np.zeros(source.nbytes + 64, np.uint8)
                    view = memory[offset : offset + source.nbytes].view(dtype)
                    view[:] = source
                    return view

                both(f"unaligned {dtype} [{count}] at {offset}", unaligned, dtype)
    read_only = small_numbers("float32", 10, rank)
    read_only.flags.writeable = False
    with cases.case("read-only, apart"):
        want = expected("float32", "Sum", [small_numbers("float32", 10, other) for other in range(size)])
        check_equal("float32", engine.allreduce(read_only, engine.Sum), want)
    with cases.case("read-only, in place"):
        refused(lambda: engine.allreduce_(read_only, engine.Sum), "read-only")
        refused(lambda: engine.broadcast_(read_only, 0), "read-only")
    with cases.case("a scalar of NumPy"):
        got = engine.allreduce(np.float32(rank + 1), engine.Sum)
        assert got.shape == () and got == size * (size + 1) / 2
        refused(lambda: engine.allreduce_(np.float32(1)), "read-only")
    with cases.case("a memoryview, an array of the standard library, a bytearray"):
        for make in (lambda: memoryview(arrays.array("f", [rank, 1])), lambda: arrays.array("f", [rank, 1])):
            mine = make()
            assert engine.allreduce(mine, engine.Sum).tolist() == [size * (size - 1) / 2, size]
            engine.allreduce_(mine, engine.Sum)
            assert list(mine) == [size * (size - 1) / 2, size]
        assert bytes(engine.allreduce(bytearray(b"\1\2"), engine.Sum)) == bytes([size, 2 * size])
    with cases.case("a subclass"):
        mine = np.ma.masked_array(np.ones(3, np.float32), mask=[0, 1, 0])
        got = engine.allreduce(mine, engine.Sum)
        assert type(got) is np.ndarray and got.tolist() == [size] * 3
    with cases.case("the longs of C"):
        for dtype in (np.longlong, np.int_, np.intc):
            assert engine.allreduce(np.ones(3, dtype), engine.Sum).tolist() == [size] * 3
    return cases.done()


class Lent:
    """Speaks DLPack and nothing else, as a library without a binding would."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def dlpack_and_torch() -> int:
    """Tensors of torch in every layout, and NumPy, torch and DLPack in one world."""
    import torch

    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()

    def both(name: str, make: Any) -> None:
        want = sum((make(other).double() for other in range(1, size)), make(0).double())
        mine = make(rank)
        apart = engine.allreduce(mine, engine.Sum)
        target = make(rank)
        strides = target.stride()
        result = engine.allreduce_(target, engine.Sum)
        with cases.case(name):
            assert torch.equal(mine, make(rank)), "the input was written to"
            assert result is target and target.stride() == strides
            assert apart.dtype == mine.dtype and not apart.requires_grad
            assert torch.equal(apart.double(), want)
            assert torch.equal(target.double(), want)

    def plain(*shape: int, dtype: str = "float32") -> Any:
        return lambda rank: torch.from_numpy(small_numbers(dtype, shape, rank).copy())

    image = plain(2, 8, 5, 6)
    both("0-d", plain())
    both("no elements", plain(0, 4))
    both("two dimensions", plain(30, 40))
    both("channels_last", lambda rank: image(rank).contiguous(memory_format=torch.channels_last))
    both("channels_last, one channel", lambda rank: image(rank)[:, :1].contiguous(memory_format=torch.channels_last))
    volume = plain(2, 3, 4, 5, 6)
    both("channels_last_3d", lambda rank: volume(rank).contiguous(memory_format=torch.channels_last_3d))
    both("large channels_last", lambda r: plain(4, 64, 50, 51)(r).contiguous(memory_format=torch.channels_last))
    both("transposed", lambda rank: plain(30, 40)(rank).t())
    both("a slice", lambda rank: plain(30, 40)(rank)[3:20])
    both("columns", lambda rank: plain(30, 40)(rank)[:, 3:20])
    both("expanded and copied", lambda rank: plain(30, 1)(rank).expand(30, 4).clone())
    both("offset by one", lambda rank: plain(3001)(rank)[1:])
    both("bfloat16", lambda rank: plain(3001)(rank).bfloat16())
    both("a parameter", lambda rank: torch.nn.Parameter(plain(5, 6)(rank)).data)
    both("negated lazily", lambda rank: torch.complex(plain(9)(rank), plain(9)(rank)).conj().imag)
    both("fourteen dimensions", lambda rank: plain(*(1, 2) * 6, 3, 1)(rank))
    moved_dtypes(cases, rank, size)
    with cases.case("requires_grad"):
        leaf = torch.ones(3, requires_grad=True)
        assert not engine.allreduce(leaf, engine.Sum).requires_grad
        assert engine.allreduce_(leaf, engine.Sum) is leaf and leaf.tolist() == [size] * 3
    with cases.case("layouts that differ between ranks are no mismatch"):
        mine = image(rank) if rank == 0 else image(rank).contiguous(memory_format=torch.channels_last)
        want = sum((image(other) for other in range(1, size)), image(0))
        assert torch.equal(engine.allreduce(mine, engine.Sum, "layouts"), want)
    with cases.case("libraries mixed in one operation"):
        for index in range(3):
            mine = np.full(5, rank, np.float32)
            for kind in range(3):
                choice = (rank + kind) % 3
                value = (mine.copy(), torch.from_numpy(mine.copy()), Lent(mine.copy()))[choice]
                got = engine.allreduce(value, engine.Sum, f"mixed {index} {kind}")
                assert np.asarray(got).tolist() == [size * (size - 1) / 2] * 5
                assert isinstance(got, torch.Tensor) == (choice == 1)
    with cases.case("DLPack in place"):
        mine = np.full(5, rank, np.float32)
        lent = Lent(mine)
        assert engine.allreduce_(lent, engine.Sum) is lent
        assert mine.tolist() == [size * (size - 1) / 2] * 5
    with cases.case("DLPack, gathered and broadcast"):
        got = engine.allgather(Lent(np.full((2, 3), rank, np.int32)))
        assert np.asarray(got).tolist() == [[other] * 3 for other in range(size) for _ in range(2)]
        assert np.asarray(engine.broadcast(Lent(np.full(3, rank, np.int64)), size - 1)).tolist() == [size - 1] * 3
    with cases.case("refusals"):
        refused(lambda: engine.allreduce(torch.ones(3, dtype=torch.complex64)), "dtype")
        refused(lambda: engine.allreduce(torch.ones(3).to(torch.float8_e5m2)), "float8_e5m2")
        refused(lambda: engine.allreduce(torch.ones(3).to_sparse()), "sparse")
        refused(lambda: engine.allreduce(torch.ones(3, device="meta")), "meta")
        unaligned = torch.frombuffer(bytearray(13), dtype=torch.float32, count=3, offset=1)
        refused(lambda: engine.allreduce(unaligned, engine.Sum), "copy it")
    with cases.case("a float environment that flushes denormals"):
        tiny = np.ones(200_000, np.uint32).view(np.float32)
        torch.set_flush_denormal(True)
        got = engine.allreduce(tiny[:2000], engine.Average)
        many = engine.allreduce(tiny, engine.Sum)
        flushed = float(torch.full((8,), 2e-38).mul(0.1).sum())
        torch.set_flush_denormal(False)
        assert got.view(np.uint32).tolist() == [1] * 2000
        assert (many.view(np.uint32) == size).all()
        assert flushed == 0.0, "the caller's environment was not restored"
    return cases.done()


MOVED = "complex32 complex64 complex128 uint32 uint64 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz"


def moved_dtypes(cases: Cases, rank: int, size: int) -> None:
    """What torch has and nothing reduces travels as bytes, also where it begins at no multiple of its size."""
    import torch

    for name in MOVED.split():
        dtype = getattr(torch, name, None)
        if dtype is None:  # an old torch
            continue

        def values(other: int, dtype: Any = dtype) -> torch.Tensor:
            count = 6 * size * dtype.itemsize
            anything = np.random.default_rng([other, dtype.itemsize]).integers(0, 256, count, np.uint8)
            return torch.from_numpy(anything).view(dtype).view(2 * size, 3)

        def same(got: torch.Tensor, want: torch.Tensor) -> None:
            assert got.dtype == want.dtype and got.shape == want.shape
            assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))

        with cases.case(f"{name} is moved"):
            mine, everyone = values(rank), [values(other) for other in range(size)]
            same(engine.broadcast(mine, size - 1), everyone[-1])
            target = mine.clone()
            same(engine.broadcast_(target, 0), everyone[0])
            same(engine.allgather(mine), torch.cat([each.view(torch.uint8) for each in everyone]).view(dtype))
            got = engine.alltoall(mine, [2] * size)[0]
            rows = [each[2 * rank : 2 * rank + 2].contiguous().view(torch.uint8) for each in everyone]
            same(got, torch.cat(rows).view(dtype))
            both = engine.grouped_allgather([torch.ones(1), mine.t()])[1]
            same(both, torch.cat([each.t().contiguous().view(torch.uint8) for each in everyone]).view(dtype))
    with cases.case("a complex view that begins anywhere, and one that is conjugated lazily"):
        memory = bytearray(np.arange(7, dtype=np.float32).tobytes())
        mine = torch.frombuffer(memory, dtype=torch.complex64, count=3, offset=4)
        assert engine.allgather(mine).tolist() == mine.tolist() * size
        assert engine.broadcast(mine.conj(), 0).tolist() == mine.conj().resolve_conj().tolist()
        lazy = torch.complex(torch.ones(2), torch.full((2,), float(rank))).conj()
        assert engine.broadcast_(lazy, size - 1).tolist() == [complex(1, 1 - size)] * 2
    if size > 1:
        with cases.case("moved dtypes that differ"):
            kinds = [torch.float8_e5m2, torch.float8_e4m3fn]
            mine = torch.zeros(3).to(kinds[rank % 2])
            refused(lambda: engine.broadcast(mine, 0, "float8"), "float8_e4m3fn[3]", engine.errors.MismatchError)
            pair = [torch.zeros(3).to(kinds[rank % 2]), torch.ones(2)]
            said = refused(lambda: engine.grouped_allgather(pair, "pair8"), "2 tensors", engine.errors.MismatchError)
            assert "other dtypes 1 elements in a row" in said, said


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
    """A mixture of everything; a digest of all results, which must not depend on any setting."""
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
    return digest.hexdigest()


INPUTS: dict[Any, Any] = {}


def equal_bits() -> dict[str, str]:
    """The digest by setting; each has a world of its own."""
    digests = {}
    for name, settings in SETTINGS.items():
        if settings.get("kernels", "plain") in setup.kernel_levels():
            engine.init(**settings)
            digests[name] = mixture()
            engine.shutdown()
    engine.init()
    digests["first"] = mixture()
    for name, knobs in {
        "small chunks": {"chunk_bytes": 4096},
        "large chunks": {"chunk_bytes": 1 << 20},
        "streaming": {"stores": "streaming"},
        "cached": {"stores": "cached"},
        "threshold": {"fusion_threshold": 70_000},
        "cycle": {"cycle_time_ms": 0},
    }.items():
        if engine.rank() == 0:
            engine.set_knobs(**knobs)
        digests[f"knob: {name}"] = mixture()
    return digests
