"""Process sets: static, dynamic and overlapping; refusals, and independence of each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import engine
from engine import ProcessSet

from ..on_ranks import Parts, on_ranks
from ..waiting import until_files
from .arrays import check_equal, check_same_on_all, numbers, refused, small_numbers
from .halves import KINDS, MARKERS, compressed
from .operation_table import expected

ERROR = engine.errors.EngineError
WITHIN = 10.0  # seconds: less than the stall limit of these jobs
pytestmark = on_ranks(1, 2, 3, 4)


def everything(parts: Parts, label: str, members: ProcessSet) -> None:
    """Run every collective in one set, and compare with NumPy."""
    ranks, me = members.ranks, engine.rank()
    place = ranks.index(me)
    with parts.part(f"{label}: who"):
        assert members.included() and members.rank() == place and members.size() == len(ranks)
    for op in ("Sum", "Average", "Min", "Max", "Product"):
        for shape in ((5,), (70_000,)):
            inputs = [small_numbers("float32", shape, rank) for rank in ranks]
            got = engine.allreduce(inputs[place], getattr(engine, op), process_set=members)
            with parts.part(f"{label}: allreduce {op} {shape}"):
                check_equal("float32", got, expected("float32", op, inputs))
    for root in ranks:
        values = numbers("int64", (3, 4), me)
        got = engine.broadcast(values, root, process_set=members)
        with parts.part(f"{label}: broadcast from {root}"):
            check_equal("int64", got, numbers("int64", (3, 4), root))
    got = engine.allgather(np.full((place + 1, 2), me), process_set=members)
    with parts.part(f"{label}: allgather"):
        assert got[:, 0].tolist() == [rank for k, rank in enumerate(ranks) for _ in range(k + 1)]
    got, counts = engine.alltoall(np.arange(len(ranks)) + 10 * me, [1] * len(ranks), process_set=members)
    with parts.part(f"{label}: alltoall"):
        assert got.tolist() == [10 * rank + place for rank in ranks] and counts.tolist() == [1] * len(ranks)
    got = engine.reducescatter(np.arange(len(ranks) * 2.0), engine.Sum, process_set=members)
    with parts.part(f"{label}: reducescatter"):
        assert got.tolist() == [2.0 * place * len(ranks), (2.0 * place + 1) * len(ranks)]
    group = [np.full(3, me, np.float32), np.full((2, 2), me, np.int64)]
    got = engine.grouped_allreduce(group, engine.Sum, process_set=members)
    with parts.part(f"{label}: grouped"):
        assert (got[0] == sum(ranks)).all() and (got[1] == sum(ranks)).all()
    engine.barrier(process_set=members)
    objects = engine.allgather_object({"rank": me}, process_set=members)
    shared = engine.broadcast_object(("from", me), ranks[-1], process_set=members)
    with parts.part(f"{label}: objects"):
        assert [each["rank"] for each in objects] == list(ranks) and shared == ("from", ranks[-1])
    for dtype, wire in KINDS:
        inputs = [small_numbers(dtype, (2 * len(ranks) + 1, 3001), rank) for rank in ranks]
        want = compressed(dtype, wire, "Average", inputs)
        options: dict[str, Any] = {"process_set": members, "compression": MARKERS[wire]}
        whole = engine.allreduce(inputs[place], **options)
        share = engine.reducescatter(inputs[place], **options)
        (grouped, left_alone) = engine.grouped_allreduce([inputs[place], inputs[place].astype(np.int32)], **options)
        (grouped_share,) = engine.grouped_reducescatter([inputs[place]], **options)
        with parts.part(f"{label}: {dtype} as {wire}"):
            check_equal(dtype, whole, want)
            check_equal(dtype, grouped, want)
            check_equal("int32", left_alone, expected("int32", "Average", [each.astype(np.int32) for each in inputs]))
            check_equal(dtype, share, np.array_split(want, len(ranks))[place])
            check_equal(dtype, grouped_share, np.array_split(want, len(ranks))[place])
    with parts.part(f"{label}: refusals"):
        stranger = next((rank for rank in range(engine.size() + 1) if rank not in ranks), 0)
        refused(
            lambda: engine.broadcast(np.ones(1), stranger, process_set=members),
            f"root rank {stranger} is not in this",
            ValueError,
        )


@on_ranks(1, 2, 3, 4, world=None)
def test_every_collective_in_every_set(parts: Parts, rank: int, size: int) -> None:
    """Covers static, dynamic and overlapping sets."""
    sets = [ProcessSet([size - 1])] if size > 1 else []
    engine.init(process_sets=sets, shutdown_timeout=1.0)
    me = rank
    everything(parts, "global", engine.global_process_set)
    choices: list[Sequence[int]] = [range(0, size, 2), range(1, size, 2), range(size - 1), [size - 1, 0]]
    for choice in choices:
        ranks = sorted(set(choice))
        if ranks and ranks != list(range(size)) and all(ranks != each.ranks for each in sets):
            sets.append(engine.add_process_set(ranks))
    with parts.part("numbers"):
        assert [each.process_set_id for each in sets] == list(range(1, len(sets) + 1))
    for members in sets:
        if size > 1 and members.included():
            everything(parts, str(members), members)
        elif size > 1:
            with parts.part(f"{members} without us"):
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
        with parts.part(f"{members}: overlapping"):
            assert (got == sum(members.ranks)).all()
    if size > 1:
        with parts.part("another set on another rank"):
            text = refused(
                lambda: engine.add_process_set([0] if me else [0, 1]), "disagree on the process set to add", ERROR
            )
            assert "rank 0: [0, 1]" in text
        with parts.part("no such rank"):
            refused(lambda: engine.add_process_set([0, size]), f"ranks 0 to {size - 1}, not [0, {size}]", ValueError)
        with parts.part("there already"):
            refused(lambda: engine.add_process_set(list(range(size))), "already: global_process_set", ValueError)
        with parts.part("ranks twice"):
            refused(lambda: ProcessSet([0, 0]), "each rank once", ValueError)
        mismatch = sets[-1]
        if mismatch.included() and mismatch.size() > 1:
            with parts.part("a mismatch names the world's ranks"):
                text = refused(
                    lambda: engine.allreduce(np.ones(1 + (mismatch.rank() or 0)), name="m", process_set=mismatch),
                    "ranks disagree on 'm'",
                    engine.errors.MismatchError,
                )
                assert all(f"rank {rank} sent" in text for rank in mismatch.ranks[:2])
        for members in sets:
            assert engine.remove_process_set(members)
            assert not engine.remove_process_set(members)
            with parts.part(f"{members} was removed"):
                refused(members.included, "is not there", engine.errors.NotInitializedError)
        pending_removal(parts)
        again = engine.add_process_set(sets[-1])
        if again.included():
            everything(parts, "again", again)
    check_same_on_all([np.ones(1)])


def pending_removal(parts: Parts) -> None:
    """Check that a set in which a rank waits for another cannot be removed, and goes on."""
    me = engine.rank()
    part = engine.add_process_set([0, 1]) if engine.size() > 2 else None
    if part is None:
        return
    handle = engine.allreduce_async(np.ones(4), engine.Sum, "alone", process_set=part) if me == 0 else None
    with parts.part("removal while something waits"):
        said = refused(lambda: engine.remove_process_set(part), "cannot be removed: rank 0 has waited", ERROR)
        assert "'alone'" in said
    if me == 1:
        handle = engine.allreduce_async(np.ones(4), engine.Sum, "alone", process_set=part)
    with parts.part("the set goes on"):
        assert handle is None or (engine.synchronize(handle) == 2).all()
    assert engine.remove_process_set(part)
    if part.process_set_id is None and me < 2:
        with parts.part("removed"):
            refused(lambda: engine.barrier(process_set=part), "is not there", engine.errors.NotInitializedError)


@on_ranks(1, 2, world=None)
def test_init_refuses_what_is_no_set_on_every_rank_and_can_be_called_again(parts: Parts, rank: int, size: int) -> None:
    for wrong in ([["a"]], [[0.0]], [[-1]], [[0, 0]], [0], 5):
        with parts.part(f"process_sets={wrong}"):
            refused(lambda wrong=wrong: engine.init(process_sets=wrong), "process_sets", engine.errors.ConfigError)
            assert not engine.is_initialized()
    engine.init(process_sets=[np.arange(size)[-1:]] if size > 1 else None)
    check_same_on_all([np.ones(1)])


@on_ranks(4)
def test_sets_that_share_no_rank_do_not_wait_for_each_other(rank: int) -> None:
    """Two pairs: one waits for its other rank, which comes when the other pair has finished."""
    pairs = [engine.add_process_set([0, 1]), engine.add_process_set([2, 3])]
    mine = pairs[rank // 2]
    engine.allreduce(np.ones(10), name="x", process_set=mine)
    engine.barrier()
    if rank == 1:
        until_files("pair.2", "pair.3", seconds=WITHIN)
    for _ in range(1 if rank < 2 else 50):
        engine.allreduce(np.ones(1000), name="x", process_set=mine)
    Path(f"pair.{rank}").touch()
    for each in pairs:
        engine.remove_process_set(each)


@on_ranks(3)
def test_a_set_does_not_wait_for_another_that_shares_a_rank(rank: int) -> None:
    """Rank 0 is in two sets: one of them waits for rank 1, which comes when the other set has finished."""
    sets = [engine.add_process_set([0, 1]), engine.add_process_set([0, 2])]
    engine.barrier()
    if rank == 1:
        until_files("shared.0", "shared.2", seconds=WITHIN)
    handle = engine.allreduce_async(np.ones(10), name="slow", process_set=sets[0]) if rank < 2 else None
    if rank != 1:
        for _ in range(50):
            engine.allreduce(np.ones(1000), name="x", process_set=sets[1])
        Path(f"shared.{rank}").touch()
    if handle is not None:
        engine.synchronize(handle)
    for each in sets:
        engine.remove_process_set(each)
