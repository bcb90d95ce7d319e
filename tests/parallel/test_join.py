"""Join: ranks run out of data one by one, and results are those of the remaining ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

import engine

from ..on_ranks import Parts, on_ranks, spare
from ..waiting import be_late
from .arrays import check_equal, refused, small_numbers
from .halves import KINDS, MARKERS, compressed
from .operation_table import Array, expected

ERROR = engine.errors.EngineError
pytestmark = on_ranks(1, 2, 3, spare(4))


@pytest.mark.sample(3)
@pytest.mark.parametrize("turn", range(3))
def test_ranks_with_less_and_less_to_do(turn: int, parts: Parts, rank: int, size: int) -> None:
    for step in range(2 + (rank + turn) % size):
        left = [other for other in range(size) if 2 + (other + turn) % size > step]
        one_step(parts, f"step {step}", left, new=f".{turn}" if step % 2 else "")
    last = engine.join()
    with parts.part("the last"):
        assert 2 + (last + turn) % size == size + 1
    engine.check_consistency({"last": last})
    got = engine.allreduce(np.full(100, rank + 1.0), engine.Sum)
    with parts.part("afterwards"):
        assert (got == size * (size + 1) / 2).all()


def test_nothing_but_join(parts: Parts, rank: int, size: int) -> None:
    for turn in range(30):
        if (rank + turn) % size == 0:
            be_late(0.001)
        last = engine.join()
        with parts.part(turn):
            assert 0 <= last < size


@on_ranks(2, 3, 4)
def test_what_a_rank_that_has_joined_cannot_be_in(parts: Parts, rank: int) -> None:
    if rank != 0:
        with parts.part("objects"):
            refused(lambda: engine.allgather_object(1), "rank 0 has joined", ERROR)
        with parts.part("sets"):
            refused(lambda: engine.add_process_set([0]), "rank 0 has joined", ERROR)
    else:
        with parts.part("its own join"):
            assert engine.join() != 0
    if rank != 0:
        engine.join()


@on_ranks(3, 4)
def test_in_a_set_of_which_one_rank_has_joined(parts: Parts, rank: int, size: int) -> None:
    part = engine.add_process_set([0, size - 1])
    if part.included():
        if rank == 0:
            got = engine.allreduce(np.ones(5), engine.Sum, process_set=part)
            with parts.part("allreduce"):
                assert (got == 1).all()
        last = engine.join(part)
        with parts.part("the last"):
            assert last in (0, size - 1)
        for stays in (0, size - 1):
            if rank == stays:
                group = [np.arange(4.0), np.arange(6, dtype=np.int32)]
                got = engine.grouped_reducescatter(group, engine.Sum, process_set=part)
                whole = engine.grouped_allreduce([group[0], np.arange(3.0)], engine.Adasum, process_set=part)
                with parts.part(f"groups on rank {rank}"):
                    for share, each in zip(got, group, strict=True):
                        assert share.tolist() == np.array_split(each, 2)[part.rank()].tolist()
                    assert whole[0].tolist() == [0, 1, 2, 3] and whole[1].tolist() == [0, 1, 2]
            engine.join(part)
    else:
        with parts.part("without us"):
            assert part.rank() is None
    engine.barrier("all are through with the set")
    engine.remove_process_set(part)


def compressed_step(check: Callable[[str, Array, Array], None], left: Sequence[int], new: str) -> None:
    """Check compressed operations of the ranks that are left: tensors, a group of several dtypes, shares of rows."""
    me, size = engine.rank(), engine.size()
    for dtype, wire in KINDS:
        marker = MARKERS[wire]
        for op, count in (("Sum", 37), ("Sum", 90_001), ("Min", 37), ("Max", 90_001), ("Product", 300)):
            brought = [small_numbers(dtype, (count,), rank) for rank in left]
            name = f"{dtype}.{wire}.{op}.{count}{new}"
            got = engine.allreduce(small_numbers(dtype, (count,), me), getattr(engine, op), name, compression=marker)
            check(name, got, compressed(dtype, wire, op, brought))
        rows = [small_numbers(dtype, (2 * size + 1, 700), rank) for rank in left]
        mine = small_numbers(dtype, (2 * size + 1, 700), me)
        share = engine.reducescatter(mine, engine.Sum, f"r.{dtype}.{wire}{new}", compression=marker)
        check(f"reducescatter {dtype} as {wire}", share, np.array_split(compressed(dtype, wire, "Sum", rows), size)[me])
    dtypes = ("float64", "float32", "int64", "float16", "float32", "float64", "bool")
    for counts in ((3, 5, 7, 9, 11, 13, 15), (9_001, 70_001, 303, 20_003, 5, 40_001, 17)):
        groups = [
            [small_numbers(each, (count,), rank) for each, count in zip(dtypes, counts, strict=True)] for rank in left
        ]
        mine = [small_numbers(each, (count,), me) for each, count in zip(dtypes, counts, strict=True)]
        totals = engine.grouped_allreduce(mine, engine.Sum, f"halves {counts[0]}{new}", compression=MARKERS["bfloat16"])
        for k, dtype in enumerate(dtypes):
            brought = [each[k] for each in groups]
            wide = dtype in ("float32", "float64")
            want = compressed(dtype, "bfloat16", "Sum", brought) if wide else expected(dtype, "Sum", brought)
            check(f"{dtype}, {k} of a compressed group", totals[k], want)


def scattered_groups(parts: Parts, label: str, left: Sequence[int], new: str) -> None:
    """Check grouped reduce-scatters of the ranks that are left: no rows, few rows, empty rows, several chunks."""
    me, size = engine.rank(), engine.size()
    shapes = ((0, 3), (1,), (4, 0), (5, 7), (2 * size + 1, 20_001), (33,))
    for kinds, op in ((("float32", "int64", "float16"), "Sum"), (("int8", "float64"), "Min")):
        dtypes = [kinds[k % len(kinds)] for k in range(len(shapes))]
        brought = [
            [small_numbers(dtype, shape, rank, k) for k, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=True))]
            for rank in left
        ]
        got = engine.grouped_reducescatter(brought[left.index(me)], getattr(engine, op), f"rows {op}{new}")
        with parts.part(f"{label}: grouped reducescatter {op}"):
            for k, (dtype, share) in enumerate(zip(dtypes, got, strict=True)):
                whole = expected(dtype, op, [each[k] for each in brought])
                check_equal(dtype, share, np.array_split(whole, size)[me])
    many = [np.full(k % 7, float(me + k)) for k in range(2000)]
    got = engine.grouped_reducescatter(many, engine.Sum, f"many rows{new}")
    with parts.part(f"{label}: 2000 tensors"):
        for k, share in enumerate(got):
            assert share.tolist() == [sum(left) + len(left) * k] * len(np.array_split(range(k % 7), size)[me])


def one_step(parts: Parts, label: str, left: Sequence[int], new: str) -> None:
    """Run one of each operation on the ranks that are left; some names are new while others have joined."""
    me, size = engine.rank(), engine.size()

    def check(what: str, got: Array, want: Array) -> None:
        with parts.part(f"{label}: {what}"):
            np.testing.assert_array_equal(got, want)

    for shape in ((7,), (90_000,)):
        brought = [small_numbers("float32", shape, rank) for rank in left]
        total = expected("float32", "Sum", brought)
        mine = small_numbers("float32", shape, me)
        check(f"sum {shape}", engine.allreduce(mine, engine.Sum, f"s{shape}{new}"), total)
        check(f"average {shape}", engine.allreduce(mine), (total / np.float32(size)).astype(np.float32))
        for op in ("Min", "Max", "Product"):
            got = engine.allreduce(mine, getattr(engine, op), f"{op}{shape}{new}")
            check(f"{op} {shape}", got, expected("float32", op, brought))
    check("scaled", engine.allreduce(np.full(3, 2.0), engine.Min, None, -1.0, 0.5), np.full(3, -1.0))
    rows = engine.allgather(np.full((me + 1, 2), me), f"g{new}")
    check("allgather", rows[:, 0], np.array([rank for rank in left for _ in range(rank + 1)]))
    got, counts = engine.alltoall(np.arange(size) + 10 * me, [1] * size, f"a{new}")
    check("alltoall", got, np.array([10 * rank + me for rank in left]))
    check("alltoall's counts", counts, np.array([int(rank in left) for rank in range(size)]))
    share = engine.reducescatter(np.arange(2.0 * size + 1), engine.Max, f"r{new}")
    check("reducescatter", share, np.array_split(np.arange(2.0 * size + 1), size)[me])
    group = engine.grouped_allreduce([np.ones(3), np.ones((2, 5))], engine.Sum, f"group{new}")
    check("group", group[1], np.full((2, 5), float(len(left))))
    check("broadcast", engine.broadcast(np.full(4, me), left[-1], f"b{new}"), np.full(4, left[-1]))
    scattered_groups(parts, label, left, new)
    compressed_step(check, left, new)
    gone = next((rank for rank in range(size) if rank not in left), None)
    if gone is not None:
        with parts.part(f"{label}: a root that has joined"):
            refused(
                lambda: engine.broadcast(np.ones(2), gone),
                f"rank {gone} is the root and has joined",
                engine.errors.MismatchError,
            )
        with parts.part(f"{label}: a mismatch among those that are left"):
            if len(left) > 1:
                refused(
                    lambda: engine.allreduce(np.ones(1 + left.index(me)), engine.Sum, f"m{new}"),
                    f"rank {left[0]} sent",
                    engine.errors.MismatchError,
                )
    engine.barrier()
