"""Tensors in the shared segment: alone, fused, beside private ones, and private on some ranks."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest

import engine
from engine.session import runtime

from ..on_ranks import on_ranks, spare
from .arrays import check_equal, check_same_on_all, numbers, refused
from .operation_table import Array, expected

pytestmark = on_ranks(1, 2, 3, spare(4))

COUNTS = (1, 7, 64, 1000, 33_333, 900_001)
KINDS = (
    ("float32", "Sum", 1.0, 1.0),
    ("float16", "Average", 0.3, 1.7),
    ("int8", "Sum", 1.0, 1.0),
    ("float64", "Max", 1.0, 1.0),
    ("bool", "Min", 1.0, 1.0),
)
each_kind = pytest.mark.parametrize(("dtype", "op", "pre", "post"), KINDS)
twice = pytest.mark.parametrize("turn", range(2))


@cache
def region(dtype: str) -> list[Array]:
    """Adjacent tensors in the shared segment."""
    memory = runtime.current_engine().share(sum(COUNTS) * np.dtype(dtype).itemsize + 64)
    assert not any(memory[:1000]), "shared memory begins zeroed"
    whole = np.frombuffer(memory, dtype, sum(COUNTS))
    return [whole[a:b] for a, b in itertools.pairwise(np.cumsum([0, *COUNTS]))]


@cache
def brought(dtype: str, rank: int) -> list[Array]:
    """Read-only input of a rank for each tensor."""
    return [numbers(dtype, count, rank, count) for count in COUNTS]


def filled(dtype: str, rank: int) -> list[Array]:
    """Tensors of the region, filled with this rank's input."""
    for view, values in zip(region(dtype), brought(dtype, rank), strict=True):
        view[:] = values
    return region(dtype)


@cache
def results(dtype: str, op: str, pre: float, post: float, size: int) -> list[Array]:
    inputs = [brought(dtype, rank) for rank in range(size)]
    return [expected(dtype, op, [each[k] for each in inputs], pre, post) for k in range(len(COUNTS))]


@twice
@each_kind
def test_alone(dtype: str, op: str, pre: float, post: float, turn: int, rank: int, size: int) -> None:
    views = filled(dtype, rank)
    for k, view in enumerate(views):
        engine.allreduce_(view, getattr(engine, op), f"{dtype} {k}", pre, post)
    rows = [
        row for row in runtime.current_engine().history() if row["type"] == "batch" and row["name"].startswith(dtype)
    ]
    assert {row["algorithm"] for row in rows[-len(views) :]} == {"shared"}
    for view, values in zip(views, results(dtype, op, pre, post, size), strict=True):
        check_equal(dtype, view, values)


@twice
@each_kind
def test_fused_beside_private_ones(
    dtype: str, op: str, pre: float, post: float, turn: int, rank: int, size: int
) -> None:
    views, private = filled(dtype, rank), [values.copy() for values in brought(dtype, rank)]
    handles = []
    for k, view in enumerate(views):
        handles.append(engine.allreduce_async_(view, getattr(engine, op), f"{dtype} {k}", pre, post))
        handles.append(engine.allreduce_async_(private[k], getattr(engine, op), f"{dtype} {k}p", pre, post))
    for handle in handles:
        engine.synchronize(handle)
    for got in (views, private):
        for view, values in zip(got, results(dtype, op, pre, post, size), strict=True):
            check_equal(dtype, view, values)


@twice
@each_kind
def test_shared_on_some_ranks_only(
    dtype: str, op: str, pre: float, post: float, turn: int, rank: int, size: int
) -> None:
    views, private = filled(dtype, rank), [values.copy() for values in brought(dtype, rank)]
    mixed = [view if (rank + k + turn) % 2 else private[k] for k, view in enumerate(views)]
    handles = [
        engine.allreduce_async_(tensor, getattr(engine, op), f"{dtype} {k}", pre, post)
        for k, tensor in enumerate(mixed)
    ]
    for handle in handles:
        engine.synchronize(handle)
    if size > 1:
        check_same_on_all(mixed)
    for tensor, values in zip(mixed, results(dtype, op, pre, post, size), strict=True):
        check_equal(dtype, tensor, values)


@twice
@each_kind
def test_out_of_place(dtype: str, op: str, pre: float, post: float, turn: int, rank: int, size: int) -> None:
    views = filled(dtype, rank)
    apart = [engine.allreduce(view, getattr(engine, op), f"{dtype} {k}", pre, post) for k, view in enumerate(views)]
    want = results(dtype, op, pre, post, size)
    for got, values, view, mine in zip(apart, want, views, brought(dtype, rank), strict=True):
        check_equal(dtype, got, values)
        assert view.tobytes() == mine.tobytes()


def test_at_other_places_on_other_ranks(rank: int, size: int) -> None:
    whole = np.frombuffer(runtime.current_engine().share(8000), np.float32)
    view = whole[rank * 100 : rank * 100 + 100]
    view[:] = rank
    engine.allreduce_(view, engine.Sum, "places")
    assert (view == size * (size - 1) / 2).all()
    assert (whole[size * 100 :] == 0).all()


def test_broadcast_and_allgather_of_a_shared_tensor(rank: int, size: int) -> None:
    whole = np.frombuffer(runtime.current_engine().share(8000), np.float32)
    whole[:] = rank
    engine.broadcast_(whole[:500], size - 1)
    assert (whole[:500] == size - 1).all() and (whole[500:] == rank).all()
    assert engine.allgather(whole[:2] * 0 + rank).tolist() == [r for r in range(size) for _ in range(2)]


def test_sizes_that_differ_and_none(rank: int, size: int) -> None:
    if size > 1:
        refused(lambda: runtime.current_engine().share(4096 * (rank + 1)), "bytes", engine.errors.MismatchError)
    refused(lambda: runtime.current_engine().share(0), "at least one", ValueError)
    again = np.frombuffer(runtime.current_engine().share(4000), np.float32)  # after that
    again[:] = rank + 1
    engine.allreduce_(again, engine.Sum, "again")
    assert (again == size * (size + 1) / 2).all()
