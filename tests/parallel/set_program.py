"""Process sets and join. Runs on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import engine
from engine import ProcessSet

from .compression_program import KINDS, MARKERS, compressed
from .on_ranks import Cases, check_equal, check_same_on_all, numbers, refused, small_numbers
from .operation_table import Array, expected

ERROR = engine.errors.EngineError


def everything(cases: Cases, label: str, members: ProcessSet) -> None:
    """Every collective in one set, held against NumPy."""
    ranks, me = members.ranks, engine.rank()
    place = ranks.index(me)
    with cases.case(f"{label}: who"):
        assert members.included() and members.rank() == place and members.size() == len(ranks)
    for op in ("Sum", "Average", "Min", "Max", "Product"):
        for shape in ((5,), (70_000,)):
            inputs = [small_numbers("float32", shape, rank) for rank in ranks]
            got = engine.allreduce(inputs[place], getattr(engine, op), process_set=members)
            with cases.case(f"{label}: allreduce {op} {shape}"):
                check_equal("float32", got, expected("float32", op, inputs))
    for root in ranks:
        values = numbers("int64", (3, 4), me)
        got = engine.broadcast(values, root, process_set=members)
        with cases.case(f"{label}: broadcast from {root}"):
            check_equal("int64", got, numbers("int64", (3, 4), root))
    got = engine.allgather(np.full((place + 1, 2), me), process_set=members)
    with cases.case(f"{label}: allgather"):
        assert got[:, 0].tolist() == [rank for k, rank in enumerate(ranks) for _ in range(k + 1)]
    got, counts = engine.alltoall(np.arange(len(ranks)) + 10 * me, [1] * len(ranks), process_set=members)
    with cases.case(f"{label}: alltoall"):
        assert got.tolist() == [10 * rank + place for rank in ranks] and counts.tolist() == [1] * len(ranks)
    got = engine.reducescatter(np.arange(len(ranks) * 2.0), engine.Sum, process_set=members)
    with cases.case(f"{label}: reducescatter"):
        assert got.tolist() == [2.0 * place * len(ranks), (2.0 * place + 1) * len(ranks)]
    group = [np.full(3, me, np.float32), np.full((2, 2), me, np.int64)]
    got = engine.grouped_allreduce(group, engine.Sum, process_set=members)
    with cases.case(f"{label}: grouped"):
        assert (got[0] == sum(ranks)).all() and (got[1] == sum(ranks)).all()
    engine.barrier(process_set=members)
    objects = engine.allgather_object({"rank": me}, process_set=members)
    shared = engine.broadcast_object(("from", me), ranks[-1], process_set=members)
    with cases.case(f"{label}: objects"):
        assert [each["rank"] for each in objects] == list(ranks) and shared == ("from", ranks[-1])
    for dtype, wire in KINDS:
        inputs = [small_numbers(dtype, (2 * len(ranks) + 1, 3001), rank) for rank in ranks]
        want = compressed(dtype, wire, "Average", inputs)
        options: dict[str, Any] = {"process_set": members, "compression": MARKERS[wire]}
        whole = engine.allreduce(inputs[place], **options)
        share = engine.reducescatter(inputs[place], **options)
        (grouped, left_alone) = engine.grouped_allreduce([inputs[place], inputs[place].astype(np.int32)], **options)
        (grouped_share,) = engine.grouped_reducescatter([inputs[place]], **options)
        with cases.case(f"{label}: {dtype} as {wire}"):
            check_equal(dtype, whole, want)
            check_equal(dtype, grouped, want)
            check_equal("int32", left_alone, expected("int32", "Average", [each.astype(np.int32) for each in inputs]))
            check_equal(dtype, share, np.array_split(want, len(ranks))[place])
            check_equal(dtype, grouped_share, np.array_split(want, len(ranks))[place])
    with cases.case(f"{label}: refusals"):
        stranger = next((rank for rank in range(engine.size() + 1) if rank not in ranks), 0)
        refused(
            lambda: engine.broadcast(np.ones(1), stranger, process_set=members),
            f"root rank {stranger} is not in this",
            ValueError,
        )


def process_sets(size: int) -> int:
    """Static, dynamic and overlapping sets."""
    sets = [ProcessSet([size - 1])] if size > 1 else []
    engine.init(process_sets=sets, shutdown_timeout=1.0)
    cases, me = Cases(), engine.rank()
    everything(cases, "global", engine.global_process_set)
    choices: list[Sequence[int]] = [range(0, size, 2), range(1, size, 2), range(size - 1), [size - 1, 0]]
    for choice in choices:
        ranks = tuple(sorted(set(choice)))
        if ranks and ranks != tuple(range(size)) and all(ranks != each.ranks for each in sets):
            sets.append(engine.add_process_set(ranks))
    with cases.case("numbers"):
        assert [each.process_set_id for each in sets] == list(range(1, len(sets) + 1))
    for members in sets:
        if size > 1 and members.included():
            everything(cases, str(members), members)
        elif size > 1:
            with cases.case(f"{members} without us"):
                assert members.rank() is None and members.size() == len(members.ranks)
                refused(lambda each=members: engine.barrier(process_set=each), f"rank {me} is not in", ERROR)
    mine = [each for each in (engine.global_process_set, *sets) if each.included()]
    ours = np.full(1000, me, np.int64)
    handles = [  # One name in all sets at once, brought in another order on every rank.
        (members, engine.allreduce_async(ours, engine.Sum, "x", process_set=members))
        for members in mine[me % len(mine) :] + mine[: me % len(mine)]
    ]
    for members, handle in reversed(handles):
        got = engine.synchronize(handle)
        with cases.case(f"{members}: overlapping"):
            assert (got == sum(members.ranks)).all()
    if size > 1:
        with cases.case("another set on another rank"):
            text = refused(
                lambda: engine.add_process_set([0] if me else [0, 1]), "disagree on the process set to add", ERROR
            )
            assert "rank 0: [0, 1]" in text
        with cases.case("no such rank"):
            refused(lambda: engine.add_process_set([0, size]), f"ranks 0 to {size - 1}, not [0, {size}]", ValueError)
        with cases.case("there already"):
            refused(lambda: engine.add_process_set(list(range(size))), "already: global_process_set", ValueError)
        with cases.case("ranks twice"):
            refused(lambda: ProcessSet([0, 0]), "each rank once", ValueError)
        mismatch = sets[-1]
        if mismatch.included() and mismatch.size() > 1:
            with cases.case("a mismatch names the world's ranks"):
                text = refused(
                    lambda: engine.allreduce(np.ones(1 + (mismatch.rank() or 0)), name="m", process_set=mismatch),
                    "ranks disagree on 'm'",
                    engine.errors.MismatchError,
                )
                assert all(f"rank {rank} sent" in text for rank in mismatch.ranks[:2])
        for members in sets:
            assert engine.remove_process_set(members)
            assert not engine.remove_process_set(members)
            with cases.case(f"{members} was removed"):
                refused(members.included, "is not there", engine.errors.NotInitializedError)
        pending_removal(cases)
        again = engine.add_process_set(sets[-1])
        if again.included():
            everything(cases, "again", again)
    check_same_on_all([np.ones(1)])
    return cases.done()


def pending_removal(cases: Cases) -> None:
    """A set in which a rank waits for another is not removed, and goes on."""
    me = engine.rank()
    part = engine.add_process_set([0, 1]) if engine.size() > 2 else None
    if part is None:
        return
    handle = engine.allreduce_async(np.ones(4), engine.Sum, "alone", process_set=part) if me == 0 else None
    with cases.case("removal while something waits"):
        said = refused(lambda: engine.remove_process_set(part), "cannot be removed: rank 0 has waited", ERROR)
        assert "'alone'" in said
    if me == 1:
        handle = engine.allreduce_async(np.ones(4), engine.Sum, "alone", process_set=part)
    with cases.case("the set goes on"):
        assert handle is None or (engine.synchronize(handle) == 2).all()
    assert engine.remove_process_set(part)
    if part.process_set_id is None and me < 2:
        with cases.case("removed"):
            refused(lambda: engine.barrier(process_set=part), "is not there", engine.errors.NotInitializedError)


def independence() -> dict[str, float]:
    """Two pairs that share no rank: one waits for its other rank, and the other pair goes on meanwhile."""
    engine.init()
    pairs = [engine.add_process_set([0, 1]), engine.add_process_set([2, 3])]
    rank = engine.rank()
    mine = pairs[rank // 2]
    engine.allreduce(np.ones(10), name="x", process_set=mine)
    engine.barrier()
    begun = time.monotonic()
    if rank == 1:
        time.sleep(1.0)
    for _ in range(1 if rank < 2 else 50):
        engine.allreduce(np.ones(1000), name="x", process_set=mine)
    return {"seconds": time.monotonic() - begun}


def overlap() -> dict[str, float]:
    """Rank 0 is in two sets: one of them waits for rank 1, and the other goes on meanwhile."""
    engine.init()
    sets = [engine.add_process_set([0, 1]), engine.add_process_set([0, 2])]
    rank = engine.rank()
    engine.barrier()
    begun = time.monotonic()
    if rank == 1:
        time.sleep(1.0)
    handle = engine.allreduce_async(np.ones(10), name="slow", process_set=sets[0]) if rank < 2 else None
    if rank != 1:
        for _ in range(50):
            engine.allreduce(np.ones(1000), name="x", process_set=sets[1])
    seconds = time.monotonic() - begun
    if handle is not None:
        engine.synchronize(handle)
    return {"seconds": seconds}


def joins(_: int) -> int:
    """Ranks have less and less to do; the others' results are those of the ranks that are left."""
    engine.init()
    cases, me, size = Cases(), engine.rank(), engine.size()
    for turn in range(3):
        mine = 2 + (me + turn) % size  # steps
        for step in range(mine):
            left = [rank for rank in range(size) if 2 + (rank + turn) % size > step]
            one_step(cases, f"turn {turn}, step {step}", left, new=f".{turn}" if step % 2 else "")
        last = engine.join()
        with cases.case(f"turn {turn}: the last"):
            assert 2 + (last + turn) % size == size + 1
        engine.check_consistency({"last": last})
        got = engine.allreduce(np.full(100, me + 1.0), engine.Sum)
        with cases.case(f"turn {turn}: afterwards"):
            assert (got == size * (size + 1) / 2).all()
    for turn in range(30):
        if (me + turn) % size == 0:
            time.sleep(0.001)
        with cases.case(f"nothing but join {turn}"):
            assert 0 <= engine.join() < size
    if size > 1 and me == 0:
        engine.join()
    elif size > 1:
        with cases.case("objects of a rank that has joined"):
            refused(lambda: engine.allgather_object(1), "rank 0 has joined", ERROR)
        with cases.case("sets with a rank that has joined"):
            refused(lambda: engine.add_process_set([0]), "rank 0 has joined", ERROR)
        engine.join()
    if size > 2:
        part = engine.add_process_set([0, size - 1])
        if part.included():
            if me == 0:
                got = engine.allreduce(np.ones(5), engine.Sum, process_set=part)
                with cases.case("in a set, one has joined"):
                    assert (got == 1).all()
            last = engine.join(part)
            with cases.case("the last of a set"):
                assert last in (0, size - 1)
            for stays in (0, size - 1):
                if me == stays:
                    group = [np.arange(4.0), np.arange(6, dtype=np.int32)]
                    got = engine.grouped_reducescatter(group, engine.Sum, process_set=part)
                    whole = engine.grouped_allreduce([group[0], np.arange(3.0)], engine.Adasum, process_set=part)
                    with cases.case("groups in a set, one has joined"):
                        for share, each in zip(got, group, strict=True):
                            assert share.tolist() == np.array_split(each, 2)[part.rank()].tolist()
                        assert whole[0].tolist() == [0, 1, 2, 3] and whole[1].tolist() == [0, 1, 2]
                engine.join(part)
    return cases.done()


def compressed_step(check: Callable[[str, Array, Array], None], left: Sequence[int], new: str) -> None:
    """What travels as halves, by the ranks that are left: tensors, a group of several dtypes, shares of rows."""
    me, size = engine.rank(), engine.size()
    for dtype, wire in KINDS:
        marker = MARKERS[wire]
        for op, count in (("Sum", 37), ("Sum", 90_001), ("Min", 37), ("Max", 90_001), ("Product", 300)):
            brought = [small_numbers(dtype, (count,), rank) for rank in left]
            name = f"{dtype}.{wire}.{op}.{count}{new}"
            got = engine.allreduce(small_numbers(dtype, (count,), me), getattr(engine, op), name, compression=marker)
            check(name, got, compressed(dtype, wire, op, brought))
        rows = [small_numbers(dtype, (2 * size + 1, 700), rank) for rank in left]
        mine = small_numbers(dtype, (2 * size + 1, 700), me)
        share = engine.reducescatter(mine, engine.Sum, f"r.{dtype}.{wire}{new}", compression=marker)
        check(f"reducescatter {dtype} as {wire}", share, np.array_split(compressed(dtype, wire, "Sum", rows), size)[me])
    dtypes = ("float64", "float32", "int64", "float16", "float32", "float64", "bool")
    for counts in ((3, 5, 7, 9, 11, 13, 15), (9_001, 70_001, 303, 20_003, 5, 40_001, 17)):
        groups = [
            [small_numbers(each, (count,), rank) for each, count in zip(dtypes, counts, strict=True)] for rank in left
        ]
        mine = [small_numbers(each, (count,), me) for each, count in zip(dtypes, counts, strict=True)]
        totals = engine.grouped_allreduce(mine, engine.Sum, f"halves {counts[0]}{new}", compression=MARKERS["bfloat16"])
        for k, dtype in enumerate(dtypes):
            brought = [each[k] for each in groups]
            wide = dtype in ("float32", "float64")
            want = compressed(dtype, "bfloat16", "Sum", brought) if wide else expected(dtype, "Sum", brought)
            check(f"{dtype}, {k} of a compressed group", totals[k], want)


def scattered_groups(cases: Cases, label: str, left: Sequence[int], new: str) -> None:
    """Each tensor's rows by the ranks that are left: none, fewer than ranks, without bytes, several chunks of them."""
    me, size = engine.rank(), engine.size()
    shapes = ((0, 3), (1,), (4, 0), (5, 7), (2 * size + 1, 20_001), (33,))
    for kinds, op in ((("float32", "int64", "float16"), "Sum"), (("int8", "float64"), "Min")):
        dtypes = [kinds[k % len(kinds)] for k in range(len(shapes))]
        brought = [
            [small_numbers(dtype, shape, rank, k) for k, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=True))]
            for rank in left
        ]
        got = engine.grouped_reducescatter(brought[left.index(me)], getattr(engine, op), f"rows {op}{new}")
        with cases.case(f"{label}: grouped reducescatter {op}"):
            for k, (dtype, share) in enumerate(zip(dtypes, got, strict=True)):
                whole = expected(dtype, op, [each[k] for each in brought])
                check_equal(dtype, share, np.array_split(whole, size)[me])
    many = [np.full(k % 7, float(me + k)) for k in range(2000)]
    got = engine.grouped_reducescatter(many, engine.Sum, f"many rows{new}")
    with cases.case(f"{label}: 2000 tensors"):
        for k, share in enumerate(got):
            assert share.tolist() == [sum(left) + len(left) * k] * len(np.array_split(range(k % 7), size)[me])


def one_step(cases: Cases, label: str, left: Sequence[int], new: str) -> None:
    """One of everything, by the ranks that are left; some names are new while others have joined."""
    me, size = engine.rank(), engine.size()

    def check(what: str, got: Array, want: Array) -> None:
        with cases.case(f"{label}: {what}"):
            np.testing.assert_array_equal(got, want)

    for shape in ((7,), (90_000,)):
        brought = [small_numbers("float32", shape, rank) for rank in left]
        total = expected("float32", "Sum", brought)
        mine = small_numbers("float32", shape, me)
        check(f"sum {shape}", engine.allreduce(mine, engine.Sum, f"s{shape}{new}"), total)
        check(f"average {shape}", engine.allreduce(mine), (total / np.float32(size)).astype(np.float32))
        for op in ("Min", "Max", "Product"):
            got = engine.allreduce(mine, getattr(engine, op), f"{op}{shape}{new}")
            check(f"{op} {shape}", got, expected("float32", op, brought))
    check("scaled", engine.allreduce(np.full(3, 2.0), engine.Min, None, -1.0, 0.5), np.full(3, -1.0))
    rows = engine.allgather(np.full((me + 1, 2), me), f"g{new}")
    check("allgather", rows[:, 0], np.array([rank for rank in left for _ in range(rank + 1)]))
    got, counts = engine.alltoall(np.arange(size) + 10 * me, [1] * size, f"a{new}")
    check("alltoall", got, np.array([10 * rank + me for rank in left]))
    check("alltoall's counts", counts, np.array([int(rank in left) for rank in range(size)]))
    share = engine.reducescatter(np.arange(2.0 * size + 1), engine.Max, f"r{new}")
    check("reducescatter", share, np.array_split(np.arange(2.0 * size + 1), size)[me])
    group = engine.grouped_allreduce([np.ones(3), np.ones((2, 5))], engine.Sum, f"group{new}")
    check("group", group[1], np.full((2, 5), float(len(left))))
    check("broadcast", engine.broadcast(np.full(4, me), left[-1], f"b{new}"), np.full(4, left[-1]))
    scattered_groups(cases, label, left, new)
    compressed_step(check, left, new)
    gone = next((rank for rank in range(size) if rank not in left), None)
    if gone is not None:
        with cases.case(f"{label}: a root that has joined"):
            refused(
                lambda: engine.broadcast(np.ones(2), gone),
                f"rank {gone} is the root and has joined",
                engine.errors.MismatchError,
            )
        with cases.case(f"{label}: a mismatch among those that are left"):
            if len(left) > 1:
                refused(
                    lambda: engine.allreduce(np.ones(1 + left.index(me)), engine.Sum, f"m{new}"),
                    f"rank {left[0]} sent",
                    engine.errors.MismatchError,
                )
    engine.barrier()
