"""Broadcast, allgather, barrier, handles, knobs and shared tensors. Runs on every rank."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np

import engine
from engine import runtime

from .on_ranks import Cases, check_equal, check_same_on_all, numbers, refused, small_numbers
from .operation_table import DTYPES, MOVED, expected


def broadcasts() -> int:
    """From every root, in and out of place, alone and fused, of every dtype."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()
    plain = [*(dtype for dtype in DTYPES if dtype != "bfloat16"), *MOVED]
    for root in range(size):
        for count in (0, 1, 7, 40_000, 1_200_001):
            want = numbers("float32", count, root)
            mine = numbers("float32", count, rank)
            apart = engine.broadcast(mine, root)
            inplace = mine.copy()
            result = engine.broadcast_(inplace, root)
            with cases.case(f"root {root}, {count} elements"):
                assert result is inplace
                assert mine.tobytes() == numbers("float32", count, rank).tobytes(), "the input was written to"
                assert apart.tobytes() == inplace.tobytes() == want.tobytes()
        handles = [
            engine.broadcast_async_(numbers(dtype, (3, 50 + k), rank, k), root, f"{root} {dtype} {k}")
            for dtype in plain
            for k in range(20)
        ]
        with cases.case(f"root {root}, fused"):
            for handle, (dtype, k) in zip(handles, ((dtype, k) for dtype in plain for k in range(20)), strict=True):
                assert engine.synchronize(handle).tobytes() == numbers(dtype, (3, 50 + k), root, k).tobytes()
    with cases.case("all roots at once"):
        handles = [engine.broadcast_async(np.full(9, rank), k % size, f"all {k}") for k in range(50)]
        assert [engine.synchronize(handle)[8] for handle in handles] == [k % size for k in range(50)]
    return cases.done(6 * size + 1)


def allgathers() -> int:
    """Rows that differ between ranks and calls, none on some ranks or on all, and large ones."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()
    for name, rows in {
        "equal": lambda rank, turn: 3,
        "uneven": lambda rank, turn: rank + 1,
        "none on rank 0": lambda rank, turn: rank,
        "some on rank 0 only": lambda rank, turn: 5 if rank == 0 else 0,
        "none anywhere": lambda rank, turn: 0,
        "other rows in every call": lambda rank, turn: (rank * 7 + turn * 3) % 5,
        "very uneven": lambda rank, turn: 30_000 if rank == size - 1 else 1,
    }.items():
        for rest in ((), (1,), (3, 4), (0,), (33,)):
            for dtype in ("float32", "int8", "bool", "float64", "uint16", "uint64", "complex64"):
                with cases.case(f"{name} {rest} {dtype}"):
                    for turn in range(3):
                        parts = [small_numbers(dtype, (rows(other, turn), *rest), other, turn) for other in range(size)]
                        got = engine.allgather(parts[rank], f"{name} {rest} {dtype}")
                        check_equal(dtype, got, np.concatenate(parts))
                        got[...] = 1  # It is the caller's own.
    with cases.case("scalars"):
        assert engine.allgather(np.array(rank, np.int32)).tolist() == list(range(size))
    with cases.case("more than the slots hold"):
        parts = [small_numbers("float32", (100_000 * (other + 1), 11), other) for other in range(size)]
        check_equal("float32", engine.allgather(parts[rank]), np.concatenate(parts))
    with cases.case("rows that are not contiguous"):
        parts = [small_numbers("float32", (6, 5 + other), other) for other in range(size)]
        check_equal("float32", engine.allgather(parts[rank].T), np.concatenate([part.T for part in parts]))
    with cases.case("many outstanding"):
        handles = [engine.allgather_async(np.full((k % 3 * rank, 2), k)) for k in range(400)]
        for k, handle in enumerate(handles):
            got = engine.synchronize(handle)
            assert got.shape == (k % 3 * size * (size - 1) // 2, 2) and (got == k).all()
            assert engine.synchronize(handle) is got
    return cases.done(7 * 5 * 7 + 4)


def waiting() -> int:
    """A barrier waits, poll does not, synchronize may be called twice."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()
    with cases.case("a barrier waits for the last"):
        for late in range(size):
            if rank == late:
                time.sleep(0.1)  # This is the lateness itself, not a wait for a state.
            arrived = time.monotonic_ns()
            engine.barrier(f"barrier {late}")
            left = time.monotonic_ns()
            times = engine.allgather(np.array([[arrived, left]], np.int64))
            assert times[:, 1].min() >= times[:, 0].max(), "somebody left before all had arrived"
    with cases.case("unnamed barriers"):
        for _ in range(300):
            engine.barrier()
    with cases.case("poll"):
        # Rank 0's operation cannot be done before rank 1 has brought its own, which waits for rank 0's poll.
        mine = np.full(5, rank, np.float32)
        if rank == 0:
            handle = engine.allreduce_async(mine, engine.Sum, "polled")
            assert size == 1 or not engine.poll(handle)
            assert size == 1 or "in flight" in repr(handle)
            engine.barrier("polled it")
        else:
            engine.barrier("polled it")
            handle = engine.allreduce_async(mine, engine.Sum, "polled")
        end = time.monotonic() + 10
        while not engine.poll(handle):
            assert time.monotonic() < end, (
                "never done, though every rank has brought it: nobody waits, but the cycle ends"
            )
            time.sleep(0.001)
        assert "done" in repr(handle)
        first = engine.synchronize(handle)
        assert engine.synchronize(handle) is first and handle.wait() is first
        assert first.tolist() == [size * (size - 1) / 2] * 5
    with cases.case("a handle keeps its tensors"):
        handles = [engine.allreduce_async_(np.full(10_000, rank + k, np.float64), engine.Sum) for k in range(50)]
        for k, handle in enumerate(handles):
            assert engine.synchronize(handle)[9_999] == size * (size - 1) / 2 + size * k
    with cases.case("a blocking call waits for no cycle"):
        engine.shutdown()
        engine.init(cycle_time_ms=10_000)
        start = time.monotonic()
        for k in range(20):
            engine.allreduce(np.ones(3), engine.Sum, "blocking")
            engine.allreduce(np.ones(3), engine.Sum)
            engine.synchronize(engine.broadcast_async(np.ones(3), k % size))
        assert time.monotonic() - start < 9
    return cases.done(5)


def knobs() -> int:
    """A change on rank 0 is seen by every rank at the same schedule entry; other ranks may not change anything."""
    engine.init(cycle_time_ms=1)
    cases, rank = Cases(), engine.rank()
    changes: list[dict[str, Any]] = [
        {"fusion_threshold": 0},
        {"cycle_time_ms": 3},
        {"stores": "streaming"},
        {"chunk_bytes": 65536},
        {"fusion_threshold": 1 << 20, "cycle_time_ms": 0.0, "stores": "cached", "chunk_bytes": 1 << 20},
        {"stores": "auto"},
        {"compression": "bf16"},
    ]
    now = engine.knobs()
    with cases.case("before any change"):
        assert now["version"] == 0 and now["cycle_time_ms"] == 1 and now["fusion_threshold"] == 64 << 20
    for version, change in enumerate(changes, 1):
        with cases.case(f"change {version}: {change}"):
            handles = [engine.allreduce_async(np.ones(1000, np.float32), engine.Sum, f"{k}") for k in range(100)]
            if rank == 0:
                assert engine.set_knobs(**change) == version
            handles += [engine.allreduce_async(np.ones(1000, np.float32), engine.Sum, f"{k}+") for k in range(100)]
            for handle in handles:
                engine.synchronize(handle)
            engine.barrier()
            seen = engine.knobs()
            now = {**now, **change, "version": version, "entry": seen["entry"]}
            assert seen == now, (seen, now)
            rows = {row["entry"]: row for row in runtime.engine().history()}
            keys = ("type", "kind", "knob_version", "tensors", "bytes", "name", "algorithm", "stores")
            mine = {entry: [row[key] for key in keys] for entry, row in rows.items()}
            # The change is at one entry, and the entries are the same on every rank.
            assert {entry for entry, row in rows.items() if row["knob_version"] == version} == {
                entry for entry in rows if entry >= seen["entry"]
            }
            records = engine.allgather_object(mine)
            common = set.intersection(*(set(record) for record in records))
            assert seen["entry"] in common and len(common) > 100
            assert all(record[entry] == mine[entry] for entry in common for record in records)
            assert len({str(each) for each in engine.allgather_object(seen)}) == 1
    with cases.case("a threshold of 0 sends every tensor alone, a large one fuses"):
        for threshold in (0, 64 << 20):
            if rank == 0:
                engine.set_knobs(fusion_threshold=threshold, cycle_time_ms=10_000)
            engine.barrier("before")
            before = engine.counters()
            handles = [engine.allreduce_async(np.ones(1000, np.float32), engine.Sum, f"{k}") for k in range(100)]
            engine.barrier("behind")  # Somebody waits: the batch closes with what all ranks have brought.
            for handle in handles:
                engine.synchronize(handle)
            after = engine.counters()
            entries, tensors = (after[key] - before[key] for key in ("entries", "tensors"))
            first_time = 1 if threshold == 0 else 0  # The barrier's name is defined.
            assert tensors == 101
            assert entries == 101 + first_time if threshold == 0 else entries <= 10, entries
    if rank == 0:
        with cases.case("values that cannot be"):
            refused(
                lambda: engine.set_knobs(chunk_size=65536), "there is no knob 'chunk_size'", engine.errors.ConfigError
            )
            refused(lambda: engine.set_knobs(kernels="plain"), "there is no knob 'kernels'", engine.errors.ConfigError)
            refused(lambda: engine.set_knobs(fusion_threshold=-1), "fusion_threshold", engine.errors.ConfigError)
            refused(lambda: engine.set_knobs(cycle_time_ms=-1), "cycle_time_ms", engine.errors.ConfigError)
            refused(lambda: engine.set_knobs(stores="slow"), "stores", engine.errors.ConfigError)
            refused(lambda: engine.set_knobs(chunk_bytes=3), "chunk_bytes", engine.errors.ConfigError)
    else:
        with cases.case("refused on other ranks"):
            refused(
                lambda: engine.set_knobs(cycle_time_ms=7),
                f"was called on rank {rank}; rank 0 decides",
                engine.errors.EngineError,
            )
            refused(lambda: runtime.engine().set_knobs(cycle_time_ms=7.0), "rank 0", engine.errors.EngineError)
    engine.barrier()
    return cases.done(len(changes) + 3)


def shared_tensors() -> int:
    """Tensors in the shared segment: alone, fused, beside private ones, and private on some ranks."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()
    for dtype, op, pre, post in (
        ("float32", "Sum", 1.0, 1.0),
        ("float16", "Average", 0.3, 1.7),
        ("int8", "Sum", 1.0, 1.0),
        ("float64", "Max", 1.0, 1.0),
        ("bool", "Min", 1.0, 1.0),
    ):
        item = np.dtype(dtype).itemsize
        counts = [1, 7, 64, 1000, 33_333, 900_001]
        memory = runtime.engine().share(sum(counts) * item + 64)
        assert not any(memory[:1000]), "shared memory begins zeroed"
        whole = np.frombuffer(memory, dtype, sum(counts))
        starts = np.cumsum([0, *counts])
        views = [whole[a:b] for a, b in itertools.pairwise(starts)]
        inputs = [[numbers(dtype, count, other, count) for count in counts] for other in range(size)]
        want = [expected(dtype, op, [each[k] for each in inputs], pre, post) for k in range(len(counts))]

        def fill(views: Any = views, inputs: Any = inputs) -> None:
            for view, values in zip(views, inputs[rank], strict=True):
                view[:] = values

        for turn in range(2):
            fill()
            for k, view in enumerate(views):
                engine.allreduce_(view, getattr(engine, op), f"{dtype} {k}", pre, post)
            rows = [
                row for row in runtime.engine().history() if row["type"] == "batch" and row["name"].startswith(dtype)
            ]
            algorithms = {row["algorithm"] for row in rows[-len(views) :]}
            with cases.case(f"alone {dtype} {op} {turn}"):
                assert algorithms == {"shared"}
                for view, values in zip(views, want, strict=True):
                    check_equal(dtype, view, values)
            fill()
            private = [values.copy() for values in inputs[rank]]
            handles = []
            for k, view in enumerate(views):
                handles.append(engine.allreduce_async_(view, getattr(engine, op), f"{dtype} {k}", pre, post))
                handles.append(engine.allreduce_async_(private[k], getattr(engine, op), f"{dtype} {k}p", pre, post))
            for handle in handles:
                engine.synchronize(handle)
            with cases.case(f"fused, beside private ones {dtype} {op} {turn}"):
                for got in (views, private):
                    for view, values in zip(got, want, strict=True):
                        check_equal(dtype, view, values)
            fill()
            private = [values.copy() for values in inputs[rank]]
            mixed = [view if (rank + k + turn) % 2 else private[k] for k, view in enumerate(views)]
            handles = [
                engine.allreduce_async_(tensor, getattr(engine, op), f"{dtype} {k}", pre, post)
                for k, tensor in enumerate(mixed)
            ]
            for handle in handles:
                engine.synchronize(handle)
            with cases.case(f"shared on some ranks only {dtype} {op} {turn}"):
                for tensor, values in zip(mixed, want, strict=True):
                    check_equal(dtype, tensor, values)
                if size > 1:
                    check_same_on_all(mixed)
            fill()
            apart = [
                engine.allreduce(view, getattr(engine, op), f"{dtype} {k}", pre, post) for k, view in enumerate(views)
            ]
            with cases.case(f"out of place {dtype} {op} {turn}"):
                for got, values, view, mine in zip(apart, want, views, inputs[rank], strict=True):
                    check_equal(dtype, got, values)
                    assert view.tobytes() == mine.tobytes()
    with cases.case("at other places on other ranks"):
        whole = np.frombuffer(runtime.engine().share(8000), np.float32)
        view = whole[rank * 100 : rank * 100 + 100]
        view[:] = rank
        engine.allreduce_(view, engine.Sum, "places")
        assert (view == size * (size - 1) / 2).all()
        assert (whole[size * 100 :] == 0).all()
    with cases.case("broadcast and allgather of a shared tensor"):
        whole[:] = rank
        engine.broadcast_(whole[:500], size - 1)
        assert (whole[:500] == size - 1).all() and (whole[500:] == rank).all()
        assert engine.allgather(whole[:2] * 0 + rank).tolist() == [r for r in range(size) for _ in range(2)]
    with cases.case("sizes that differ, and none"):
        if size > 1:
            refused(lambda: runtime.engine().share(4096 * (rank + 1)), "bytes", engine.errors.MismatchError)
        refused(lambda: runtime.engine().share(0), "at least one", ValueError)
    with cases.case("a region after that"):
        again = np.frombuffer(runtime.engine().share(4000), np.float32)
        again[:] = rank + 1
        engine.allreduce_(again, engine.Sum, "again")
        assert (again == size * (size + 1) / 2).all()
    return cases.done(5 * 2 * 4 + 4)
