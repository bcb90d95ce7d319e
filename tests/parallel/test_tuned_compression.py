"""Tensors whose wire dtype follows the knob `compression`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

import engine
from engine import Compression
from engine.errors import ConfigError, EngineError, MismatchError
from engine.session import runtime

from ..on_ranks import Parts, on_ranks, spare
from ..waiting import meet
from .arrays import check_equal, check_same_on_all, numbers, refused
from .halves import MANY, MARKERS, SCALES, compressed
from .operation_table import OPS, Array, expected, same

pytestmark = on_ranks(1, 2, 3, spare(4))

KNOBS: dict[str, str | None] = {"none": None, "bf16": "bfloat16", "fp16": "float16"}
TURNS = ("none", "bf16", "fp16", "none")  # sequence of the knob's values
TUNED = Compression.tuned


def turn(knob: str, **others: Any) -> None:
    """Set the knob for all later operations."""
    if engine.rank() == 0:
        engine.set_knobs(compression=knob, **others)
    engine.barrier()


def wanted(knob: str, dtype: str, op: str, values: list[Array], pre: float = 1.0, post: float = 1.0) -> Array:
    """Result of an allreduce of one array of each rank."""
    wire = KNOBS[knob]
    if wire is None or dtype not in ("float32", "float64"):
        return expected(dtype, op, values, pre, post)
    return compressed(dtype, wire, op, values, pre, post)


def entries(prefix: str, since: int = 0) -> list[dict[str, Any]]:
    """Entries from a position on that moved data under names with this prefix."""
    history = runtime.current_engine().history()
    return [
        row for row in history if row["type"] == "batch" and row["name"].startswith(prefix) and row["entry"] >= since
    ]


PLAN = [
    *(
        (dtype, op, pre, post, (37, 20_011)[k % 2])
        for dtype in ("float32", "float64")
        for k, op in enumerate(OPS)
        for pre, post in SCALES
    ),
    *((dtype, "Average", 1.0, 1.0, MANY) for dtype in ("float32", "float64")),
]
each_lap = pytest.mark.parametrize("lap", range(len(TURNS)), ids=[f"{lap}-{knob}" for lap, knob in enumerate(TURNS)])
each_of_the_plan = pytest.mark.parametrize(
    "at", range(len(PLAN)), ids=[f"{dtype}-{op}-x{pre}-x{post}-[{count}]" for dtype, op, pre, post, count in PLAN]
)


@cache
def in_flight_together(lap: int) -> tuple[list[Array], list[Array]]:
    """Turn the knob; return the results of the whole plan, and of as many sums that are not tuned, of each kind."""
    turn(TURNS[lap])
    rank = engine.rank()
    tuned, others = [], []
    for at, (dtype, op, pre, post, count) in enumerate(PLAN):
        submit = engine.allreduce_async_ if at % 2 else engine.allreduce_async
        mine, threes = numbers(dtype, count, rank, at), np.full(3, rank, dtype)
        tuned.append(submit(mine, getattr(engine, op), f"{at}", pre, post, compression=TUNED))
        others.append(engine.allreduce_async(threes, engine.Sum, f"plain {at}"))
        others.append(engine.allreduce_async(threes, engine.Sum, f"half {at}", compression=Compression.bf16))
    return list(map(engine.synchronize, tuned)), list(map(engine.synchronize, others))


@pytest.mark.sample(66)
@each_lap
@each_of_the_plan
def test_fused(at: int, lap: int, size: int) -> None:
    dtype, op, pre, post, count = PLAN[at]
    tuned, others = in_flight_together(lap)
    values = [numbers(dtype, count, each, at) for each in range(size)]
    check_equal(dtype, tuned[at], wanted(TURNS[lap], dtype, op, values, pre, post))
    for each in others[2 * at : 2 * at + 2]:
        assert each.tolist() == [size * (size - 1) / 2] * 3


@pytest.mark.sample(66)
@each_lap
@each_of_the_plan
def test_alone(at: int, lap: int, rank: int) -> None:
    dtype, op, pre, post, count = PLAN[at]
    tuned, _ = in_flight_together(lap)
    if engine.knobs()["compression"] != TURNS[lap]:
        turn(TURNS[lap])
    got = engine.allreduce(numbers(dtype, count, rank, at), getattr(engine, op), None, pre, post, compression=TUNED)
    assert got.tobytes() == tuned[at].tobytes(), "other bits than in a fused batch"


@each_lap
def test_fused_results_are_the_same_on_all_ranks(lap: int) -> None:
    check_same_on_all(in_flight_together(lap)[0])


@pytest.mark.sample(1)
@on_ranks(1, 2, 3, 4, world={"cycle_time_ms": 0.2})
def test_switched_in_flight(parts: Parts, rank: int, size: int) -> None:
    """The knob is turned at any moment: each result matches the one value that its entry has, on all ranks alike."""
    lengths = (5, 3000, 40_000, 300_000)
    inputs = {k: [numbers("float32", lengths[k % 4], each, k) for each in range(size)] for k in range(12)}
    wants = {k: {knob: wanted(knob, "float32", "Sum", inputs[k]) for knob in KNOBS} for k in inputs}
    for k, by_knob in wants.items():
        assert len({want.tobytes() for want in by_knob.values()}) == 3 or k % 4 == 0, "values that tell knobs apart"
    values, met = {0: "none"}, set()
    for lap in range(30):
        handles = []
        for k in inputs:
            if rank == 0 and (k + lap) % 3 == 0:
                value = tuple(KNOBS)[(k // 3 + lap) % 3]
                values[engine.set_knobs(compression=value)] = value
            name, mine = f"tuned {k}", inputs[k][rank].copy()
            if k % 3 == 2:
                handles.append(engine.grouped_allreduce_async([mine], engine.Sum, name, compression=TUNED))
            else:
                handles.append(engine.allreduce_async_(mine, engine.Sum, name, compression=TUNED))
        with parts.part(f"lap {lap}"):
            results = [engine.synchronize(handle) for handle in handles]
            results = [got[0] if isinstance(got, list) else got for got in results]
            for k, got in enumerate(results):
                assert any(same("float32", got, want).all() for want in wants[k].values()), f"tuned {k}"
        check_same_on_all(results)
        rows = entries("tuned ")
        met |= {row["compression"] for row in rows}
        said = engine.allgather_object({row["entry"]: (row["knob_version"], row["compression"]) for row in rows})
        values = engine.broadcast_object(values, 0)
        with parts.part(f"entries of lap {lap}"):
            assert all(values[version] == knob for version, knob in said[rank].values()), "not what its version says"
            common = set.intersection(*map(set, said))
            assert common and all(each[entry] == said[0][entry] for entry in common for each in said)
    assert met == set(KNOBS)


@on_ranks(1, 2, 3, 4, world={"compression": "bf16"})
def test_other_collectives(parts: Parts, rank: int, size: int) -> None:
    """Covers groups, reduce-scatters, shared memory, uncompressed dtypes, ranks that have joined, and process sets."""
    part = engine.add_process_set(range(size - 1)) if size > 1 else engine.global_process_set
    memory = np.frombuffer(runtime.current_engine().share(4 * 30_000), np.float32)
    shared = [numbers("float32", 30_000, each) for each in range(size)]
    dtypes = ("float32", "int32", "float64", "float32", "float16")
    for lap, knob in enumerate(("as set", *TURNS)):
        if lap:
            turn(knob)
        knob = knob if lap else "bf16"
        for in_place in (False, True):
            with parts.part(f"{lap} a group as {knob}, in place {in_place}"):
                inputs = [[numbers(dtype, 50 + k, each, k) for k, dtype in enumerate(dtypes)] for each in range(size)]
                reduce = engine.grouped_allreduce_ if in_place else engine.grouped_allreduce
                got = reduce([each.copy() for each in inputs[rank]], engine.Sum, compression=TUNED)
                for k, dtype in enumerate(dtypes):
                    check_equal(dtype, got[k], wanted(knob, dtype, "Sum", [each[k] for each in inputs]))
        for dtype in ("float32", "float64", "int64"):
            rows = [numbers(dtype, (7, 33), each, lap) for each in range(size)]
            want = np.array_split(wanted(knob, dtype, "Sum", rows), size)[rank]
            with parts.part(f"{lap} a reduce-scatter of {dtype} as {knob}"):
                check_equal(dtype, engine.reducescatter(rows[rank], engine.Sum, compression=TUNED), want)
                for got in engine.grouped_reducescatter([rows[rank]] * 2, engine.Sum, compression=TUNED):
                    check_equal(dtype, got, want)
        for dtype in ("float16", "int32", "bool"):
            with parts.part(f"{lap} {dtype} is not compressed"):
                values = [numbers(dtype, 1000, each) for each in range(size)]
                got = engine.allreduce(values[rank], engine.Max, compression=TUNED)
                check_equal(dtype, got, expected(dtype, "Max", values))
        with parts.part(f"{lap} memory that ranks share, as {knob}"):
            memory[:] = shared[rank]
            got = engine.allreduce_(memory, engine.Average, "shared", compression=TUNED)
            check_equal("float32", np.array(got), wanted(knob, "float32", "Average", shared))
            entry = entries("shared")[-1]
            assert (entry["algorithm"] == "shared") == (knob == "none"), entry
            assert entry["bytes"] == (4 if knob == "none" else 2) * 30_000 and entry["compression"] == knob
        with parts.part(f"{lap} a process set keeps the setting"):
            values = [numbers("float32", 999, each, 3) for each in part.ranks]
            if part.included():
                got = engine.allreduce(values[part.rank() or 0], engine.Sum, compression=TUNED, process_set=part)
                held = "bf16" if size > 1 else knob
                check_equal("float32", got, wanted(held, "float32", "Sum", values))
                assert part.engine.knobs()["compression"] == held
        with parts.part(f"{lap} ranks that have joined, as {knob}"):
            if rank == 0:
                values = [numbers("float32", (9, 40), 0, lap), *[np.zeros((9, 40), np.float32)] * (size - 1)]
                want = wanted(knob, "float32", "Sum", values)
                check_equal("float32", engine.allreduce(values[0], engine.Sum, f"j{lap}", compression=TUNED), want)
                for got in engine.grouped_allreduce([values[0]] * 2, engine.Sum, f"g{lap}", compression=TUNED):
                    check_equal("float32", got, want)
                got = engine.reducescatter(values[0], engine.Sum, f"r{lap}", compression=TUNED)
                check_equal("float32", got, np.array_split(want, size)[0])
            assert 0 <= engine.join() < size


@on_ranks(1, 2, 3, 4, world={"cycle_time_ms": 10_000})
def test_bytes_and_batches(parts: Parts, rank: int, size: int) -> None:
    """Checks which tensors fuse, and that bytes count as they travel, even if the knob turns with a batch open."""
    ones, meetings = np.ones(1000, np.float32), itertools.count()

    def together(markers: list[Any], then: str | None = None) -> list[dict[str, Any]]:
        """Entries of tensors that all ranks have submitted before any of them waits; the same on all ranks."""
        since = runtime.current_engine().history()[-1]["entry"] + 1
        handles = [
            engine.allreduce_async(ones, engine.Sum, f"b{len(markers)}.{k}", compression=marker)
            for k, marker in enumerate(markers)
        ]
        if then and engine.rank() == 0:
            engine.set_knobs(compression=then)
        meet(f"batch.{next(meetings)}", rank, size)
        engine.barrier("behind")  # somebody waits: the batch closes
        for handle in handles:
            assert engine.synchronize(handle).tolist() == [engine.size()] * 1000
        return entries(f"b{len(markers)}.", since)

    def in_some_lap(markers: list[Any], fits: Callable[[list[dict[str, Any]]], bool]) -> bool:
        """Try up to five laps: names are new in the first, and a cycle may end in any."""
        return any(fits(together(markers)) for _ in range(5))

    every = [None, TUNED, Compression.bf16, Compression.fp16, TUNED, None]
    for knob, tuned in (("none", (4, 16_000)), ("bf16", (3, 6000)), ("fp16", (3, 6000))):
        turn(knob)
        with parts.part(f"what fuses with what is tuned, as {knob}"):
            rest = {"none": (2, 8000), "bf16": (1, 2000), "fp16": (1, 2000)}
            want = sorted((name, *what) for name, what in {**rest, knob: tuned}.items())
            got = lambda rows: sorted((row["compression"], row["tensors"], row["bytes"]) for row in rows)  # noqa: E731
            assert in_some_lap(every, lambda rows: got(rows) == want)  # noqa: B023
    for knob, most in (("none", 5), ("bf16", 10)):
        turn(knob, fusion_threshold=20_000)
        with parts.part(f"the threshold, as {knob}"):
            largest = [max(row["tensors"] for row in together([TUNED] * 10)) for _ in range(5)]
            assert max(largest) == most, largest
    turn("none", fusion_threshold=64 << 20)
    for lap in range(20):
        then = ("bf16", "none")[lap % 2]
        rows = together([TUNED] * 4, then)
        with parts.part(f"turned to {then} while a batch is open, {lap}"):
            assert sum(row["tensors"] for row in rows) == 4, rows
            for row in rows:
                assert row["bytes"] == row["tensors"] * (4000 if row["compression"] == "none" else 2000), rows


@on_ranks(1, 2, 3, 4, world={"compression": "none"})
def test_a_rank_that_means_another_compression_and_what_cannot_be_said(parts: Parts, rank: int, size: int) -> None:
    """Both are refused: ranks that disagree get a `MismatchError`, and compressed Adasum a `ValueError`."""
    x = np.ones(3, np.float32)
    for knob in ("none", "bf16"):
        turn(knob)
        for other, said in (
            (None, "float32[3]"),
            (Compression.bf16, "float32[3] compressed to bfloat16"),
            (Compression.fp16, "float32[3] compressed to float16"),
        ):
            with parts.part(f"tuned beside {said}, as {knob}"):
                mine = TUNED if rank == 0 else other
                if size == 1:
                    assert engine.allreduce(x, engine.Sum, "m", compression=mine).tolist() == [1.0] * 3
                    continue
                text = refused(
                    lambda: engine.allreduce(x, engine.Sum, "m", compression=mine),  # noqa: B023
                    "rank 0 sent allreduce sum float32[3] compressed as tuned, ",
                    MismatchError,
                )
                assert text.endswith(f"1 sent allreduce sum {said}" if size == 2 else f" sent allreduce sum {said}")
                text = refused(
                    lambda: engine.grouped_allreduce([x], engine.Sum, "g", compression=mine),  # noqa: B023
                    " compressed as tuned",
                    MismatchError,
                )
    with parts.part("after that"):
        got = engine.allreduce(x * np.float32(1 + 2**-12), engine.Average, "m", compression=TUNED)
        assert got.tolist() == [1.0] * 3  # as bf16
    with parts.part("what cannot be"):
        refused(lambda: engine.allreduce(x, engine.Adasum, compression=TUNED), "Adasum does not compress", ValueError)
        native = runtime.current_engine()
        refused(lambda: native.allreduce(x, x, None, engine.Adasum, 1.0, 1.0, False, "tuned"), "Adasum", ValueError)
        if rank == 0:
            for wrong in ("float16", "tuned", "", 3):
                refused(lambda: engine.set_knobs(compression=wrong), "compression", ConfigError)  # noqa: B023
                refused(lambda: native.set_knobs(compression=wrong), "none, fp16, bf16", ValueError)  # noqa: B023
            assert engine.knobs()["compression"] == "bf16"
        else:
            refused(lambda: engine.set_knobs(compression="none"), "rank 0 decides", EngineError)
    with parts.part("whether anything is tuned"):
        assert native.compressible == (rank == 0)
    engine.barrier()
    engine.shutdown()
    engine.init(compression="fp16")
    with parts.part("a new world knows of nothing tuned"):
        table = np.arange(6, dtype=np.int32)
        assert engine.allreduce(table, engine.Max, compression=TUNED).tolist() == table.tolist()
        engine.allreduce(x, compression=Compression.fp16)
        assert not runtime.current_engine().compressible and engine.knobs()["compression"] == "fp16"
    refused(lambda: engine.init(compression="none"), "running", ConfigError)
    assert MARKERS.keys() == {each for each in KNOBS.values() if each}
