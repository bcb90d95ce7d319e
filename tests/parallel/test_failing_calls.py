"""A call that fails on one rank, or is omitted there, is reported on every rank; unnamed operations stay in step."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import engine
from engine.errors import DuplicateNameError, MismatchError

from ..on_ranks import on_ranks
from ..waiting import be_late
from .arrays import refused

pytestmark = on_ranks(2, 3)

ODD = 1  # the rank whose calls fail
HERE = os.path.basename(__file__)
Call = Callable[[str | None], Any]


def ones(count: int = 3) -> Any:
    return np.ones(count, np.float32)


class Broken(engine.Compressor):
    """Compressor that raises on one rank."""

    @staticmethod
    def compress(tensor: Any) -> Any:
        if engine.rank() == ODD:
            raise RuntimeError("no room for a copy")
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        return tensor


class Unspeakable(Exception):
    """Exception whose text cannot be made."""

    def __str__(self) -> str:
        raise KeyError("no text")

    __repr__ = __str__


class Unspoken(Broken):
    """Compressor that raises an exception whose text cannot be made."""

    @staticmethod
    def compress(tensor: Any) -> Any:
        if engine.rank() == ODD:
            raise Unspeakable
        return tensor, None


class Odd(Broken):
    """Compressor whose exception's text has a zero byte and half of a surrogate pair."""

    @staticmethod
    def compress(tensor: Any) -> Any:
        if engine.rank() == ODD:
            raise RuntimeError("odd \0 \udcff text")
        return tensor, None


def common(name: str | None) -> Any:
    return engine.allreduce(ones(), engine.Sum, name)


def common_async(name: str | None) -> Any:
    return engine.allreduce_async(ones(), engine.Sum, name)


# Call that fails on one rank, call of the other ranks, and the texts that both get.
CALLS: dict[str, tuple[Call, Call, str]] = {
    "a list": (lambda name: engine.allreduce([1.0], engine.Sum, name), common, "a list is no tensor"),
    "in place": (lambda name: engine.allreduce_(b"abc", engine.Sum, name), common, "read-only"),
    "a dtype": (lambda name: engine.allreduce_async(np.zeros(3, "M8[s]"), engine.Sum, name), common_async, "dtype"),
    "an operation": (lambda name: engine.allreduce(ones(), 99, name), common, "99 is not a valid Op"),
    "a factor": (
        lambda name: engine.allreduce_async(ones(), engine.Sum, name, float("nan")),
        common_async,
        "factors are finite numbers",
    ),
    "a compressor": (
        lambda name: engine.allreduce(ones(), engine.Sum, name, compression=Broken),
        lambda name: engine.allreduce(ones(), engine.Sum, name, compression=Broken),
        "no room for a copy",
    ),
    "a compressor with odd words": (
        lambda name: engine.allreduce(ones(), engine.Sum, name, compression=Odd),
        lambda name: engine.allreduce(ones(), engine.Sum, name, compression=Odd),
        "odd ",
    ),
    "a root": (
        lambda name: engine.broadcast(ones(), -1, name),
        lambda name: engine.broadcast(ones(), 0, name),
        "root rank -1 is not in",
    ),
    "a root, in place": (
        lambda name: engine.broadcast_async_(ones(), -1, name),
        lambda name: engine.broadcast_async_(ones(), 0, name),
        "root rank -1 is not in",
    ),
    "gathering": (
        lambda name: engine.allgather({}, name),
        lambda name: engine.allgather(ones(), name),
        "dict is no tensor",
    ),
    "splits": (
        lambda name: engine.alltoall(ones(4), [5] * engine.size(), name),
        lambda name: engine.alltoall(ones(4 * engine.size()), None, name),
        "cannot be taken from the 4 rows",
    ),
    "rows": (
        lambda name: engine.reducescatter(np.float32(1), engine.Sum, name),
        lambda name: engine.reducescatter(ones(4), engine.Sum, name),
        "a scalar has none",
    ),
    "a group": (
        lambda name: engine.grouped_allreduce([ones(), object()], engine.Sum, name),
        lambda name: engine.grouped_allreduce([ones(), ones()], engine.Sum, name),
        "object is no tensor",
    ),
    "a group in place": (
        lambda name: engine.grouped_allreduce_([ones(), b"x"], engine.Sum, name),
        lambda name: engine.grouped_allreduce_([ones(), ones()], engine.Sum, name),
        "read-only",
    ),
    "gathering a group": (
        lambda name: engine.grouped_allgather([], name),
        lambda name: engine.grouped_allgather([ones()], name),
        "a group has 1 to",
    ),
    "rows of a group": (
        lambda name: engine.grouped_reducescatter([np.float32(1)], engine.Sum, name),
        lambda name: engine.grouped_reducescatter([ones(4)], engine.Sum, name),
        "a scalar has none",
    ),
    "parameters": (
        lambda name: engine.check_consistency({"a": object()}, name),
        lambda name: engine.check_consistency({"a": ones()}, name),
        "is a object, not a tensor",
    ),
}


def finished(result: Any) -> Any:
    """Result itself, or the result of a handle."""
    return engine.synchronize(result) if isinstance(result, engine.Handle) else result


def told(call: Callable[[], Any], text: str = "") -> str:
    """Error on every rank but the one whose call has failed."""
    return refused(lambda: finished(call()), text, MismatchError)


def in_step() -> None:
    """Check that the next unnamed operation of each kind meets the same one of the other ranks. Collective."""
    rank, size = engine.rank(), engine.size()
    assert engine.allreduce(ones(), engine.Sum).tolist() == [size] * 3
    assert engine.broadcast(np.full(2, float(rank)), 0).tolist() == [0, 0]
    assert engine.allgather(np.full(1, rank)).tolist() == list(range(size))
    assert engine.alltoall(np.arange(size)).tolist() == [rank] * size
    assert engine.reducescatter(ones(size), engine.Sum).tolist() == [size]


# ---- calls that fail


@pytest.mark.parametrize("title", CALLS)
def test_a_call_that_fails_on_one_rank_fails_on_all(title: str, rank: int) -> None:
    odd, others, text = CALLS[title]
    # On its second use, a name is known, or its failure has not reached the other ranks yet.
    for name in (None, title, title):
        if rank == ODD:
            refused(lambda name=name: finished(odd(name)), text, Exception)
        else:
            error = told(lambda name=name: others(name), f"was not done: rank {ODD} failed at ")
            assert text in error and f"{HERE}:" in error and (name or ".noname.") in error, error
    in_step()


def test_a_failure_whose_text_cannot_be_made_is_told_by_its_class(rank: int) -> None:
    for name in (None, "unspoken", "unspoken"):
        if rank == ODD:
            with pytest.raises(Unspeakable):
                engine.allreduce(ones(), engine.Sum, name, compression=Unspoken)
        else:
            error = told(lambda name=name: engine.allreduce(ones(), engine.Sum, name, compression=Unspoken))
            assert "Unspeakable: (its text cannot be made: KeyError)" in error, error
    in_step()


def test_a_known_name_and_then_the_same_one_as_it_should_be(rank: int, size: int) -> None:
    common("known")
    if rank == ODD:
        refused(lambda: engine.allreduce("x", engine.Sum, "known"), "")
    else:
        told(lambda: common("known"), "failed at")
    assert common("known").tolist() == [engine.size()] * 3


def test_every_rank_fails() -> None:
    for _ in range(300):
        refused(lambda: engine.allreduce([1.0]), "a list is no tensor")
    in_step()


# ---- calls that one rank alone makes


LIMIT = 4.0  # seconds; a shorter pause of a rank, as of the whole machine, is no failure
lonely = on_ranks(2, 3, env={"ENGINE_STALL_LIMIT": str(LIMIT), "ENGINE_STALL_WARNING": "0.5"})


def fail_alone(name: str | None = None) -> None:
    if engine.rank() == ODD:
        refused(lambda: engine.allreduce([1.0], engine.Sum, name), "a list is no tensor")


@pytest.mark.slow
@lonely
def test_a_lonely_failure_is_not_overdue_when_the_stall_limit_is_over(rank: int, size: int) -> None:
    common("known and lonely")
    fail_alone("lonely")
    fail_alone("known and lonely")
    end = time.monotonic() + 1.25 * LIMIT
    while common("goes on").tolist() == [size] * 3 and engine.broadcast_object(time.monotonic() < end):
        engine.barrier("so long")


@lonely
def test_a_barrier_settles_a_lonely_failure() -> None:
    fail_alone()
    engine.barrier()
    in_step()


@lonely
def test_joining_settles_a_lonely_failure(size: int) -> None:
    common("known and joined")
    for _ in range(2):
        fail_alone()
        fail_alone("joined")
        fail_alone("known and joined")
        engine.join()
        in_step()
        assert common("joined").tolist() == [size] * 3
        assert common("known and joined").tolist() == [size] * 3


@lonely
def test_who_has_joined_has_failed_before(rank: int, size: int) -> None:
    fail_alone("before it joined")
    if rank != ODD:
        told(lambda: common("before it joined"), f"rank {ODD} failed at")
        assert common("stands in").tolist() == [size - 1] * 3
    engine.join()
    in_step()


@lonely
def test_the_end_does_not_wait_for_a_lonely_failure() -> None:
    fail_alone("at the end")
    begun = time.monotonic()
    engine.shutdown()
    assert time.monotonic() - begun < 9, "shutdown_timeout is 10 s"


@on_ranks(2, world=None, job="a call that failed alone is made again")
def test_a_call_that_failed_alone_and_is_made_again_alone_does_not_wait_for_ever() -> None:
    """The others have never called it, and have ended."""
    engine.init()
    if engine.rank() == ODD:
        refused(lambda: engine.allreduce([1.0], engine.Sum, "alone"), "a list is no tensor")
        refused(lambda: common("alone"), "'alone' has failed on rank 1, and other ranks have not", DuplicateNameError)


# Longer names in each turn leave more or less of the schedule unused.
@on_ranks(2)
@pytest.mark.parametrize("turn", range(8))
def test_all_of_more_failures_than_the_schedule_has_room_for_are_told_before_a_join_ends(turn: int) -> None:
    names = [f"lonely {turn}{' ' * 8 * turn}{each}" for each in range(5000)]
    for name in names if engine.rank() == ODD else []:
        refused(lambda name=name: engine.allreduce([1.0], engine.Sum, name), "a list is no tensor")
    engine.barrier("all are brought")
    engine.join()
    for handle in [common_async(name) for name in names[:10]]:  # The ones reported last.
        assert handle.wait().tolist() == [engine.size()] * 3


# ---- operations that one rank leaves out


WAITS = f"was not done: rank {ODD} waits for "


def is_odd() -> bool:
    return engine.rank() == ODD


def test_left_out_and_the_others_wait_in_it_the_one_in_a_barrier() -> None:
    for _ in range(2):
        if not is_odd():
            error = told(lambda: common(None), f"{WAITS}'barrier.noname.")
            who = "|".join(str(r) for r in range(engine.size()) if r != ODD)
            assert re.search(f"which rank (?:{who}) has not submitted, at {re.escape(__file__)}:", error), error
        engine.barrier()
        in_step()


def test_several_left_out() -> None:
    if not is_odd():
        for _ in range(3):
            told(lambda: common(None), WAITS)
        told(lambda: engine.allgather(ones()), WAITS)
    engine.barrier()
    in_step()


@pytest.mark.parametrize("meeting", ["barrier", "broadcast_object"])
def test_left_out_and_the_others_hold_handles(meeting: str) -> None:
    handles = [] if is_odd() else [common_async(None), common_async(None), engine.allgather_async(ones())]
    engine.barrier() if meeting == "barrier" else engine.broadcast_object(1)
    in_step()
    for handle in handles:
        told(handle.wait, f"was not done: rank {ODD} came to a barrier without it, at {__file__}:")


def test_what_the_engine_agrees_on_by_barriers_of_its_own() -> None:
    before = engine.session.runtime.current_engine().counters()["entries"]
    engine.session.runtime.current_engine().share(3776)
    in_step()
    assert engine.session.runtime.current_engine().counters()["entries"] - before < 1000


def test_each_waits_in_what_the_other_has_left_out() -> None:
    told(lambda: engine.broadcast(ones(), 0) if is_odd() else common(None), "waits for")
    in_step()


def test_the_one_waits_in_a_name_that_is_known() -> None:
    common("known")
    if not is_odd():
        told(lambda: common(None), f"{WAITS}'known'")
    common("known")
    in_step()


def test_left_out_one_after_the_other_in_all_kinds() -> None:
    for call in (
        lambda: engine.broadcast(ones(), 0),
        lambda: engine.alltoall(ones(engine.size())),
        lambda: engine.reducescatter(ones(4), engine.Sum),
    ):
        if not is_odd():
            told(call, WAITS)
        engine.barrier()
        in_step()


@on_ranks(3)
def test_process_sets_have_failures_of_their_own() -> None:
    """Failed and omitted calls of a process set are its own, as are the numbers of its unnamed operations."""
    members = engine.add_process_set([0, ODD])
    if members.included():
        # A call fails.
        call = lambda value: engine.allreduce(value, engine.Sum, process_set=members)  # noqa: E731
        if engine.rank() == ODD:
            refused(lambda: call([1.0]), "a list is no tensor")
        else:
            told(lambda: call(ones()), f"rank {ODD} failed at")
        assert call(ones()).tolist() == [2] * 3
        # A call is omitted.
        if engine.rank() != ODD:
            told(lambda: call(ones()), f"rank {ODD} waits for 'barrier.noname.0', which rank 0 has not submitted")
        engine.barrier(process_set=members)
        assert call(ones()).tolist() == [2] * 3
    # The world is still in step.
    in_step()
    engine.barrier("end")


@on_ranks(2)
def test_threads_never_share_the_number_of_an_unnamed_operation() -> None:
    """Several threads submit unnamed operations at the same time."""
    size = engine.size()
    calls: list[Callable[[], Any]] = [
        engine.barrier,
        lambda: common(None),
        lambda: common_async(None).wait(),
    ]
    wrong: list[BaseException] = []

    def run(call: Callable[[], Any]) -> None:
        try:
            for _ in range(300):
                result = call()
                assert result is None or result.tolist() == [size] * 3
        except BaseException as error:
            wrong.append(error)

    for call in calls:
        pair = [threading.Thread(target=run, args=(call,), daemon=True) for _ in range(2)]
        for thread in pair:
            thread.start()
        for thread in pair:
            thread.join()
        if wrong:
            raise wrong[0]


@on_ranks(2)
def test_a_rank_with_a_second_thread_is_not_thought_to_have_left_anything_out() -> None:
    """A rank's second thread starts after its first has waited for long, and voids what that wait had implied."""
    # Each rank waits in an operation that the other has yet to submit.
    if engine.rank() == ODD:
        common("two threads")
        assert common(None).tolist() == [engine.size()] * 3
        assert engine.broadcast(ones(), 0).tolist() == [1] * 3
    else:

        def second() -> None:
            be_late(0.5)  # This rank's only thread waits for that long.
            common("two threads")
            be_late(0.5)  # The other rank's thread waits for that long.
            assert common(None).tolist() == [engine.size()] * 3

        thread = threading.Thread(target=second)
        thread.start()
        assert engine.broadcast(ones(), 0).tolist() == [1] * 3
        thread.join()
