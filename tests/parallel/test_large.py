"""Tensors of more than 2 GiB, whose sizes and offsets exceed 32 bits; `make large`, in 10 GiB of memory."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

import engine

from ..on_ranks import Parts, on_ranks
from .operation_table import Array

BEYOND = (1 << 31) + (1 << 28) + 12_345  # bytes
PIECE = 1 << 26  # elements compared at once: a mask of the whole array would need as much memory again


def with_marks(count: int, dtype: str, value: int) -> Array:
    """Array of `value`, plus one at places around the limits of 31 and 32 bits, and at both ends."""
    array = np.full(count, value, dtype)
    array[places(count, array.itemsize)] += 1
    return array


def places(count: int, itemsize: int) -> list[int]:
    bounds = [bound // itemsize + near for bound in (1 << 31, 1 << 32) for near in (-1, 0, 1)]
    return [0, *(place for place in bounds if 0 <= place < count - 1), count - 1]


def differing(array: Array, value: int) -> Iterator[int]:
    """Indices at which `array` is not `value`."""
    for start in range(0, len(array), PIECE):
        yield from (start + np.flatnonzero(array[start : start + PIECE] != value)).tolist()


def expect(array: Array, value: int, marks: list[int], mark: int) -> None:
    found = []
    for place in differing(array, value):
        found.append(place)
        assert len(found) <= len(marks), f"differs at {found}, expected {marks}"
    assert found == marks, f"differs at {found}, expected {marks}"
    assert (array[marks] == mark).all(), array[marks]


@pytest.mark.timeout(900)
@pytest.mark.skipif("LARGE_TENSORS" not in os.environ, reason="needs 10 GiB of memory: make large")
@on_ranks(2, env={"ENGINE_STALL_LIMIT": "60"}, job="large")
def test_tensors_of_more_than_2_gib(parts: Parts, rank: int, size: int) -> None:
    """Runs each operation once, and frees its tensors before the next."""
    for dtype in ("int8", "float32"):
        count = BEYOND // np.dtype(dtype).itemsize
        with parts.part(f"allreduce {dtype}"):
            tensor = with_marks(count, dtype, rank)
            engine.allreduce_(tensor, engine.Sum)
            total = size * (size - 1) // 2
            expect(tensor, total, places(count, tensor.itemsize), total + size)
        del tensor
    with parts.part("broadcast"):
        tensor = with_marks(BEYOND // 8, "float64", rank)
        engine.broadcast_(tensor, size - 1)
        expect(tensor, size - 1, places(len(tensor), 8), size)
    del tensor
    with parts.part("allgather"):
        rows = BEYOND // size + rank
        gathered = engine.allgather(np.full(rows, rank, np.int8))
        assert len(gathered) == sum(BEYOND // size + other for other in range(size))
        start = 0
        for other in range(size):
            expect(gathered[start : start + BEYOND // size + other], other, [], 0)
            start += BEYOND // size + other
    del gathered
    with parts.part("reducescatter"):
        kept = engine.reducescatter(with_marks(BEYOND, "int8", rank), engine.Max)
        start = sum(BEYOND // size + (other < BEYOND % size) for other in range(rank))
        marks = [place - start for place in places(BEYOND, 1) if start <= place < start + len(kept)]
        expect(kept, size - 1, marks, size)
    del kept
    with parts.part("alltoall"):  # all rows go to the last rank
        part = BEYOND // size + 1
        got, counts = engine.alltoall(np.full(part, rank, np.int8), [0] * (size - 1) + [part])
        assert counts.tolist() == [part if rank == size - 1 else 0] * size
        for other in range(size if rank == size - 1 else 0):
            expect(got[other * part : (other + 1) * part], other, [], 0)
