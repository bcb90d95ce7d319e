"""Allreduce of every dtype, operation and scale, fused and alone; and the promises of the notes below the table."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import engine

from ..on_ranks import on_ranks, spare
from .arrays import array, check_equal, check_same_on_all, numbers, tensor
from .marks import needs_bfloat16
from .operation_table import BOOL, CELLS, DTYPES, OPS, Array, expected

pytestmark = on_ranks(1, 2, 3, spare(4))

SCALES = ((1.0, 1.0), (0.5, 1.0), (1.0, -3.0), (0.3, 1.7), (2.0**-30, 1e30))
LENGTHS = (37, 5000)
PLAN = [
    (dtype, op, pre, post, count)
    for dtype in DTYPES
    for op in OPS
    for pre, post in SCALES
    for count in LENGTHS
    if CELLS[dtype, op].reduce and (dtype not in BOOL or (pre, post) == (1.0, 1.0))
]
each_of_the_plan = pytest.mark.parametrize(
    "at", range(len(PLAN)), ids=[f"{dtype}-{op}-x{pre}-x{post}-[{count}]" for dtype, op, pre, post, count in PLAN]
)


@cache
def in_flight_together() -> tuple[list[Array], list[Any]]:
    """Results of the whole plan, submitted before the first wait; and this rank's inputs."""
    handles, inputs = [], []
    for at, (dtype, op, pre, post, count) in enumerate(PLAN):
        mine = tensor(dtype, numbers(dtype, count, engine.rank(), at))
        submit = engine.allreduce_async_ if at % 2 else engine.allreduce_async
        handles.append(submit(mine, getattr(engine, op), f"{dtype} {op} {pre} {post} {count}", pre, post))
        inputs.append(mine)
    return [array(PLAN[at][0], engine.synchronize(handle)) for at, handle in enumerate(handles)], inputs


@pytest.mark.sample(300)
@needs_bfloat16
@each_of_the_plan
def test_fused(at: int, rank: int, size: int) -> None:
    dtype, op, pre, post, count = PLAN[at]
    results, inputs = in_flight_together()
    values = [numbers(dtype, count, other, at) for other in range(size)]
    check_equal(dtype, results[at], expected(dtype, op, values, pre, post))
    if at % 2 == 0:
        check_equal(dtype, array(dtype, inputs[at]), values[rank])


@needs_bfloat16
def test_fused_results_are_the_same_on_all_ranks() -> None:
    check_same_on_all(in_flight_together()[0])


@pytest.mark.sample(300)
@needs_bfloat16
@each_of_the_plan
def test_alone(at: int, rank: int) -> None:
    dtype, op, pre, post, count = PLAN[at]
    results, _ = in_flight_together()
    mine = tensor(dtype, numbers(dtype, count, rank, at))
    got = array(dtype, engine.allreduce(mine, getattr(engine, op), None, pre, post))
    assert got.tobytes() == results[at].tobytes(), "other bits than in a fused batch"


def reduced(values: Any, dtype: str, op: int, pre: float = 1.0, post: float = 1.0) -> np.ndarray:
    return np.asarray(engine.allreduce(np.array(values, dtype), op, None, pre, post))


def test_integers_wrap(size: int) -> None:
    assert reduced([100], "int8", engine.Sum)[0] == np.int64(100 * size).astype(np.int8)
    assert reduced([3], "int8", engine.Product)[0] == np.int64(3**size).astype(np.int8)


def test_the_sum_below_an_average_does_not_wrap() -> None:
    assert reduced([127, -128], "int8", engine.Average).tolist() == [127, -128]
    assert reduced([255], "uint8", engine.Average).tolist() == [255]
    assert reduced([65535], "uint16", engine.Average).tolist() == [65535]
    assert reduced([2**15 - 1, -(2**15)], "int16", engine.Average).tolist() == [2**15 - 1, -(2**15)]
    assert reduced([2**31 - 1], "int32", engine.Average).tolist() == [2**31 - 1]


def test_an_average_truncates_toward_zero(rank: int, size: int) -> None:
    got = reduced([1 if rank == 0 else 0, -1 if rank == 0 else 0], "int32", engine.Average)
    assert got.tolist() == ([1, -1] if size == 1 else [0, 0])


def test_factors_truncate_toward_zero_and_saturate(rank: int) -> None:
    first = rank == 0
    got = reduced([3 if first else 0, -3 if first else 0, 100 if first else 0], "int8", engine.Sum, pre=1.5)
    assert got.tolist() == [4, -4, 127]
    assert reduced([-1 if first else 0], "int8", engine.Sum, post=1e9).tolist() == [-128]
    assert reduced([200 if first else 0], "uint8", engine.Sum, pre=-1.0).tolist() == [0]
    assert reduced([2**62 if first else 0], "int64", engine.Sum, post=1e3).tolist() == [2**63 - 1]


def test_NaN_in_min_and_max(rank: int, size: int) -> None:
    mine = [np.nan if rank == size - 1 else 1.0, np.nan if rank == 0 else 1.0]
    for dtype in ("float16", "float32", "float64"):
        assert np.isnan(reduced(mine, dtype, engine.Min)).all()
        assert np.isnan(reduced(mine, dtype, engine.Max)).all()


def test_of_equal_zeros_the_later_ranks_is_taken(rank: int, size: int) -> None:
    got = reduced([-0.0 if rank == size - 1 else 0.0], "float32", engine.Min)
    assert np.signbit(got[0])
    got = reduced([0.0 if rank == size - 1 else -0.0], "float32", engine.Max)
    assert not np.signbit(got[0])


def test_overflow_is_an_infinity(size: int) -> None:
    assert np.isinf(reduced([65504.0], "float16", engine.Sum)[0]) == (size > 1)
    assert reduced([65504.0], "float16", engine.Average)[0] == 65504.0


def test_denormal_numbers_are_kept(size: int) -> None:
    assert reduced([1e-45], "float32", engine.Max)[0] == np.float32(1e-45)
    assert reduced([1e-45], "float32", engine.Sum)[0] == np.float32(1e-45) * size
    assert reduced([6e-8], "float16", engine.Sum)[0] == np.float16(6e-8) * np.float16(size)


def test_any_nonzero_byte_is_true(rank: int, size: int) -> None:
    mine = np.frombuffer(bytes([2 if rank == 0 else 0, 255, 0]), np.bool_).copy()
    assert engine.allreduce(mine, engine.Sum).view(np.uint8).tolist() == [1, 1, 0]
    assert engine.allreduce(mine, engine.Min).view(np.uint8).tolist() == [1 if size == 1 else 0, 1, 0]


def test_sums_are_in_rank_order(rank: int, size: int) -> None:
    # 1e8 + 1 - 1e8 is 0 in float32, in this order only.
    order = {1: [0.25], 2: [1e8, 1.0], 3: [1e8, 1.0, -1e8], 4: [1.0, 1e8, -1e8, 0.5]}[size]
    total = np.float32(order[0])
    for value in order[1:]:
        total = np.float32(total + np.float32(value))
    for count in (1, 20_000, 700_000):  # one-shot, two chunks, many
        assert (reduced([order[rank]] * count, "float32", engine.Sum) == total).all()


def test_refusals_of_bool() -> None:
    for op, pre, post in ((engine.Average, 1.0, 1.0), (engine.Sum, 2.0, 1.0), (engine.Max, 1.0, 0.5)):
        try:
            reduced([True], "bool", op, pre, post)
        except engine.errors.UnsupportedTensorError:
            continue
        raise AssertionError("not refused")
