"""All-to-all: splits that differ between ranks and calls, none on some ranks or all, empty rows, large ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import engine

from ..on_ranks import on_ranks, spare
from .arrays import check_equal, refused, small_numbers
from .operation_table import BOOL

pytestmark = on_ranks(1, 2, 3, spare(4))

RESTS = ((), (1,), (3, 4), (0,), (33,), (70_001,))
SPLITS: dict[str, Callable[[int], Any]] = {  # rows from each rank to each, by the number of ranks
    "equal": lambda size: np.full((size, size), 2),
    "uneven": lambda size: np.add.outer(np.arange(size), np.arange(size)) % 4,
    "none": lambda size: np.zeros((size, size), int),
    "all to the last": lambda size: np.eye(size, dtype=int)[[size - 1] * size] * 3,
    "only rank 0 sends": lambda size: np.eye(size, dtype=int)[0][:, None] * np.arange(1, size + 1),
}


@pytest.mark.parametrize("dtype", ["float32", "int8", "float64", *BOOL])
@pytest.mark.parametrize("rest", RESTS, ids=str)
@pytest.mark.parametrize("split", SPLITS)
def test_splits(split: str, rest: tuple[int, ...], dtype: str, rank: int, size: int) -> None:
    splits, number = SPLITS[split](size), RESTS.index(rest)
    sent = [small_numbers(dtype, (int(splits[other].sum()), *rest), other, number) for other in range(size)]
    got, counts = engine.alltoall(sent[rank], splits[rank])
    bounds = np.cumsum(np.pad(splits, ((0, 0), (1, 0))), axis=1)
    want = [sent[other][bounds[other, rank] : bounds[other, rank + 1]] for other in range(size)]
    check_equal(dtype, got, np.concatenate(want))
    assert counts.dtype == np.int32 and counts.tolist() == splits[:, rank].tolist()


def test_without_splits(rank: int, size: int) -> None:
    got = engine.alltoall(np.arange(size * 2) + 100 * rank)
    assert got.tolist() == [100 * other + 2 * rank + k for other in range(size) for k in range(2)]


def test_rows_left_over_are_not_sent(rank: int, size: int) -> None:
    got, counts = engine.alltoall(np.arange(size + 3.0), [1] * size)
    assert got.tolist() == [float(rank)] * size and counts.tolist() == [1] * size


def test_rows_that_are_not_contiguous(rank: int, size: int) -> None:
    got, _ = engine.alltoall((np.arange(2.0 * size).reshape(2, size) + 10 * rank).T, [1] * size)
    assert got.tolist() == [[10 * other + rank, 10 * other + size + rank] for other in range(size)]


def test_many_outstanding_by_other_rows_in_every_call(rank: int, size: int) -> None:
    handles = [engine.alltoall_async(np.full((size * (k % 5), 2), rank), name=f"{k}") for k in range(200)]
    for k, handle in enumerate(handles):
        got = engine.synchronize(handle)
        assert got[:, 0].tolist() == [other for other in range(size) for _ in range(k % 5)]


def test_refusals(rank: int, size: int) -> None:
    refused(lambda: engine.alltoall(np.ones(size), [1] * (size + 1)), f"each of {size} ranks", ValueError)
    refused(lambda: engine.alltoall(np.ones(size), [2] * size), "cannot be taken", ValueError)
    refused(lambda: engine.alltoall(np.ones(size), [-1] + [1] * (size - 1)), "cannot be taken", ValueError)
    for kind in (ValueError, TypeError):  # Horovod's tests want the former
        refused(lambda: engine.alltoall(np.ones(size), [1.5] * size), "splits holds whole numbers", kind)
        refused(lambda: engine.alltoall(np.ones(size), np.ones(size)), "splits holds whole numbers", kind)
    refused(lambda: engine.alltoall(5, [0] * size), "no tensor")
    if size > 1:
        refused(lambda: engine.alltoall(np.ones(size + 1)), "divided equally", ValueError)
        refused(
            lambda: engine.alltoall(np.ones((size, 2 + rank % 2)), name="shape"),
            "alltoall float64[*, 2]",
            engine.errors.MismatchError,
        )
