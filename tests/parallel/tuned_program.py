"""Tensors whose compression is a knob, held against NumPy. Runs on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import engine
from engine import Compression, runtime
from engine.errors import ConfigError, EngineError, MismatchError

from .compression_program import MANY, MARKERS, SCALES, compressed
from .on_ranks import Cases, check_equal, check_same_on_all, numbers, refused
from .operation_table import OPS, Array, expected, same

KNOBS: dict[str, str | None] = {"none": None, "bf16": "bfloat16", "fp16": "float16"}
TURNS = ("none", "bf16", "fp16", "none")  # what one follows another
TUNED = Compression.tuned


def turn(knob: str, **others: Any) -> None:
    """Set the knob; it holds for all that comes after."""
    if engine.rank() == 0:
        engine.set_knobs(compression=knob, **others)
    engine.barrier()


def wanted(knob: str, dtype: str, op: str, values: list[Array], pre: float = 1.0, post: float = 1.0) -> Array:
    """The result of an allreduce of one array of each rank."""
    wire = KNOBS[knob]
    if wire is None or dtype not in ("float32", "float64"):
        return expected(dtype, op, values, pre, post)
    return compressed(dtype, wire, op, values, pre, post)


def entries(prefix: str, since: int = 0) -> list[dict[str, Any]]:
    """What moved data under names that begin so, from an entry on."""
    history = runtime.engine().history()
    return [
        row for row in history if row["type"] == "batch" and row["name"].startswith(prefix) and row["entry"] >= since
    ]


def every_value() -> int:
    """Every operation and scale with every value: fused with each other and with what is not tuned, then one by one."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()
    plan = [
        (dtype, op, pre, post, (37, 20_011)[k % 2])
        for dtype in ("float32", "float64")
        for k, op in enumerate(OPS)
        for pre, post in SCALES
    ]
    plan += [(dtype, "Average", 1.0, 1.0, MANY) for dtype in ("float32", "float64")]
    for lap, knob in enumerate(TURNS):
        turn(knob)
        handles, plain, halves = [], [], []
        for index, (dtype, op, pre, post, count) in enumerate(plan):
            submit = engine.allreduce_async_ if index % 2 else engine.allreduce_async
            mine = numbers(dtype, count, rank, index)
            handles.append(submit(mine, getattr(engine, op), f"{index}", pre, post, compression=TUNED))
            threes = np.full(3, rank, dtype)
            plain.append(engine.allreduce_async(threes, engine.Sum, f"plain {index}"))
            halves.append(engine.allreduce_async(threes, engine.Sum, f"half {index}", compression=Compression.bf16))
        results = []
        for index, (dtype, op, pre, post, count) in enumerate(plan):
            with cases.case(f"{lap} fused {dtype} as {knob} {op} x{pre} x{post} [{count}]"):
                got = engine.synchronize(handles[index])
                results.append(got)
                values = [numbers(dtype, count, each, index) for each in range(size)]
                check_equal(dtype, got, wanted(knob, dtype, op, values, pre, post))
                for each in (plain[index], halves[index]):
                    assert engine.synchronize(each).tolist() == [size * (size - 1) / 2] * 3
        check_same_on_all(results)
        for index, (dtype, op, pre, post, count) in enumerate(plan):
            mine = numbers(dtype, count, rank, index)
            got = engine.allreduce(mine, getattr(engine, op), None, pre, post, compression=TUNED)
            with cases.case(f"{lap} alone {dtype} as {knob} {op} x{pre} x{post} [{count}]"):
                assert got.tobytes() == results[index].tobytes(), "other bits than in a fused batch"
    return cases.done(2 * len(plan) * len(TURNS))


def switched_in_flight() -> int:
    """Turned at any moment: each result is of one value in full, which its entry tells, and equal on all ranks."""
    engine.init(cycle_time_ms=0.2)
    cases, rank, size = Cases(), engine.rank(), engine.size()
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
        with cases.case(f"lap {lap}"):
            results = [engine.synchronize(handle) for handle in handles]
            results = [got[0] if isinstance(got, list) else got for got in results]
            for k, got in enumerate(results):
                assert any(same("float32", got, want).all() for want in wants[k].values()), f"tuned {k}"
        check_same_on_all(results)
        rows = entries("tuned ")
        met |= {row["compression"] for row in rows}
        said = engine.allgather_object({row["entry"]: (row["knob_version"], row["compression"]) for row in rows})
        values = engine.broadcast_object(values, 0)
        with cases.case(f"entries of lap {lap}"):
            assert all(values[version] == knob for version, knob in said[rank].values()), "not what its version says"
            common = set.intersection(*map(set, said))
            assert common and all(each[entry] == said[0][entry] for entry in common for each in said)
    assert met == set(KNOBS)
    return cases.done(60)


def other_collectives() -> int:
    """Groups, reduce-scatters, shared memory, what is not compressed, ranks that have joined, process sets."""
    engine.init(compression="bf16")
    cases, rank, size = Cases(), engine.rank(), engine.size()
    part = engine.add_process_set(range(size - 1)) if size > 1 else engine.global_process_set
    memory = np.frombuffer(runtime.engine().share(4 * 30_000), np.float32)
    shared = [numbers("float32", 30_000, each) for each in range(size)]
    dtypes = ("float32", "int32", "float64", "float32", "float16")
    for lap, knob in enumerate(("as set", *TURNS)):
        if lap:
            turn(knob)
        knob = knob if lap else "bf16"
        for in_place in (False, True):
            with cases.case(f"{lap} a group as {knob}, in place {in_place}"):
                inputs = [[numbers(dtype, 50 + k, each, k) for k, dtype in enumerate(dtypes)] for each in range(size)]
                reduce = engine.grouped_allreduce_ if in_place else engine.grouped_allreduce
                got = reduce([each.copy() for each in inputs[rank]], engine.Sum, compression=TUNED)
                for k, dtype in enumerate(dtypes):
                    check_equal(dtype, got[k], wanted(knob, dtype, "Sum", [each[k] for each in inputs]))
        for dtype in ("float32", "float64", "int64"):
            rows = [numbers(dtype, (7, 33), each, lap) for each in range(size)]
            want = np.array_split(wanted(knob, dtype, "Sum", rows), size)[rank]
            with cases.case(f"{lap} a reduce-scatter of {dtype} as {knob}"):
                check_equal(dtype, engine.reducescatter(rows[rank], engine.Sum, compression=TUNED), want)
                for got in engine.grouped_reducescatter([rows[rank]] * 2, engine.Sum, compression=TUNED):
                    check_equal(dtype, got, want)
        for dtype in ("float16", "int32", "bool"):
            with cases.case(f"{lap} {dtype} is not compressed"):
                values = [numbers(dtype, 1000, each) for each in range(size)]
                got = engine.allreduce(values[rank], engine.Max, compression=TUNED)
                check_equal(dtype, got, expected(dtype, "Max", values))
        with cases.case(f"{lap} memory that ranks share, as {knob}"):
            memory[:] = shared[rank]
            got = engine.allreduce_(memory, engine.Average, "shared", compression=TUNED)
            check_equal("float32", np.array(got), wanted(knob, "float32", "Average", shared))
            entry = entries("shared")[-1]
            assert (entry["algorithm"] == "shared") == (knob == "none"), entry
            assert entry["bytes"] == (4 if knob == "none" else 2) * 30_000 and entry["compression"] == knob
        with cases.case(f"{lap} a process set keeps the setting"):
            values = [numbers("float32", 999, each, 3) for each in part.ranks]
            if part.included():
                got = engine.allreduce(values[part.rank() or 0], engine.Sum, compression=TUNED, process_set=part)
                held = "bf16" if size > 1 else knob
                check_equal("float32", got, wanted(held, "float32", "Sum", values))
                assert part.engine.knobs()["compression"] == held
        with cases.case(f"{lap} ranks that have joined, as {knob}"):
            if rank == 0:
                values = [numbers("float32", (9, 40), 0, lap), *[np.zeros((9, 40), np.float32)] * (size - 1)]
                want = wanted(knob, "float32", "Sum", values)
                check_equal("float32", engine.allreduce(values[0], engine.Sum, f"j{lap}", compression=TUNED), want)
                for got in engine.grouped_allreduce([values[0]] * 2, engine.Sum, f"g{lap}", compression=TUNED):
                    check_equal("float32", got, want)
                got = engine.reducescatter(values[0], engine.Sum, f"r{lap}", compression=TUNED)
                check_equal("float32", got, np.array_split(want, size)[0])
            assert 0 <= engine.join() < size
    return cases.done(5 * (2 + 3 + 3 + 1 + 1 + 1))


def bytes_and_batches() -> int:
    """What fuses with what, and that bytes are counted as they travel, also if the knob is turned with a batch open."""
    engine.init(cycle_time_ms=10_000)
    cases = Cases()
    ones = np.ones(1000, np.float32)

    def together(markers: list[Any], then: str | None = None) -> list[dict[str, Any]]:
        """Entries of tensors that are ready at much the same time; the same on all ranks."""
        since = runtime.engine().history()[-1]["entry"] + 1
        handles = [
            engine.allreduce_async(ones, engine.Sum, f"b{len(markers)}.{k}", compression=marker)
            for k, marker in enumerate(markers)
        ]
        if then and engine.rank() == 0:
            engine.set_knobs(compression=then)
        engine.barrier("behind")  # somebody waits: the batch closes
        for handle in handles:
            assert engine.synchronize(handle).tolist() == [engine.size()] * 1000
        return entries(f"b{len(markers)}.", since)

    def in_some_lap(markers: list[Any], fits: Callable[[list[dict[str, Any]]], bool]) -> bool:
        """Which of them are seen at the same time depends on the timing."""
        return any(fits(together(markers)) for _ in range(50))

    every = [None, TUNED, Compression.bf16, Compression.fp16, TUNED, None]
    for knob, tuned in (("none", (4, 16_000)), ("bf16", (3, 6000)), ("fp16", (3, 6000))):
        turn(knob)
        with cases.case(f"what fuses with what is tuned, as {knob}"):
            rest = {"none": (2, 8000), "bf16": (1, 2000), "fp16": (1, 2000)}
            want = sorted((name, *what) for name, what in {**rest, knob: tuned}.items())
            got = lambda rows: sorted((row["compression"], row["tensors"], row["bytes"]) for row in rows)  # noqa: E731
            assert in_some_lap(every, lambda rows: got(rows) == want)  # noqa: B023
    for knob, most in (("none", 5), ("bf16", 10)):
        turn(knob, fusion_threshold=20_000)
        with cases.case(f"the threshold, as {knob}"):
            largest = [max(row["tensors"] for row in together([TUNED] * 10)) for _ in range(50)]
            assert max(largest) == most, largest
    turn("none", fusion_threshold=64 << 20)
    for lap in range(20):
        then = ("bf16", "none")[lap % 2]
        rows = together([TUNED] * 4, then)
        with cases.case(f"turned to {then} while a batch is open, {lap}"):
            assert sum(row["tensors"] for row in rows) == 4, rows
            for row in rows:
                assert row["bytes"] == row["tensors"] * (4000 if row["compression"] == "none" else 2000), rows
    return cases.done(3 + 2 + 20)


def disagreement() -> int:
    """A rank that means another compression, and what cannot be said."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()
    x = np.ones(3, np.float32)
    for knob in ("none", "bf16"):
        turn(knob)
        for other, said in (
            (None, "float32[3]"),
            (Compression.bf16, "float32[3] compressed to bfloat16"),
            (Compression.fp16, "float32[3] compressed to float16"),
        ):
            with cases.case(f"tuned beside {said}, as {knob}"):
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
    with cases.case("after that"):
        got = engine.allreduce(x * np.float32(1 + 2**-12), engine.Average, "m", compression=TUNED)
        assert got.tolist() == [1.0] * 3  # as bf16
    with cases.case("what cannot be"):
        refused(lambda: engine.allreduce(x, engine.Adasum, compression=TUNED), "Adasum does not compress", ValueError)
        native = runtime.engine()
        refused(lambda: native.allreduce(x, x, None, engine.Adasum, 1.0, 1.0, False, "tuned"), "Adasum", ValueError)
        if rank == 0:
            for wrong in ("float16", "tuned", "", 3):
                refused(lambda: engine.set_knobs(compression=wrong), "compression", ConfigError)  # noqa: B023
                refused(lambda: native.set_knobs(compression=wrong), "none, fp16, bf16", ValueError)  # noqa: B023
            assert engine.knobs()["compression"] == "bf16"
        else:
            refused(lambda: engine.set_knobs(compression="none"), "rank 0 decides", EngineError)
    with cases.case("whether anything is tuned"):
        assert native.compressible == (rank == 0)
    engine.barrier()
    engine.shutdown()
    engine.init(compression="fp16")
    with cases.case("a new world knows of nothing tuned"):
        table = np.arange(6, dtype=np.int32)
        assert engine.allreduce(table, engine.Max, compression=TUNED).tolist() == table.tolist()
        engine.allreduce(x, compression=Compression.fp16)
        assert not runtime.engine().compressible and engine.knobs()["compression"] == "fp16"
    refused(lambda: engine.init(compression="none"), "running", ConfigError)
    assert MARKERS.keys() == {each for each in KNOBS.values() if each}
    return cases.done(6 + 4)
