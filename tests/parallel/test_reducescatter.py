"""Reduce-scatter: the rows of an allreduce, of every dtype and operation; even, uneven and no rows."""

from __future__ import annotations

import numpy as np
import pytest

import engine

from ..on_ranks import on_ranks, spare
from .arrays import array, check_equal, numbers, refused, shares, small_numbers, tensor
from .operation_table import CELLS, DTYPES, OPS, expected

pytestmark = on_ranks(1, 2, 3, spare(4))

SHAPES = ((0, 3), (1,), (4, 0), (5, 7), (12, 33), (301, 5), (3, 40_000), (700_001,))
KINDS = [(dtype, op) for dtype in DTYPES for op in OPS if CELLS[dtype, op].reduce is not None]


@pytest.mark.sample(200)
@pytest.mark.parametrize("shape", SHAPES[:6], ids=str)
@pytest.mark.parametrize(("dtype", "op"), KINDS)
def test_rows(dtype: str, op: str, shape: tuple[int, ...], rank: int, size: int) -> None:
    inputs = [numbers(dtype, shape, other) for other in range(size)]
    start = shares(shape[0], size)
    got = engine.reducescatter(tensor(dtype, inputs[rank]), getattr(engine, op))
    check_equal(dtype, array(dtype, got), expected(dtype, op, inputs)[start[rank] : start[rank + 1]])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
def test_scaled(dtype: str, shape: tuple[int, ...], rank: int, size: int) -> None:
    inputs = [small_numbers(dtype, shape, other) for other in range(size)]
    start = shares(shape[0], size)
    got = engine.reducescatter(inputs[rank], engine.Sum, None, 0.5, 3.0)
    check_equal(dtype, got, expected(dtype, "Sum", inputs, 0.5, 3.0)[start[rank] : start[rank + 1]])
    check_equal(dtype, inputs[rank], small_numbers(dtype, shape, rank))


def test_many_outstanding_among_allreduces(rank: int, size: int) -> None:
    rows = [np.full((size * 2 + 1, 3), rank + k, np.float32) for k in range(100)]
    handles = [
        engine.reducescatter_async(each, engine.Sum, f"s{k}")
        if k % 2
        else engine.allreduce_async(each, engine.Sum, f"a{k}")
        for k, each in enumerate(rows)
    ]
    for k, handle in enumerate(handles):
        got = engine.synchronize(handle)
        assert (got == sum(range(k, k + size))).all()
        assert len(got) == (2 + (rank == 0) if k % 2 else size * 2 + 1)


def test_refusals(rank: int, size: int) -> None:
    refused(lambda: engine.reducescatter(np.float32(1)), "a scalar has none")
    refused(lambda: engine.reducescatter(np.ones(4), 17), "17", ValueError)
    refused(lambda: engine.reducescatter(np.ones(4, bool)), "bool tensor has no Average")
    if size > 1:
        said = refused(
            lambda: engine.reducescatter(np.ones((4, 2 + rank % 2)), engine.Sum, "shape"),
            "reducescatter sum float64[4, 2]",
            engine.errors.MismatchError,
        )
        assert "rank 1" in said or "ranks 1" in said
