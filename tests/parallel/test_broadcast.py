"""Broadcast from every root, in and out of place, alone and fused, of every dtype."""

from __future__ import annotations

import numpy as np
import pytest

import engine

from ..on_ranks import on_ranks, per_size, spare
from .arrays import numbers
from .operation_table import DTYPES, MOVED

pytestmark = on_ranks(1, 2, 3, spare(4))

PLAIN = [*(dtype for dtype in DTYPES if dtype != "bfloat16"), *MOVED]


@per_size("root", range)
@pytest.mark.parametrize("count", [0, 1, 7, 40_000, 1_200_001])
def test_in_and_out_of_place(root: int, count: int, rank: int) -> None:
    want = numbers("float32", count, root)
    mine = numbers("float32", count, rank)
    apart = engine.broadcast(mine, root)
    inplace = mine.copy()
    result = engine.broadcast_(inplace, root)
    assert result is inplace
    assert mine.tobytes() == numbers("float32", count, rank).tobytes(), "the input was written to"
    assert apart.tobytes() == inplace.tobytes() == want.tobytes()


@per_size("root", range)
def test_fused(root: int, rank: int) -> None:
    handles = [
        engine.broadcast_async_(numbers(dtype, (3, 50 + k), rank, k), root, f"{root} {dtype} {k}")
        for dtype in PLAIN
        for k in range(20)
    ]
    for handle, (dtype, k) in zip(handles, ((dtype, k) for dtype in PLAIN for k in range(20)), strict=True):
        assert engine.synchronize(handle).tobytes() == numbers(dtype, (3, 50 + k), root, k).tobytes()


def test_all_roots_at_once(rank: int, size: int) -> None:
    handles = [engine.broadcast_async(np.full(9, rank), k % size, f"all {k}") for k in range(50)]
    assert [engine.synchronize(handle)[8] for handle in handles] == [k % size for k in range(50)]
