"""Adasum follows the paper's formula, on any power of two of ranks."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest

import engine
from engine import Adasum
from engine.errors import EngineError, MismatchError

from ..adasum_reference import adasum
from ..on_ranks import Parts, on_ranks
from .adasum_vectors import check_close, vector
from .arrays import array, check_same_on_all, refused, tensor
from .marks import needs_bfloat16
from .operation_table import Array

pytestmark = on_ranks(1, 2, 4)

SHAPES = ((0,), (), (1,), (7,), (8,), (9,), (63, 5), (16, 16), (1001,), (70_001,), (3, 0))
LARGE = 700_001  # elements: several chunks, at any number of ranks and of any dtype
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


# ---- against the formula


def each_dtype(test: Any) -> Any:
    """Parametrize a test with all dtypes that Adasum takes."""
    return pytest.mark.parametrize(
        "dtype", ["float16", "float32", "float64", pytest.param("bfloat16", marks=needs_bfloat16)]
    )(test)


@cache
def in_flight_together(dtypes: tuple[str, ...]) -> dict[tuple[str, Any], Array]:
    """Results of all shapes, waited for in another order on each rank, with the same bits everywhere."""
    plan = list(itertools.product(dtypes, SHAPES))
    mine = [tensor(dtype, vector(dtype, shape, engine.rank(), seed(dtype, shape))) for dtype, shape in plan]
    handles = [engine.allreduce_async(each, Adasum, f"{dtypes} {at}") for at, each in enumerate(mine)]
    order = np.random.default_rng(engine.rank()).permutation(len(plan))
    found = {plan[k]: array(plan[k][0], engine.synchronize(handles[k])) for k in order}
    check_same_on_all([found[each] for each in plan])
    return found


@cache
def in_groups(dtypes: tuple[str, ...]) -> dict[tuple[str, Any], tuple[Array, Array]]:
    """Results of the same tensors in one group, out of place and in place."""
    plan = list(itertools.product(dtypes, SHAPES))
    mine = [tensor(dtype, vector(dtype, shape, engine.rank(), seed(dtype, shape))) for dtype, shape in plan]
    grouped = engine.grouped_allreduce(mine, Adasum)
    engine.grouped_allreduce_(mine, Adasum, "in place")
    return {
        each: (array(each[0], apart), array(each[0], inplace))
        for each, apart, inplace in zip(plan, grouped, mine, strict=True)
    }


def seed(dtype: str, shape: Any) -> int:
    """Seed that tells apart the vectors in flight together."""
    return beside(dtype).index(dtype) * len(SHAPES) + SHAPES.index(shape)


def beside(dtype: str) -> tuple[str, ...]:
    """Dtypes that are in flight together with this one."""
    return ("bfloat16",) if dtype == "bfloat16" else ("float16", "float32", "float64")


@pytest.mark.sample(12)
@each_shape
@each_dtype
def test_formula(dtype: str, shape: Any, size: int) -> None:
    found = in_flight_together(beside(dtype))[dtype, shape]
    check_close(dtype, found, [vector(dtype, shape, other, seed(dtype, shape)) for other in range(size)])


@each_shape
@each_dtype
def test_formula_alone_and_in_place(dtype: str, shape: Any, rank: int) -> None:
    found = in_flight_together(beside(dtype))[dtype, shape]
    mine = tensor(dtype, vector(dtype, shape, rank, seed(dtype, shape)))
    result = engine.allreduce_(mine, Adasum)
    assert result is mine
    assert array(dtype, mine).tobytes() == found.tobytes()


@each_shape
@each_dtype
def test_formula_in_a_group(dtype: str, shape: Any) -> None:
    found = in_flight_together(beside(dtype))[dtype, shape]
    for each in in_groups(beside(dtype))[dtype, shape]:
        assert each.tobytes() == found.tobytes()


@pytest.mark.sample(3)
@each_dtype
def test_formula_of_many_elements(dtype: str, rank: int, size: int) -> None:
    large = vector(dtype, LARGE, rank)
    got = array(dtype, engine.allreduce(tensor(dtype, large), Adasum))
    check_same_on_all([got])
    check_close(dtype, got, [vector(dtype, LARGE, other) for other in range(size)])
    assert large.tobytes() == vector(dtype, LARGE, rank).tobytes()


@pytest.mark.parametrize(("before", "after"), [(0.5, 1.0), (1.0, -3.0), (0.3, 1.7), (0.0, 1.0)])
@each_dtype
def test_formula_scaled(dtype: str, before: float, after: float, rank: int, size: int) -> None:
    got = array(dtype, engine.allreduce(tensor(dtype, vector(dtype, 999, rank)), Adasum, None, before, after))
    check_close(dtype, got, [vector(dtype, 999, other) for other in range(size)], before * after)


# ---- what a reader can check by eye


def combined(values: Any, dtype: str = "float32") -> np.ndarray:
    return np.asarray(engine.allreduce(np.array(values, dtype), Adasum))


def test_equal_vectors_their_average_exactly() -> None:
    for dtype in ("float16", "float32", "float64"):
        mine = np.random.default_rng(5).standard_normal(5000).astype(dtype)
        assert (combined(mine, dtype) == mine).all()


def test_orthogonal_vectors_their_sum_exactly(rank: int, size: int) -> None:
    mine = np.zeros((size, 3000), np.float32)
    mine[rank] = np.random.default_rng(rank).standard_normal(3000)
    want = [np.random.default_rng(other).standard_normal(3000).astype(np.float32) for other in range(size)]
    assert (combined(mine) == np.stack(want)).all()


def test_who_brings_nothing_is_left_out(rank: int, size: int) -> None:
    for giver in range(size):
        mine = np.full(100, 3.25 if rank == giver else 0.0, np.float32)
        assert (combined(mine) == 3.25).all(), giver


def test_nothing_at_all() -> None:
    assert not combined(np.zeros(1000)).any()


def test_opposite_vectors_cancel(rank: int, size: int) -> None:
    mine = np.random.default_rng(5).standard_normal(1000) * (-1.0) ** rank
    assert not combined(mine).any() or size == 1


def test_neighbours_that_cancel_leave_the_others_as_they_are(rank: int, size: int) -> None:
    mine = np.random.default_rng(5).standard_normal(1000) * (-1.0) ** rank
    if rank >= 2:
        mine = np.full(1000, 2.0)
    got = combined(mine)
    if size == 4:
        assert (got == 2.0).all()


def test_one_number_the_average(rank: int, size: int) -> None:
    assert combined([1.0 + rank], "float64")[0] == (size + 1) / 2


def test_a_nan_is_everywhere_in_its_tensor_alone(rank: int, size: int) -> None:
    mine = np.ones(40_000, np.float32)
    mine[7] = np.nan if rank == size - 1 else 1.0
    bad, good = engine.grouped_allreduce([mine, np.ones(40_000, np.float32)], Adasum)
    assert np.isnan(bad).all() or size == 1
    assert (good == 1.0).all()


def test_tiny_and_huge_numbers() -> None:
    assert (combined(np.full(10, 1e-45)) == np.float32(1e-45)).all()
    assert (combined(np.full(10, 3e38)) == np.float32(3e38)).all()
    assert (combined(np.full(10, 60000.0), "float16") == np.float16(60000.0)).all()


def test_strides_channels_last_and_views() -> None:
    rows = np.arange(24, dtype=np.float32).reshape(4, 6)
    assert (combined(rows.T) == rows.T).all()
    engine.allreduce_(rows[:, ::2], Adasum)
    assert (rows == np.arange(24).reshape(4, 6)).all()


def test_refusals() -> None:
    for dtype in ("int8", "uint8", "int32", "int64", "bool"):
        refused(lambda dtype=dtype: engine.allreduce(np.ones(3, dtype), Adasum), "Adasum takes float16")  # type: ignore[misc]
    refused(lambda: engine.grouped_allreduce([np.ones(3, np.int32)], Adasum), "Adasum takes float16")
    refused(lambda: engine.reducescatter(np.ones(8), Adasum), "not Adasum", ValueError)
    refused(lambda: engine.allreduce(np.ones(3), Adasum, None, float("inf")), "finite", ValueError)
    refused(lambda: engine.allreduce(np.ones(3), 6), "6", ValueError)


def test_ranks_that_mean_different_operations(rank: int, size: int) -> None:
    if size > 1:
        said = refused(
            lambda: engine.allreduce(np.ones(4), engine.Sum if rank else Adasum, "op"), "disagree", MismatchError
        )
        assert "allreduce adasum float64[4]" in said and "allreduce sum float64[4]" in said, said
    assert (combined(np.ones(3)) == 1).all()


def test_it_says_so_in_the_history() -> None:
    combined(np.ones(3))
    rows = [row for row in engine.session.runtime.current_engine().history() if row["algorithm"] == "adasum"]
    assert rows and all(row["kind"] == "allreduce" for row in rows)


# ---- knobs


COUNTS = (5, 40_000, 1, 0, 130_001, 64, 300_000)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"fusion_threshold": 0, "chunk_bytes": 1 << 20, "stores": "cached"},
    {"fusion_threshold": 64 << 20, "chunk_bytes": 1 << 20, "stores": "streaming"},
    {"fusion_threshold": 200_000, "chunk_bytes": 65536, "stores": "auto"},
    {"fusion_threshold": 64 << 20, "chunk_bytes": 200_000, "stores": "streaming"},
    {"fusion_threshold": 0, "chunk_bytes": 100_001, "stores": "cached"},  # a tuned chunk size splits no element
    {"fusion_threshold": 777_777, "chunk_bytes": (1 << 20) - 1, "stores": "auto"},
)


@on_ranks(1, 2, 4, world={"cycle_time_ms": 1})
def test_no_knob_changes_a_bit(parts: Parts, rank: int, size: int) -> None:
    """Covers fusion, chunks, stores, other tensors in flight, and groups with tensors of any size."""
    mine = [vector("float32", count, rank, count) for count in COUNTS]
    results: list[bytes] = []
    for setting in SETTINGS:
        if rank == 0:
            engine.set_knobs(**setting)
        engine.barrier()
        for order in (range(len(COUNTS)), reversed(range(len(COUNTS)))):
            handles = {k: engine.allreduce_async(mine[k], Adasum, f"{k}") for k in order}
            results.append(b"".join(engine.synchronize(handles[k]).tobytes() for k in range(len(COUNTS))))
        results.append(b"".join(each.tobytes() for each in engine.grouped_allreduce(mine, Adasum)))
    check_same_on_all([np.frombuffer(result, np.uint8) for result in results])
    shared = np.frombuffer(engine.session.runtime.current_engine().share(4 * 40_000), np.float32)
    shared[:] = mine[1]
    engine.allreduce_(shared, Adasum)
    with parts.part("the same bits"):
        assert len(set(results)) == 1
        assert sum(COUNTS) * 4 == len(results[0])
    with parts.part("and the right ones"):
        for k, count in enumerate(COUNTS):
            got = np.frombuffer(results[0], np.float32, count, 4 * sum(COUNTS[:k]))
            check_close("float32", got, [vector("float32", count, other, count) for other in range(size)])
    with parts.part("in shared memory as elsewhere"):
        assert shared.tobytes() == results[0][20 : 20 + 160_000]


# ---- other numbers of ranks


@pytest.mark.sample(1)
@on_ranks(8)
@pytest.mark.parametrize("count", [1, 3, 1000, 20_000])
def test_many_ranks(count: int, rank: int, size: int) -> None:
    got = engine.allreduce(vector("float32", count, rank), Adasum)
    check_close("float32", got, [vector("float32", count, other) for other in range(size)])


@pytest.mark.slow
@on_ranks(8)
def test_many_ranks_and_a_group_with_more_members_than_a_slot_has_room_for(rank: int, size: int) -> None:
    counts = [1 + k % 3 for k in range(5000)]
    starts = np.cumsum([0, *counts])
    rows = [vector("float32", starts[-1], other, 3) for other in range(size)]
    pieces = [rows[rank][a:b] for a, b in itertools.pairwise(starts)]
    got = engine.grouped_allreduce(pieces, Adasum)
    check_same_on_all([np.concatenate(got)])
    for k, (a, b) in enumerate(itertools.pairwise(starts)):
        want = adasum([row[a:b].astype(np.float64) for row in rows])
        # Numbers of both signs: the combination of a pair may be small beside its inputs.
        assert np.abs(got[k] - want).max() <= 1e-6 * max(np.abs(row[a:b]).max() for row in rows), k


@on_ranks(3)
def test_three_ranks_are_refused(rank: int, size: int) -> None:
    """Every rank gets the error before any data is sent, and the engine goes on. A process set's own size counts."""
    pair = engine.add_process_set([0, 2])
    if pair.included():
        got = engine.allreduce(vector("float32", 5000, rank), Adasum, process_set=pair)
        check_close("float32", got, [vector("float32", 5000, 0), vector("float32", 5000, 2)])
    for call in (
        lambda: engine.allreduce(np.ones(3), Adasum),
        lambda: engine.allreduce_(np.ones(3), Adasum),
        lambda: engine.allreduce_async(np.ones(3), Adasum),
        lambda: engine.grouped_allreduce([np.ones(3), np.ones(2, np.float32)], Adasum),
    ):
        said = refused(call, "1, 2, 4, 8 .. ranks", (ValueError, EngineError))
        assert f"these are {size}" in said
        assert engine.allreduce(np.ones(3), engine.Sum)[0] == size


@pytest.mark.sample(1)
@on_ranks(2, 4)
def test_ranks_that_have_joined(parts: Parts, rank: int, size: int) -> None:
    """They contribute zeros to a tensor and to each tensor of a group: the result is Adasum of the other ranks."""
    for step in range(rank + 1):
        left = range(step, size)
        for count in (3, 5000, 200_000):
            for name in (None, f"{count}", f"{count} {step}"):
                got = engine.allreduce(vector("float32", count, rank), Adasum, name)
                with parts.part(f"step {step}: {count} {name}"):
                    brought = [vector("float32", count, other) * (other in left) for other in range(size)]
                    check_close("float32", got, brought)
        members = (("float32", 5), ("float64", 7), ("float32", 0), ("float32", 70_001), ("float16", ()), ("float64", 1))
        group = [vector(dtype, shape, rank, k) for k, (dtype, shape) in enumerate(members)]
        for name in ("group", f"group {step}"):
            # In flight with others: fused, or not.
            handle = engine.grouped_allreduce_async(group, Adasum, name)
            alone = engine.allreduce_async(group[0], Adasum, f"beside {name}")
            small = engine.grouped_allreduce([*group[:2]] * 2, Adasum, f"small {name}")
            found = engine.synchronize(handle)
            with parts.part(f"step {step}: {name}"):
                for k, (dtype, shape) in enumerate(members):
                    brought = [vector(dtype, shape, other, k) * (other in left) for other in range(size)]
                    check_close(dtype, found[k], brought)
                assert engine.synchronize(alone).tobytes() == found[0].tobytes() == small[2].tobytes()
                assert small[3].tobytes() == found[1].tobytes()
        many = [np.full(1 + k % 3, rank + 1.0) for k in range(30_000)]
        got = engine.grouped_allreduce(many, Adasum, f"many {step}")
        with parts.part(f"step {step}: more tensors than a chunk tells of"):
            want = adasum([np.full(1, (other + 1.0) * (other in left)) for other in range(size)])[0]
            assert max(np.abs(each - want).max() for each in got) < 1e-12
        with parts.part(f"step {step}: a group that the ranks disagree on"):
            if len(left) > 1:
                refused(
                    lambda group=group, step=step: engine.grouped_allreduce(group[: 2 + (rank > step)], Adasum, "odd"),  # type: ignore[misc]
                    "a group of 2 tensors",
                    MismatchError,
                )
    engine.join()
    with parts.part("afterwards"):
        assert (engine.grouped_allreduce([np.ones(5), np.ones(7)], Adasum, "group")[1] == 1).all()
