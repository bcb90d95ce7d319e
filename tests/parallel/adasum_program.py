"""Adasum held against the paper's formula, and against itself. Runs on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

import engine
from engine import Adasum
from engine.errors import EngineError, MismatchError

from ..adasum_reference import adasum
from .on_ranks import Cases, array, check_same_on_all, refused, tensor
from .operation_table import Array, narrow, widen

# Half a place of the dtype beside the largest number of the result; what float64 loses in sums beside that.
CLOSE = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-46}
SHAPES = ((0,), (), (1,), (7,), (8,), (9,), (63, 5), (16, 16), (1001,), (70_001,), (3, 0))
LARGE = 700_001  # elements: several chunks, at any number of ranks and of any dtype


def vector(dtype: str, shape: Any, rank: int, seed: int = 0) -> Array:
    """What a rank brings, known to every rank: vectors that agree in part."""
    common = np.random.default_rng([seed, 77]).standard_normal(shape)
    own = np.random.default_rng([seed, rank]).standard_normal(shape)
    values = ((own + 0.7 * common) * 2.0 ** (rank % 3)).astype(np.float64 if dtype == "float64" else np.float32)
    return np.array(narrow(dtype, values)).reshape(shape)


def check_close(dtype: str, got: Array, ranks: list[Array], factor: float = 1.0) -> None:
    """Raise unless `got` is the formula's result, rounded once."""
    check_rounded(dtype, got, factor * adasum([widen(dtype, each).astype(np.float64) for each in ranks]))


def check_rounded(dtype: str, got: Array, want: Array, beside: float = 0.0) -> None:
    """Raise unless `got` is `want`, in float64, rounded once, for numbers up to `beside` or the largest of `want`."""
    assert got.shape == want.shape
    error = np.abs(widen(dtype, got).astype(np.float64) - want).max(initial=0.0)
    room = 1.01 * CLOSE[dtype] * np.abs(want).max(initial=beside)
    assert error <= room, f"off by {error}, which is more than {room}"


def against_the_formula(dtypes: Sequence[str]) -> int:
    """Dtypes in many shapes: in flight all at once, alone, in place, and in groups. The same bits everywhere."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()
    plan = list(itertools.product(dtypes, SHAPES))
    handles = [
        engine.allreduce_async(tensor(dtype, vector(dtype, shape, rank, k)), Adasum, f"{k}")
        for k, (dtype, shape) in enumerate(plan)
    ]
    order = np.random.default_rng(rank).permutation(len(plan))  # Another one on each rank.
    found = {k: array(plan[k][0], engine.synchronize(handles[k])) for k in order}
    for k, (dtype, shape) in enumerate(plan):
        with cases.case(f"{dtype} {shape}"):
            check_close(dtype, found[k], [vector(dtype, shape, other, k) for other in range(size)])
    check_same_on_all([found[k] for k in range(len(plan))])
    for k, (dtype, shape) in enumerate(plan):
        mine = tensor(dtype, vector(dtype, shape, rank, k))
        result = engine.allreduce_(mine, Adasum)
        with cases.case(f"alone and in place, {dtype} {shape}"):
            assert result is mine
            assert array(dtype, mine).tobytes() == found[k].tobytes()
    mine = [tensor(dtype, vector(dtype, shape, rank, k)) for k, (dtype, shape) in enumerate(plan)]
    grouped = engine.grouped_allreduce(mine, Adasum)
    engine.grouped_allreduce_(mine, Adasum, "in place")
    for k, (dtype, shape) in enumerate(plan):
        with cases.case(f"in a group, {dtype} {shape}"):
            assert array(dtype, grouped[k]).tobytes() == found[k].tobytes()
            assert array(dtype, mine[k]).tobytes() == found[k].tobytes()
    for dtype in dtypes:
        large = vector(dtype, LARGE, rank)
        got = array(dtype, engine.allreduce(tensor(dtype, large), Adasum))
        check_same_on_all([got])
        with cases.case(f"large {dtype}"):
            check_close(dtype, got, [vector(dtype, LARGE, other) for other in range(size)])
            assert large.tobytes() == vector(dtype, LARGE, rank).tobytes()
    for dtype, (before, after) in itertools.product(dtypes, ((0.5, 1.0), (1.0, -3.0), (0.3, 1.7), (0.0, 1.0))):
        got = array(dtype, engine.allreduce(tensor(dtype, vector(dtype, 999, rank)), Adasum, None, before, after))
        with cases.case(f"scaled {dtype} {before} {after}"):
            check_close(dtype, got, [vector(dtype, 999, other) for other in range(size)], before * after)
    return cases.done(3 * len(plan) + 5 * len(dtypes))


def known_results() -> int:
    """What a reader can check by eye."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()

    def combined(values: Any, dtype: str = "float32") -> np.ndarray:
        return np.asarray(engine.allreduce(np.array(values, dtype), Adasum))

    with cases.case("equal vectors: their average, exactly"):
        for dtype in ("float16", "float32", "float64"):
            mine = np.random.default_rng(5).standard_normal(5000).astype(dtype)
            assert (combined(mine, dtype) == mine).all()
    with cases.case("orthogonal vectors: their sum, exactly"):
        mine = np.zeros((size, 3000), np.float32)
        mine[rank] = np.random.default_rng(rank).standard_normal(3000)
        want = [np.random.default_rng(other).standard_normal(3000).astype(np.float32) for other in range(size)]
        assert (combined(mine) == np.stack(want)).all()
    with cases.case("who brings nothing is left out"):
        for giver in range(size):
            mine = np.full(100, 3.25 if rank == giver else 0.0, np.float32)
            assert (combined(mine) == 3.25).all(), giver
    with cases.case("nothing at all"):
        assert not combined(np.zeros(1000)).any()
    with cases.case("opposite vectors cancel"):
        mine = np.random.default_rng(5).standard_normal(1000) * (-1.0) ** rank
        assert not combined(mine).any() or size == 1
    with cases.case("neighbours that cancel leave the others as they are"):
        mine = np.random.default_rng(5).standard_normal(1000) * (-1.0) ** rank
        if rank >= 2:
            mine = np.full(1000, 2.0)
        got = combined(mine)
        if size == 4:
            assert (got == 2.0).all()
    with cases.case("one number: the average"):
        assert combined([1.0 + rank], "float64")[0] == (size + 1) / 2
    with cases.case("a NaN is everywhere, in its tensor alone"):
        mine = np.ones(40_000, np.float32)
        mine[7] = np.nan if rank == size - 1 else 1.0
        bad, good = engine.grouped_allreduce([mine, np.ones(40_000, np.float32)], Adasum)
        assert np.isnan(bad).all() or size == 1
        assert (good == 1.0).all()
    with cases.case("tiny and huge numbers"):
        assert (combined(np.full(10, 1e-45)) == np.float32(1e-45)).all()
        assert (combined(np.full(10, 3e38)) == np.float32(3e38)).all()
        assert (combined(np.full(10, 60000.0), "float16") == np.float16(60000.0)).all()
    with cases.case("strides, channels_last and views"):
        rows = np.arange(24, dtype=np.float32).reshape(4, 6)
        assert (combined(rows.T) == rows.T).all()
        engine.allreduce_(rows[:, ::2], Adasum)
        assert (rows == np.arange(24).reshape(4, 6)).all()
    with cases.case("refusals"):
        for dtype in ("int8", "uint8", "int32", "int64", "bool"):
            refused(lambda dtype=dtype: engine.allreduce(np.ones(3, dtype), Adasum), "Adasum takes float16")  # type: ignore[misc]
        refused(lambda: engine.grouped_allreduce([np.ones(3, np.int32)], Adasum), "Adasum takes float16")
        refused(lambda: engine.reducescatter(np.ones(8), Adasum), "not Adasum", ValueError)
        refused(lambda: engine.allreduce(np.ones(3), Adasum, None, float("inf")), "finite", ValueError)
        refused(lambda: engine.allreduce(np.ones(3), 6), "6", ValueError)
    with cases.case("ranks that mean different operations"):
        if size > 1:
            said = refused(
                lambda: engine.allreduce(np.ones(4), engine.Sum if rank else Adasum, "op"), "disagree", MismatchError
            )
            assert "allreduce adasum float64[4]" in said and "allreduce sum float64[4]" in said, said
        assert (combined(np.ones(3)) == 1).all()
    with cases.case("it says so in the history"):
        rows = [row for row in engine.runtime.engine().history() if row["algorithm"] == "adasum"]
        assert rows and all(row["kind"] == "allreduce" for row in rows)
    return cases.done(13)


def no_knob_changes_a_bit() -> int:
    """Fusion, chunks, stores and company; and groups of tensors of any size among them."""
    engine.init(cycle_time_ms=1)
    cases, rank, size = Cases(), engine.rank(), engine.size()
    counts = (5, 40_000, 1, 0, 130_001, 64, 300_000)
    mine = [vector("float32", count, rank, count) for count in counts]
    results: list[bytes] = []
    settings: tuple[dict[str, Any], ...] = (
        {"fusion_threshold": 0, "chunk_bytes": 1 << 20, "stores": "cached"},
        {"fusion_threshold": 64 << 20, "chunk_bytes": 1 << 20, "stores": "streaming"},
        {"fusion_threshold": 200_000, "chunk_bytes": 65536, "stores": "auto"},
        {"fusion_threshold": 64 << 20, "chunk_bytes": 200_000, "stores": "streaming"},
    )
    for setting in settings:
        if rank == 0:
            engine.set_knobs(**setting)
        engine.barrier()
        for order in (range(len(counts)), reversed(range(len(counts)))):
            handles = {k: engine.allreduce_async(mine[k], Adasum, f"{k}") for k in order}
            results.append(b"".join(engine.synchronize(handles[k]).tobytes() for k in range(len(counts))))
        results.append(b"".join(each.tobytes() for each in engine.grouped_allreduce(mine, Adasum)))
    check_same_on_all([np.frombuffer(result, np.uint8) for result in results])
    with cases.case("the same bits"):
        assert len(set(results)) == 1
        assert sum(counts) * 4 == len(results[0])
    with cases.case("and the right ones"):
        for k, count in enumerate(counts):
            got = np.frombuffer(results[0], np.float32, count, 4 * sum(counts[:k]))
            check_close("float32", got, [vector("float32", count, other, count) for other in range(size)])
    with cases.case("in shared memory as elsewhere"):
        shared = np.frombuffer(engine.runtime.engine().share(4 * 40_000), np.float32)
        shared[:] = mine[1]
        engine.allreduce_(shared, Adasum)
        assert shared.tobytes() == results[0][20 : 20 + 160_000]
    return cases.done(3)


def many_ranks() -> int:
    """More levels than two, and a group with more members than a slot has room for the products of."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()
    for count in (1, 3, 1000, 20_000):
        got = engine.allreduce(vector("float32", count, rank), Adasum)
        with cases.case(f"{count}"):
            check_close("float32", got, [vector("float32", count, other) for other in range(size)])
    counts = [1 + k % 3 for k in range(5000)]
    starts = np.cumsum([0, *counts])
    rows = [vector("float32", starts[-1], other, 3) for other in range(size)]
    pieces = [rows[rank][a:b] for a, b in itertools.pairwise(starts)]
    got = engine.grouped_allreduce(pieces, Adasum)
    check_same_on_all([np.concatenate(got)])
    with cases.case("a large group"):
        for k, (a, b) in enumerate(itertools.pairwise(starts)):
            want = adasum([row[a:b].astype(np.float64) for row in rows])
            # Numbers of either sign: what is left of a pair may be small beside it.
            assert np.abs(got[k] - want).max() <= 1e-6 * max(np.abs(row[a:b]).max() for row in rows), k
    return cases.done(5)


def wrong_number_of_ranks() -> int:
    """Every rank is told before anything is sent, and the engine goes on. In a process set its ranks count."""
    engine.init()
    cases, rank = Cases(), engine.rank()
    pair = engine.add_process_set([0, 2])
    if pair.included():
        got = engine.allreduce(vector("float32", 5000, rank), Adasum, process_set=pair)
        with cases.case("a pair of them"):
            check_close("float32", got, [vector("float32", 5000, 0), vector("float32", 5000, 2)])
    for call in (
        lambda: engine.allreduce(np.ones(3), Adasum),
        lambda: engine.allreduce_(np.ones(3), Adasum),
        lambda: engine.allreduce_async(np.ones(3), Adasum),
        lambda: engine.grouped_allreduce([np.ones(3), np.ones(2, np.float32)], Adasum),
    ):
        with cases.case("refused"):
            said = refused(call, "1, 2, 4, 8 .. ranks", (ValueError, EngineError))
            assert f"these are {engine.size()}" in said
            assert engine.allreduce(np.ones(3), engine.Sum)[0] == engine.size()
    return cases.done(4 + (rank != 1))


def ranks_that_have_joined() -> int:
    """They bring zeros, to a tensor and to each tensor of a group: what is left is Adasum of the others."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()
    for step in range(rank + 1):
        left = range(step, size)
        for count in (3, 5000, 200_000):
            for name in (None, f"{count}", f"{count} {step}"):
                got = engine.allreduce(vector("float32", count, rank), Adasum, name)
                with cases.case(f"step {step}: {count} {name}"):
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
            with cases.case(f"step {step}: {name}"):
                for k, (dtype, shape) in enumerate(members):
                    brought = [vector(dtype, shape, other, k) * (other in left) for other in range(size)]
                    check_close(dtype, found[k], brought)
                assert engine.synchronize(alone).tobytes() == found[0].tobytes() == small[2].tobytes()
                assert small[3].tobytes() == found[1].tobytes()
        many = [np.full(1 + k % 3, rank + 1.0) for k in range(30_000)]
        got = engine.grouped_allreduce(many, Adasum, f"many {step}")
        with cases.case(f"step {step}: more tensors than a chunk tells of"):
            want = adasum([np.full(1, (other + 1.0) * (other in left)) for other in range(size)])[0]
            assert max(np.abs(each - want).max() for each in got) < 1e-12
        with cases.case(f"step {step}: a group that the ranks disagree on"):
            if len(left) > 1:
                refused(
                    lambda group=group, step=step: engine.grouped_allreduce(group[: 2 + (rank > step)], Adasum, "odd"),  # type: ignore[misc]
                    "a group of 2 tensors",
                    MismatchError,
                )
    engine.join()
    with cases.case("afterwards"):
        assert (engine.grouped_allreduce([np.ones(5), np.ones(7)], Adasum, "group")[1] == 1).all()
    return cases.done(13 * (rank + 1) + 1)
