"""Groups, many tensors in one request: reduced, gathered, scattered, refused as a whole, and their cost."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

import engine

from ..on_ranks import on_ranks, spare
from .arrays import array, check_equal, check_same_on_all, numbers, refused, shares, small_numbers, tensor
from .operation_table import CELLS, DTYPES, OPS, Array, expected

pytestmark = on_ranks(1, 2, 3, spare(4))

ROWS: dict[str, Callable[[int, int], int]] = {  # by rank and number of the tensor
    "equal": lambda rank, k: 3,
    "uneven": lambda rank, k: (rank + k) % 4,
    "none on rank 0": lambda rank, k: rank,
    "none anywhere": lambda rank, k: 0,
    "very uneven": lambda rank, k: 40_000 if (rank + k) % 3 == 0 else 1,
}
RESTS: tuple[tuple[int, ...], ...] = ((), (1,), (3, 4), (0,), (33,))
KINDS = ("float32", "int8", "bool", "float64", "float16", "int64")


# ---- reduced


@pytest.mark.parametrize("count", [1, 2, 9, 3000])
def test_allreduce_of_some_tensors(count: int, rank: int, size: int) -> None:
    total = size * (size - 1) // 2
    shapes = [(k % 5, 3) if k % 3 else () if k % 2 else (700,) for k in range(count)]
    kinds = [("float32", "int64", "float16")[k % 7 % 3] for k in range(count)]
    mine = [np.full(shape, rank + k % 9, kind) for k, (shape, kind) in enumerate(zip(shapes, kinds, strict=True))]
    apart = engine.grouped_allreduce(mine, engine.Sum, f"apart {count}")
    inplace = [each.copy() for each in mine]
    handle = engine.grouped_allreduce_async_(inplace, engine.Sum, f"in place {count}")
    alone = engine.allreduce(np.full(3, rank), engine.Sum, f"alone {count}")
    result = engine.synchronize(handle)
    assert engine.poll(handle)
    assert all(a is b for a, b in zip(result, inplace, strict=True))
    assert (alone == total).all()
    for k, (shape, kind) in enumerate(zip(shapes, kinds, strict=True)):
        for got in (apart[k], inplace[k]):
            assert got.shape == shape and got.dtype == kind and (got == total + size * (k % 9)).all()
        assert (mine[k] == rank + k % 9).all()


def test_allreduce_of_tensors_that_overlap(rank: int, size: int) -> None:
    whole = np.full(6, rank + 1.0)
    for group in ([whole, whole], [whole[:4], np.ones(3), whole[2:]]):
        said = refused(lambda each=group: engine.grouped_allreduce_(each, engine.Sum), "share memory", ValueError)
        assert f"tensors 0 and {len(group) - 1}" in said
    assert (engine.grouped_allreduce([whole, whole], engine.Sum)[1] == size * (size + 1) / 2).all()


def test_allreduce_of_strided_tensors(rank: int, size: int) -> None:
    total = size * (size - 1) // 2
    rows = np.arange(12.0).reshape(3, 4) * rank
    result = engine.grouped_allreduce_([rows.T, rows[:, :0]], engine.Sum)
    assert (rows == np.arange(12.0).reshape(3, 4) * total).all() and result[1].shape == (3, 0)


def test_allreduce_of_large_tensors(rank: int, size: int) -> None:
    big = [np.full(1_000_003, rank, np.float32), np.full(17, 2 * rank, np.float32)]
    engine.grouped_allreduce_(big, engine.Max)
    assert (big[0] == size - 1).all() and (big[1] == 2 * size - 2).all()


def test_what_an_allreduce_refuses(rank: int, size: int) -> None:
    refused(lambda: engine.grouped_allreduce([]), "a group has 1 to", ValueError)
    untouched = np.full(2, rank)
    refused(lambda: engine.grouped_allreduce_([untouched, np.ones(2, np.complex64)], engine.Sum), "complex64")
    engine.barrier()
    assert (untouched == rank).all()
    if size > 1:
        pair = [np.ones(3), np.ones((2, 3) if rank else (3, 2))]
        said = refused(
            lambda: engine.grouped_allreduce_(pair, engine.Sum, "pair"), "a group of 2", engine.errors.MismatchError
        )
        assert "9 elements" in said and (pair[0] == 1).all()
    engine.barrier()


# ---- gathered


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("turn", range(2))
def test_allgather_of_rows(name: str, turn: int, rank: int, size: int) -> None:
    rows = ROWS[name]
    parts = [
        [small_numbers(kind, (rows(other + turn, k), *rest), other, k) for other in range(size)]
        for k, (kind, rest) in enumerate(zip(KINDS, itertools.cycle(RESTS), strict=False))
    ]
    handle = engine.grouped_allgather_async([each[rank] for each in parts], name)
    got = engine.synchronize(handle)
    for kind, each, result in zip(KINDS, parts, got, strict=True):
        check_equal(kind, result, np.concatenate(each))
        result[...] = 1  # The result belongs to the caller.
    assert handle.rows == [tuple(len(part) for part in each) for each in parts]
    assert engine.synchronize(handle) is got


def test_allgather_of_scalars_strided_without_bytes_in_one_request(rank: int, size: int) -> None:
    before = engine.counters()["tensors"]
    got = engine.grouped_allgather([np.int32(rank), np.arange(6.0).reshape(2, 3).T * rank, np.empty((rank, 0))])
    assert engine.counters()["tensors"] == before + 1
    assert got[0].tolist() == list(range(size))
    assert (got[1] == np.concatenate([np.arange(6.0).reshape(2, 3).T * other for other in range(size)])).all()
    assert got[2].shape == (size * (size - 1) // 2, 0)


def test_allgathers_waited_for_in_another_order_on_each_rank(rank: int, size: int) -> None:
    handles = {
        k: engine.grouped_allgather_async([np.full((k % 3 * rank, 2), k), np.full(k, rank, np.int8)])
        for k in range(300)
    }
    done = {k: engine.synchronize(handles[k]) for k in sorted(handles, key=lambda k: (k * 7 + rank * 13) % 300)}
    for k, (first, second) in done.items():
        assert first.shape == (k % 3 * size * (size - 1) // 2, 2) and (first == k).all()
        assert second.tolist() == [other for other in range(size) for _ in range(k)]


def test_allgather_of_3000_tensors(rank: int, size: int) -> None:
    many = [np.full((1 + k % 5, 2), rank + k, ("float32", "int64")[k % 2]) for k in range(3000)]
    got = engine.grouped_allgather(many, "many")
    for k, each in enumerate(got):
        assert each.dtype == many[k].dtype
        assert each[:, 1].tolist() == [other + k for other in range(size) for _ in range(1 + k % 5)]
    check_same_on_all(got[:100])


# ---- scattered


def members(op: str) -> list[tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each tensor of a group that is reduced by `op`."""
    kinds = [dtype for dtype in DTYPES if CELLS[dtype, op].reduce is not None]
    return [*itertools.product(kinds, ((0, 3), (1,), (4, 0), (5, 7), (131, 5))), ("float32", (200_001,))]


@cache
def scattered(op: str) -> tuple[list[Array], list[Array]]:
    """Parts of this rank from one reduce-scatter of all dtypes and shapes; and all rows, from one allreduce."""
    mine = [tensor(dtype, numbers(dtype, shape, engine.rank())) for dtype, shape in members(op)]
    got = engine.grouped_reducescatter(mine, getattr(engine, op), f"scatter {op}")
    whole = engine.grouped_allreduce(mine, getattr(engine, op), f"reduce {op}")
    kinds = [dtype for dtype, _ in members(op)]
    return list(map(array, kinds, got)), list(map(array, kinds, whole))


MEMBERS = [
    pytest.param(op, at, id=f"{op}-{dtype}-{shape}") for op in OPS for at, (dtype, shape) in enumerate(members(op))
]


@pytest.mark.sample(160)
@pytest.mark.parametrize(("op", "at"), MEMBERS)
def test_reducescatter_of_all_dtypes(op: str, at: int, rank: int, size: int) -> None:
    dtype, shape = members(op)[at]
    parts, rows = scattered(op)
    want = expected(dtype, op, [numbers(dtype, shape, other) for other in range(size)])
    start = shares(shape[0], size)
    check_equal(dtype, rows[at], want)
    check_equal(dtype, parts[at], want[start[rank] : start[rank + 1]])


def test_scaled_reducescatter(rank: int, size: int) -> None:
    inputs = [[small_numbers(dtype, (7, 3), other) for other in range(size)] for dtype in ("float32", "int64")]
    got = engine.grouped_reducescatter([each[rank] for each in inputs], engine.Average, None, 0.5, 3.0)
    start = shares(7, size)
    for dtype, each, part in zip(("float32", "int64"), inputs, got, strict=True):
        check_equal(dtype, part, expected(dtype, "Average", each, 0.5, 3.0)[start[rank] : start[rank + 1]])


def test_reducescatters_waited_for_backwards(rank: int, size: int) -> None:
    handles = [engine.grouped_reducescatter_async([np.full(k + 1, rank), np.full(3, k)], engine.Sum) for k in range(60)]
    done = [engine.synchronize(handle) for handle in reversed(handles)][::-1]
    for k, (first, _) in enumerate(done):
        assert first.tolist() == [size * (size - 1) // 2] * (shares(k + 1, size)[rank + 1] - shares(k + 1, size)[rank])


# ---- what ranks disagree on


def odd(size: int) -> bool:
    """Return whether this rank is the one that submits something else."""
    return size > 1 and engine.rank() == size - 1


CALLS: dict[str, Callable[[list[Any], str], Any]] = {
    "allreduce": lambda tensors, name: engine.grouped_allreduce_(tensors, engine.Sum, name),
    "allgather": lambda tensors, name: engine.grouped_allgather(tensors, name),
    "reducescatter": lambda tensors, name: engine.grouped_reducescatter(tensors, engine.Sum, name),
}
GROUPS: dict[str, Callable[[bool], list[Any]]] = {  # group of the odd rank, and of the others
    "the dtype of one": lambda odd: [np.ones(3), np.ones(4, np.int32 if odd else np.float32)],
    "a dtype more": lambda odd: [np.ones(3), *([np.ones(4, np.float32)] if odd else [])],
    "a tensor more": lambda odd: [np.ones(3), *([np.ones(3)] if odd else [])],
    "the order": lambda odd: [np.ones(3), np.ones((2, 2), np.int8)][:: -1 if odd else 1],
    "the shape of one": lambda odd: [np.ones(3), np.ones((3, 2) if odd else (3, 4))],
    "a dimension": lambda odd: [np.ones(3), np.ones((3, 4) if odd else (3, 2, 2))],
}


@pytest.mark.parametrize("what", GROUPS)
@pytest.mark.parametrize("kind", CALLS)
def test_a_disagreement_fails_the_whole_group_on_every_rank(kind: str, what: str, size: int) -> None:
    name, call = f"{kind}, {what}", CALLS[kind]
    right = [np.ones(2, np.float32), np.ones(2, np.int64)]
    for _ in range(2):  # In the second turn the name may be known to the coordinator, or not, since it failed.
        if size > 1:
            group = GROUPS[what](odd(size))
            said = refused(lambda group=group: call(group, name), "a group of", engine.errors.MismatchError)
            told = engine.allgather_object(said)
            assert f"rank {size - 1} sent {kind}" in said and ("rank 0" in said or "ranks 0" in said), said
            assert len(set(told)) == 1
            assert all((each == 1).all() for each in group), "half of the group was reduced"
    call(right, name)


PAIRS: dict[str, Callable[[list[Any], bool], Any]] = {
    "kind": lambda pair, odd: CALLS["allgather" if odd else "allreduce"](pair, "kind"),
    "alone": lambda pair, odd: (
        engine.allreduce(np.ones(3), engine.Sum, "alone") if odd else CALLS["allreduce"](pair, "alone")
    ),
    "op": lambda pair, odd: engine.grouped_reducescatter(pair, engine.Max if odd else engine.Sum, "op"),
    "scale": lambda pair, odd: engine.grouped_allreduce(pair, engine.Sum, "scale", 2.0 if odd else 1.0),
}


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("what", PAIRS)
def test_a_disagreement_on_what_is_done(what: str, size: int) -> None:
    pair = [np.ones(3), np.ones(2, np.int8)]
    refused(lambda: PAIRS[what](pair, odd(size)), "ranks disagree", engine.errors.MismatchError)


@pytest.mark.parametrize("kind", CALLS)
def test_what_is_refused_on_its_own_rank(kind: str) -> None:
    call = CALLS[kind]
    refused(lambda: call([], "none"), "a group has 1 to", ValueError)
    refused(lambda: call([np.ones(2), np.ones(2, ">f4")], "swapped"), ">f4")
    if kind != "allgather":
        refused(lambda: call([np.ones(2), np.ones(2, np.complex64)], "complex"), "complex64")
    refused(lambda: call([np.ones(2), 5], "number"), "no tensor")


def test_a_bool_among_others_has_no_average() -> None:
    refused(lambda: engine.grouped_reducescatter([np.ones(2), np.ones(2, bool)]), "bool tensor has no Average")
    refused(lambda: engine.grouped_reducescatter([np.ones(2), np.float32(1)]), "a scalar has none")


def test_a_name_twice(rank: int, size: int) -> None:
    first = engine.grouped_allgather_async([np.ones(3)], f"twice {rank}" if size > 1 else "twice")
    if size > 1:
        refused(
            lambda: engine.grouped_allgather_async([np.ones(3)], f"twice {rank}"),
            "submitted 'twice",
            engine.errors.DuplicateNameError,
        )
        engine.barrier("all were refused")  # Until then no rank completes another's operation.
        others = [engine.grouped_allgather_async([np.ones(3)], f"twice {k}") for k in range(size) if k != rank]
        assert all(len(engine.synchronize(other)[0]) == 3 * size for other in others)
    assert len(engine.synchronize(first)[0]) == 3 * size


# ---- what it costs


@pytest.mark.parametrize("kind", CALLS)
def test_a_thousand_small_tensors_are_one_entry_of_the_schedule(kind: str, rank: int) -> None:
    """A thousand single calls would be as many entries; benchmarks measure the time saved."""
    tensors = [np.full((4, 8), rank, ("float32", "float16")[k % 2]) for k in range(1000)]
    name = f"a thousand for {kind}"
    CALLS[kind](tensors, name)  # A new name is an entry, too.
    before = engine.counters()
    CALLS[kind](tensors, name)
    after = engine.counters()
    assert (after["entries"] - before["entries"], after["tensors"] - before["tensors"]) == (1, 1)
