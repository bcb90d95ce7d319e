"""Sets that their members alone form: agreement, refusals, the memory that they give back, and their end."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest

import engine
from engine.errors import EngineError, NotInitializedError
from engine.native import core
from engine.net.rendezvous.set_connections import Exchange
from engine.session.registry import ProcessSetRegistry
from engine.trace import reading

from ..on_ranks import on_ranks
from ..waiting import let_pass, until
from .arrays import works

pytestmark = on_ranks(2, 3)

LARGE = 4 << 20  # elements of a tensor that fills all slots of a rank


def native() -> core.Engine:
    return engine.session.runtime.current_engine()


def registry() -> ProcessSetRegistry:
    return engine.session.runtime.current_session().sets


def exchange_among(ranks: tuple[int, ...]) -> Exchange:
    """Exchange that all ranks of the world take part in, with the texts of some of them."""

    def exchange(text: bytes) -> list[bytes]:
        texts = registry()._gather_texts("test", text)
        return [texts[rank] for rank in ranks]

    return exchange


def form(ranks: tuple[int, ...], name: str = "a group") -> core.Engine:
    return registry().form_among(ranks, name, exchange_among(ranks))


def add_up(group: core.Engine, count: int = 5) -> float:
    tensor = np.ones(count, np.float32)
    group.allreduce(tensor, tensor, None, engine.Sum, 1.0, 1.0, True).wait()
    assert (tensor == tensor[0]).all()
    return float(tensor[0])


def claim_for_all(ranks: int) -> int:
    """Have rank 0 claim a place, and tell it to all."""
    own = native().claim(ranks) if native().rank == 0 else 0
    return int(registry()._gather_texts("test", str(own).encode())[0])


def control_bytes() -> int:
    """Bytes of memory of the world's control file."""
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.islink(path) and "engine-control" in os.readlink(path):
            return os.stat(path).st_blocks * 512
    raise AssertionError("this rank has no control file")


@contextmanager
def no_longer_files() -> Iterator[None]:
    """Block in which this process can make no file longer than a MiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def form_short_of_memory(short: bool, together: bool) -> None:
    """Form a set with the whole world `together`, or by its members alone."""
    with no_longer_files() if short else nullcontext():
        if together:
            engine.add_process_set([0, 1])
        else:
            form((0, 1, 2))


def test_groups_of_the_same_ranks_are_apart(size: int) -> None:
    ranks = tuple(range(size))
    groups = [form(ranks, f"group {number}") for number in range(3)]
    assert [add_up(group) for group in groups] == [size] * 3
    registry().leave_set(groups[1])
    assert [add_up(groups[0]), add_up(groups[2])] == [size] * 2
    with pytest.raises(NotInitializedError):
        add_up(groups[1])
    for group in groups:
        registry().leave_set(group)
    works(size)


def test_a_group_that_all_have_left_gives_its_memory_back(size: int) -> None:
    ranks = tuple(range(size))
    before = control_bytes()
    for number in range(4):
        group = form(ranks, f"group {number}")
        assert add_up(group, LARGE) == size
        used = control_bytes()
        registry().leave_set(group)
        native().barrier("left").wait()
    left = control_bytes()
    native().barrier("looked").wait()
    assert left - before < (used - before) // 2


@on_ranks(3)
def test_a_removed_process_set_gives_its_memory_back(rank: int) -> None:
    before = control_bytes()
    chosen = engine.add_process_set([0, 2])
    if chosen.included():
        add_up(chosen.engine, LARGE)
    native().barrier("used").wait()
    used = control_bytes()
    native().barrier("looked").wait()
    engine.remove_process_set(chosen)
    native().barrier("removed").wait()
    assert used - before > 1 << 20
    assert control_bytes() - before < (used - before) // 4


def test_a_rank_enters_a_set_once(size: int) -> None:
    ranks = tuple(range(size))
    offset = claim_for_all(size)
    group = registry().enter(ranks, offset)
    assert add_up(group) == size
    with pytest.raises(EngineError, match=r"entered the process set of the ranks .* before"):
        registry().enter(ranks, offset)
    assert add_up(group) == size
    registry().leave_set(group)
    with pytest.raises(EngineError, match=r"before|claimed for another set"):
        registry().enter(ranks, offset)
    works(size)


@on_ranks(3)
def test_ranks_that_mean_different_sets_by_a_place_do_not_meet(rank: int, size: int) -> None:
    offset = claim_for_all(2)
    group = registry().enter((0, 1), offset) if rank == 0 else None
    native().barrier("entered").wait()
    if rank:
        with pytest.raises(EngineError, match=r"\[1, 2\] cannot be entered .* claimed for another set"):
            registry().enter((1, 2), offset)
    if group is not None:
        registry().leave_set(group, 0.0)
    works(size)


@on_ranks(3)
def test_ranks_that_form_different_groups_are_told_so(rank: int, size: int) -> None:
    """Ranks 0 and 2 take one another for rank 1, as in a store that knows members by their place in the group."""
    texts = exchange_among((0, 2))
    if rank == 1:
        texts(b"")
    else:
        with pytest.raises(EngineError, match=r"forms one of the ranks .* same groups in the same order"):
            registry().form_among((0, 1) if rank == 0 else (1, 2), "a group", texts)
    works(size)


def test_a_rank_that_cannot_enter_tells_the_others(rank: int, size: int) -> None:
    sets: Any = registry()

    def refuse(*arguments: Any, **settings: Any) -> None:
        raise BlockingIOError(11, "cannot start the engine thread")

    if rank == 1:
        sets.enter = refuse
    try:
        with pytest.raises(EngineError, match=r"rank 1 has failed: .*cannot start the engine thread"):
            form(tuple(range(size)))
    finally:
        vars(sets).pop("enter", None)
    assert not sets._groups
    works(size)


@pytest.mark.parametrize("odd", [-1, 4096, 1 << 40, 1 << 63, (1 << 64) - 4096, 1])
def test_a_place_that_nobody_claimed_is_refused(odd: int, size: int) -> None:
    ranks = tuple(range(size))
    offset = claim_for_all(size)
    with pytest.raises((ValueError, OverflowError, EngineError)):
        native().enter_set(ranks, 0, odd if odd != 1 else offset + 1)
    works(size)


def test_members_that_cannot_be_are_refused(rank: int, size: int) -> None:
    offset = claim_for_all(2)
    other = (rank + 1) % size
    for numbers in ((), (rank, rank), (rank, size), (-1, rank), (other,), tuple(range(300))):
        with pytest.raises(ValueError, match="ranks of the world"):
            native().enter_set(numbers, 0, offset)
    for count in (0, -1, size + 1):
        with pytest.raises(ValueError, match="has 1 to"):
            native().claim(count)
    works(size)


@on_ranks(3)
@pytest.mark.parametrize("together", [True, False])
def test_no_memory_for_a_segment_is_said_on_all_ranks(together: bool, rank: int, size: int) -> None:
    for _ in range(2):
        with pytest.raises(
            EngineError, match=r"rank 0.* cannot make the control segment .*File too large.* more memory"
        ):
            form_short_of_memory(rank == 0, together)
    works(size)
    group = form((0, 1, 2))
    assert add_up(group) == 3
    registry().leave_set(group)


def test_a_group_that_is_entered_as_the_session_ends_is_refused(size: int) -> None:
    sets: Any = registry()
    sets._closing = True
    try:
        with pytest.raises(EngineError, match=r"engine.shutdown\(\) was called"):
            form(tuple(range(size)))
    finally:
        sets._closing = False
    works(size)


@on_ranks(3, world=None)
def test_a_timeline_begun_after_a_group_can_be_read(rank: int, size: int) -> None:
    """Ranks 0 and 1 have formed another group than rank 2, as their first."""
    engine.init()
    mine = (0, 1) if rank < 2 else (2,)
    group = form(mine)
    engine.start_timeline("timeline-of-groups")
    assert add_up(group) == len(mine)
    works(size)
    engine.stop_timeline()
    native().barrier("written").wait()
    notes: list[str] = []
    found = reading.read(["timeline-of-groups"], notes)
    assert notes == []
    assert [recording.rank for recording in found] == [0, 1, 2]
    native().barrier("read").wait()
    engine.shutdown()


@on_ranks(2, world=None)
def test_operations_that_are_set_aside_do_not_delay_the_end(rank: int, size: int) -> None:
    engine.init(shutdown_timeout=30.0)
    groups = [form((0, 1), f"group {number}") for number in range(3)]
    handles = []
    if rank == 0:
        for group in groups:
            handles.append(group.allgather(np.ones(3), "a message"))
            assert not group.idle
            handles[-1].set_aside(True)
            assert group.idle
    native().barrier("begun").wait()
    begun = time.monotonic()
    registry().leave_set(groups[0])
    engine.shutdown()
    assert time.monotonic() - begun < 20
    for handle in handles:
        with pytest.raises(NotInitializedError):
            handle.wait()


@on_ranks(2, world=None)
def test_an_operation_that_somebody_minds_is_waited_for_at_the_end(rank: int, size: int) -> None:
    engine.init(shutdown_timeout=60.0)
    group = form((0, 1))
    tensor = np.ones(3)
    if rank == 0:
        handle = group.allreduce(tensor, tensor, "late", engine.Sum, 1.0, 1.0)
    else:
        let_pass(3.0)  # longer than idle threads have to leave a set
        handle = group.allreduce(tensor, tensor, "late", engine.Sum, 1.0, 1.0)
    engine.shutdown()
    handle.wait()
    assert (tensor == size).all()


def count_threads_and_files() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def submit(group: core.Engine, tensor: Any) -> Any:
    return group.allreduce(tensor, tensor, "driven", engine.Sum, 1.0, 1.0)


def poll(handles: list[Any]) -> None:
    """Wait for operations without driving them: the engine thread alone does."""
    until(lambda: all(handle.done for handle in handles), "the engine thread's end of all", 20.0)


def test_sets_share_the_engine_thread(size: int) -> None:
    before = count_threads_and_files()
    groups = [form(tuple(range(size)), f"group {number}") for number in range(40)]
    tensors = [np.full(3, float(number)) for number in range(len(groups))]
    poll([submit(*each) for each in zip(groups, tensors, strict=True)])
    assert [float(tensor[0]) for tensor in tensors] == [size * number for number in range(len(groups))]
    assert count_threads_and_files() == before
    for group in groups:
        registry().leave_set(group)


def test_a_small_operation_passes_a_large_one_of_another_set(size: int) -> None:
    """One thread drives both, while a third set comes and goes."""
    groups = [form(tuple(range(size)), name) for name in ("large", "small")]
    large, small = np.ones(16 * LARGE, np.float32), np.ones(1, np.float32)
    passed = 0
    for _ in range(3):
        handle = submit(groups[0], large)
        for _ in range(5):
            poll([submit(groups[1], small)])
            passed += not handle.done
            other = form(tuple(range(size)), "comes and goes")
            assert add_up(other) == size
            registry().leave_set(other)
        poll([handle])
    assert large[0] == large[-1] == size**3
    assert small[0] == size**15
    assert passed or size == 1
    for group in groups:
        registry().leave_set(group)


@on_ranks(2, world=None)
def test_the_engine_thread_ends_with_the_last_engine(rank: int, size: int) -> None:
    before = count_threads_and_files()[0]
    engine.init()
    world, group = native(), form((0, 1))
    world.close(1.0)
    tensor = np.ones(3)
    poll([submit(group, tensor)])  # which a set can do that is used behind its world's end
    assert (tensor == size).all()
    engine.shutdown()
    until(lambda: count_threads_and_files()[0] == before, "the end of the engine's threads", 10.0)
