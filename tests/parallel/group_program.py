"""Groups that are gathered and scattered, what ranks disagree on, and what a group costs. Runs on every rank."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

import engine

from .on_ranks import Cases, array, check_equal, check_same_on_all, numbers, refused, small_numbers, tensor
from .operation_table import CELLS, DTYPES, OPS, expected
from .scatter_program import shares

Rows = Callable[[int, int], int]
ROWS: dict[str, Rows] = {
    "equal": lambda rank, k: 3,
    "uneven": lambda rank, k: (rank + k) % 4,
    "none on rank 0": lambda rank, k: rank,
    "none anywhere": lambda rank, k: 0,
    "very uneven": lambda rank, k: 40_000 if (rank + k) % 3 == 0 else 1,
}
RESTS: tuple[tuple[int, ...], ...] = ((), (1,), (3, 4), (0,), (33,))
KINDS = ("float32", "int8", "bool", "float64", "float16", "int64")


def gathers() -> int:
    """Each tensor as from its own allgather: rows that differ by rank and by tensor, all dtypes in one request."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()
    for name, rows in ROWS.items():
        for turn in range(2):
            parts = [
                [small_numbers(kind, (rows(other + turn, k), *rest), other, k) for other in range(size)]
                for k, (kind, rest) in enumerate(zip(KINDS, itertools.cycle(RESTS), strict=False))
            ]
            handle = engine.grouped_allgather_async([each[rank] for each in parts], name)
            got = engine.synchronize(handle)
            with cases.case(f"{name}, {turn}"):
                for kind, each, result in zip(KINDS, parts, got, strict=True):
                    check_equal(kind, result, np.concatenate(each))
                    result[...] = 1  # It is the caller's own.
                assert handle.rows == [tuple(len(part) for part in each) for each in parts]
                assert engine.synchronize(handle) is got
    before = engine.counters()["tensors"]
    got = engine.grouped_allgather([np.int32(rank), np.arange(6.0).reshape(2, 3).T * rank, np.empty((rank, 0))])
    with cases.case("scalars, strided, without bytes, in one request"):
        assert engine.counters()["tensors"] == before + 1
        assert got[0].tolist() == list(range(size))
        assert (got[1] == np.concatenate([np.arange(6.0).reshape(2, 3).T * other for other in range(size)])).all()
        assert got[2].shape == (size * (size - 1) // 2, 0)
    handles = {
        k: engine.grouped_allgather_async([np.full((k % 3 * rank, 2), k), np.full(k, rank, np.int8)])
        for k in range(300)
    }
    done = {k: engine.synchronize(handles[k]) for k in sorted(handles, key=lambda k: (k * 7 + rank * 13) % 300)}
    with cases.case("waited for in another order on each rank"):
        for k, (first, second) in done.items():
            assert first.shape == (k % 3 * size * (size - 1) // 2, 2) and (first == k).all()
            assert second.tolist() == [other for other in range(size) for _ in range(k)]
    many = [np.full((1 + k % 5, 2), rank + k, ("float32", "int64")[k % 2]) for k in range(3000)]
    got = engine.grouped_allgather(many, "many")
    with cases.case("3000 tensors"):
        for k, each in enumerate(got):
            assert each.dtype == many[k].dtype
            assert each[:, 1].tolist() == [other + k for other in range(size) for _ in range(1 + k % 5)]
    check_same_on_all(got[:100])
    return cases.done(2 * len(ROWS) + 3)


def scatters() -> int:
    """Each tensor as from its own reduce-scatter, bit by bit; all dtypes in one request."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()
    shapes = ((0, 3), (1,), (4, 0), (5, 7), (131, 5))
    for op in OPS:
        kinds = [dtype for dtype in DTYPES if CELLS[dtype, op].reduce is not None]
        members = [*itertools.product(kinds, shapes), ("float32", (200_001,))]
        inputs = [[numbers(dtype, shape, other) for other in range(size)] for dtype, shape in members]
        mine = [tensor(dtype, each[rank]) for (dtype, _), each in zip(members, inputs, strict=True)]
        got = engine.grouped_reducescatter(mine, getattr(engine, op), f"scatter {op}")
        whole = engine.grouped_allreduce(mine, getattr(engine, op), f"reduce {op}")
        for (dtype, shape), each, part, all_rows in zip(members, inputs, got, whole, strict=True):
            start = shares(shape[0], size)
            with cases.case(f"{op} {dtype} {shape}"):
                want = expected(dtype, op, each)
                check_equal(dtype, array(dtype, all_rows), want)
                check_equal(dtype, array(dtype, part), want[start[rank] : start[rank + 1]])
    inputs = [[small_numbers(dtype, (7, 3), other) for other in range(size)] for dtype in ("float32", "int64")]
    got = engine.grouped_reducescatter([each[rank] for each in inputs], engine.Average, None, 0.5, 3.0)
    with cases.case("scaled"):
        start = shares(7, size)
        for dtype, each, part in zip(("float32", "int64"), inputs, got, strict=True):
            check_equal(dtype, part, expected(dtype, "Average", each, 0.5, 3.0)[start[rank] : start[rank + 1]])
    handles = [engine.grouped_reducescatter_async([np.full(k + 1, rank), np.full(3, k)], engine.Sum) for k in range(60)]
    with cases.case("many outstanding, waited for backwards"):
        done = [engine.synchronize(handle) for handle in reversed(handles)][::-1]
        for k, (first, _) in enumerate(done):
            assert first.tolist() == [size * (size - 1) // 2] * (
                shares(k + 1, size)[rank + 1] - shares(k + 1, size)[rank]
            )
    return cases.done()


def disagreements() -> int:
    """A group in which ranks disagree on anything fails whole, on every rank, and the engine goes on."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()
    odd = rank == size - 1 and size > 1
    calls: dict[str, Callable[[list[Any], str], Any]] = {
        "allreduce": lambda tensors, name: engine.grouped_allreduce_(tensors, engine.Sum, name),
        "allgather": engine.grouped_allgather,
        "reducescatter": lambda tensors, name: engine.grouped_reducescatter(tensors, engine.Sum, name),
    }
    groups: dict[str, list[Any]] = {
        "the dtype of one": [np.ones(3), np.ones(4, np.int32 if odd else np.float32)],
        "a dtype more": [np.ones(3), *([np.ones(4, np.float32)] if odd else [])],
        "a tensor more": [np.ones(3), *([np.ones(3)] if odd else [])],
        "the order": [np.ones(3), np.ones((2, 2), np.int8)][:: -1 if odd else 1],
        "the shape of one": [np.ones(3), np.ones((3, 2) if odd else (3, 4))],
        "a dimension": [np.ones(3), np.ones((3, 4) if odd else (3, 2, 2))],
    }
    for kind, call in calls.items():
        for what, group in groups.items():
            name = f"{kind}, {what}"
            for _ in range(2):  # The second time the name is known to the coordinator, or is not: it failed.
                if size > 1:
                    said = refused(lambda c=call, g=group, n=name: c(g, n), "a group of", engine.errors.MismatchError)
                    told = engine.allgather_object(said)
                    with cases.case(name):
                        assert f"rank {size - 1} sent {kind}" in said and ("rank 0" in said or "ranks 0" in said), said
                        assert len(set(told)) == 1
                        assert all((each == 1).all() for each in group), "half of the group was reduced"
            right = [np.ones(2, np.float32), np.ones(2, np.int64)]
            with cases.case(f"{name}, then right"):
                call(right, name)
    if size > 1:
        pair = [np.ones(3), np.ones(2, np.int8)]
        for name, mine in {
            "kind": lambda: calls["allgather" if odd else "allreduce"](pair, "kind"),
            "alone": lambda: (
                engine.allreduce(np.ones(3), engine.Sum, "alone") if odd else calls["allreduce"](pair, "alone")
            ),
            "op": lambda: engine.grouped_reducescatter(pair, engine.Max if odd else engine.Sum, "op"),
            "scale": lambda: engine.grouped_allreduce(pair, engine.Sum, "scale", 2.0 if odd else 1.0),
        }.items():
            with cases.case(name):
                refused(mine, "ranks disagree", engine.errors.MismatchError)
    for name, call in calls.items():
        with cases.case(f"{name}: refused on its own rank"):
            refused(lambda c=call: c([], "none"), "a group has 1 to", ValueError)
            refused(lambda c=call: c([np.ones(2), np.ones(2, ">f4")], "swapped"), ">f4")
            if name != "allgather":
                refused(lambda c=call: c([np.ones(2), np.ones(2, np.complex64)], "complex"), "complex64")
            refused(lambda c=call: c([np.ones(2), 5], "number"), "no tensor")
    with cases.case("a bool among others has no average"):
        refused(lambda: engine.grouped_reducescatter([np.ones(2), np.ones(2, bool)]), "bool tensor has no Average")
        refused(lambda: engine.grouped_reducescatter([np.ones(2), np.float32(1)]), "a scalar has none")
    with cases.case("a name twice"):
        first = engine.grouped_allgather_async([np.ones(3)], f"twice {rank}" if size > 1 else "twice")
        if size > 1:
            refused(
                lambda: engine.grouped_allgather_async([np.ones(3)], f"twice {rank}"),
                "submitted 'twice",
                engine.errors.DuplicateNameError,
            )
            engine.barrier("all were refused")  # Until then nobody completes what another has brought.
            others = [engine.grouped_allgather_async([np.ones(3)], f"twice {k}") for k in range(size) if k != rank]
            assert all(len(engine.synchronize(other)[0]) == 3 * size for other in others)
        assert len(engine.synchronize(first)[0]) == 3 * size
    engine.barrier()
    return cases.done()


def cost() -> int:
    """A thousand small tensors in a group cost much less than one after the other, whatever is done with them."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()
    tensors = [np.full((4, 8), rank, ("float32", "float16")[k % 2]) for k in range(1000)]
    few = tensors[:40]
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "allreduce": (
            lambda: engine.grouped_allreduce_(tensors, engine.Max, "reduced"),
            lambda: [engine.allreduce_(each, engine.Max, f"reduced {k}") for k, each in enumerate(few)],
        ),
        "allgather": (
            lambda: engine.grouped_allgather(tensors, "gathered"),
            lambda: [engine.allgather(each, f"gathered {k}") for k, each in enumerate(few)],
        ),
        "reducescatter": (
            lambda: engine.grouped_reducescatter(tensors, engine.Max, "scattered"),
            lambda: [engine.reducescatter(each, engine.Max, f"scattered {k}") for k, each in enumerate(few)],
        ),
    }
    for name, calls in pairs.items():
        seconds: tuple[list[float], list[float]] = [], []
        for turn in range(12):
            for call, taken in zip(calls, seconds, strict=True):
                engine.barrier()
                start = time.perf_counter()
                call()
                if turn >= 3:  # Names are known by then.
                    taken.append(time.perf_counter() - start)
        with cases.case(name):
            ratio = median(seconds[0]) / (median(seconds[1]) * len(tensors) / len(few))
            assert size == 1 or ratio < 0.5, f"{ratio:.2f} of what as many calls take"
    return cases.done(3)
