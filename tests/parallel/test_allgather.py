"""Allgather: row counts that differ between ranks and calls, none on some ranks or on all, and large ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import engine

from ..on_ranks import on_ranks, spare
from .arrays import check_equal, small_numbers

pytestmark = on_ranks(1, 2, 3, spare(4))

ROWS: dict[str, Callable[[int, int, int], int]] = {  # by rank, size and call
    "equal": lambda rank, size, turn: 3,
    "uneven": lambda rank, size, turn: rank + 1,
    "none on rank 0": lambda rank, size, turn: rank,
    "some on rank 0 only": lambda rank, size, turn: 5 if rank == 0 else 0,
    "none anywhere": lambda rank, size, turn: 0,
    "other rows in every call": lambda rank, size, turn: (rank * 7 + turn * 3) % 5,
    "very uneven": lambda rank, size, turn: 30_000 if rank == size - 1 else 1,
}


@pytest.mark.sample(150)
@pytest.mark.parametrize("dtype", ["float32", "int8", "bool", "float64", "uint16", "uint64", "complex64"])
@pytest.mark.parametrize("rest", [(), (1,), (3, 4), (0,), (33,)], ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_rows(rows: str, rest: tuple[int, ...], dtype: str, rank: int, size: int) -> None:
    for turn in range(3):
        shapes = [(ROWS[rows](other, size, turn), *rest) for other in range(size)]
        parts = [small_numbers(dtype, shape, other, turn) for other, shape in enumerate(shapes)]
        got = engine.allgather(parts[rank], f"{rows} {rest} {dtype}")
        check_equal(dtype, got, np.concatenate(parts))
        got[...] = 1  # The result belongs to the caller.


def test_scalars(rank: int, size: int) -> None:
    assert engine.allgather(np.array(rank, np.int32)).tolist() == list(range(size))


def test_more_than_the_slots_hold(rank: int, size: int) -> None:
    parts = [small_numbers("float32", (100_000 * (other + 1), 11), other) for other in range(size)]
    check_equal("float32", engine.allgather(parts[rank]), np.concatenate(parts))


def test_rows_that_are_not_contiguous(rank: int, size: int) -> None:
    parts = [small_numbers("float32", (6, 5 + other), other) for other in range(size)]
    check_equal("float32", engine.allgather(parts[rank].T), np.concatenate([part.T for part in parts]))


def test_many_outstanding(rank: int, size: int) -> None:
    handles = [engine.allgather_async(np.full((k % 3 * rank, 2), k)) for k in range(400)]
    for k, handle in enumerate(handles):
        got = engine.synchronize(handle)
        assert got.shape == (k % 3 * size * (size - 1) // 2, 2) and (got == k).all()
        assert engine.synchronize(handle) is got
