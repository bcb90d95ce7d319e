"""Calls that fail on one rank, or are left out there: every rank is told, and all go on in step. Runs on every rank."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import engine
from engine.errors import DuplicateNameError, MismatchError

from .on_ranks import Cases, refused

ODD = 1  # the rank whose calls fail
HERE = os.path.basename(__file__)
Call = Callable[[str | None], Any]


def ones(count: int = 3) -> Any:
    return np.ones(count, np.float32)


class Broken(engine.Compressor):
    """A compressor that raises on one rank."""

    @staticmethod
    def compress(tensor: Any) -> Any:
        if engine.rank() == ODD:
            raise RuntimeError("no room for a copy")
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        return tensor


def common(name: str | None) -> Any:
    return engine.allreduce(ones(), engine.Sum, name)


def common_async(name: str | None) -> Any:
    return engine.allreduce_async(ones(), engine.Sum, name)


# What one rank calls, which fails there; what the others call; and what both are told.
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
    """A result, or that of a handle."""
    return engine.synchronize(result) if isinstance(result, engine.Handle) else result


def told(call: Callable[[], Any], text: str = "") -> str:
    """The error that every rank gets but the one whose call has failed."""
    return refused(lambda: finished(call()), text, MismatchError)


def in_step() -> None:
    """The next operation of each kind without a name meets its like. Collective."""
    rank, size = engine.rank(), engine.size()
    assert engine.allreduce(ones(), engine.Sum).tolist() == [size] * 3
    assert engine.broadcast(np.full(2, float(rank)), 0).tolist() == [0, 0]
    assert engine.allgather(np.full(1, rank)).tolist() == list(range(size))
    assert engine.alltoall(np.arange(size)).tolist() == [rank] * size
    assert engine.reducescatter(ones(size), engine.Sum).tolist() == [size]


def failing() -> int:
    """One rank's call fails before it has brought anything: the others are told what it raised, and where."""
    engine.init()
    cases, rank = Cases(), engine.rank()
    for title, (odd, others, text) in CALLS.items():
        # The second use of a name meets a name that is known, or one whose failure the others have yet to hear of.
        for name in (None, title, title):
            with cases.case(f"{title}, {name and 'named'}"):
                if rank == ODD:
                    refused(lambda: finished(odd(name)), text, Exception)  # noqa: B023
                else:
                    error = told(lambda: others(name), f"was not done: rank {ODD} failed at ")  # noqa: B023
                    assert text in error and f"{HERE}:" in error and (name or ".noname.") in error, error
        with cases.case(f"after {title}"):
            in_step()
    with cases.case("a known name, and then the same one as it should be"):
        common("known")
        if rank == ODD:
            refused(lambda: engine.allreduce("x", engine.Sum, "known"), "")
        else:
            told(lambda: common("known"), "failed at")
        assert common("known").tolist() == [engine.size()] * 3
    with cases.case("every rank fails"):
        for _ in range(300):
            refused(lambda: engine.allreduce([1.0]), "a list is no tensor")
        in_step()
    return cases.done()


def lonely() -> int:
    """A call fails on one rank, and the others never make it: nothing waits for it, and it harms nothing later."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()

    def fail_alone(name: str | None = None) -> None:
        if rank == ODD:
            refused(lambda: engine.allreduce([1.0], engine.Sum, name), "a list is no tensor")

    with cases.case("it is not overdue when the stall limit is over"):
        common("known and lonely")
        fail_alone("lonely")
        fail_alone("known and lonely")
        end = time.monotonic() + 1.5
        while common("goes on").tolist() == [size] * 3 and engine.broadcast_object(time.monotonic() < end):
            engine.barrier("so long")
    with cases.case("a barrier settles it"):
        fail_alone()
        engine.barrier()
        in_step()
    with cases.case("joining settles it"):
        for _ in range(2):
            fail_alone()
            fail_alone("lonely")
            engine.join()
            in_step()
            assert common("lonely").tolist() == [size] * 3
            assert common("known and lonely").tolist() == [size] * 3
    with cases.case("who has joined has failed before"):
        fail_alone("before it joined")
        if rank != ODD:
            told(lambda: common("before it joined"), f"rank {ODD} failed at")
            assert common("stands in").tolist() == [size - 1] * 3
        engine.join()
        in_step()
    with cases.case("the end does not wait for it"):
        fail_alone("at the end")
        begun = time.monotonic()
        engine.shutdown()
        assert time.monotonic() - begun < 5, "shutdown_timeout is 10 s"
    return cases.done()


def again() -> int:
    """A rank calls again what has failed there, and the others have ended: it does not wait for ever."""
    engine.init()
    cases = Cases()
    with cases.case("the others have never called it"):
        if engine.rank() == ODD:
            refused(lambda: engine.allreduce([1.0], engine.Sum, "alone"), "a list is no tensor")
            refused(
                lambda: common("alone"), "'alone' has failed on rank 1, and other ranks have not", DuplicateNameError
            )
    return cases.done()


def many() -> int:
    """Ranks join behind more failures than the schedule has room for: none of them is left for what comes after."""
    engine.init()
    cases = Cases()
    for turn in range(8):  # Longer names from turn to turn leave more or less of the schedule over.
        names = [f"lonely {turn}{' ' * 8 * turn}{each}" for each in range(5000)]
        with cases.case(f"joining settles them all, {turn}"):
            for name in names if engine.rank() == ODD else []:
                refused(lambda: engine.allreduce([1.0], engine.Sum, name), "a list is no tensor")  # noqa: B023
            engine.barrier("all are brought")
            engine.join()
            for handle in [common_async(name) for name in names[:10]]:  # The last that are told.
                assert handle.wait().tolist() == [engine.size()] * 3
    return cases.done()


def left_out() -> int:
    """One rank leaves operations out, as when the program catches an exception between them."""
    engine.init()
    cases, rank = Cases(), engine.rank()
    odd = rank == ODD
    waits = f"was not done: rank {ODD} waits for "
    with cases.case("the others wait in it, the one in a barrier"):
        for _ in range(2):
            if not odd:
                error = told(lambda: common(None), f"{waits}'barrier.noname.")
                who = "|".join(str(r) for r in range(engine.size()) if r != ODD)
                assert re.search(f"which rank (?:{who}) has not brought, at {re.escape(__file__)}:", error), error
            engine.barrier()
            in_step()
    with cases.case("several of them"):
        if not odd:
            for _ in range(3):
                told(lambda: common(None), waits)
            told(lambda: engine.allgather(ones()), waits)
        engine.barrier()
        in_step()
    for meeting in (engine.barrier, lambda: engine.broadcast_object(1)):
        with cases.case(f"the others' handles, {meeting}"):
            handles = [] if odd else [common_async(None), common_async(None), engine.allgather_async(ones())]
            meeting()
            in_step()
            for handle in handles:
                told(handle.wait, f"was not done: rank {ODD} came to a barrier without it, at {__file__}:")
    with cases.case("what the engine agrees on by barriers of its own"):
        engine.runtime.engine().share(3776)
        in_step()
        assert engine.runtime.engine().counters()["entries"] < 1000
    with cases.case("each waits in what the other has left out"):
        told(lambda: engine.broadcast(ones(), 0) if odd else common(None), "waits for")
        in_step()
    with cases.case("the one waits in a name that is known"):
        common("known")
        if not odd:
            told(lambda: common(None), f"{waits}'known'")
        common("known")
        in_step()
    with cases.case("one after the other in all kinds"):
        for call in (
            lambda: engine.broadcast(ones(), 0),
            lambda: engine.alltoall(ones(engine.size())),
            lambda: engine.reducescatter(ones(4), engine.Sum),
        ):
            if not odd:
                told(call, waits)
            engine.barrier()
            in_step()
    return cases.done()


def in_process_set() -> int:
    """The same in a process set, whose numbers are its own."""
    engine.init()
    cases = Cases()
    members = engine.add_process_set([0, ODD])
    if members.included():
        with cases.case("a call fails"):
            call = lambda value: engine.allreduce(value, engine.Sum, process_set=members)  # noqa: E731
            if engine.rank() == ODD:
                refused(lambda: call([1.0]), "a list is no tensor")
            else:
                told(lambda: call(ones()), f"rank {ODD} failed at")
            assert call(ones()).tolist() == [2] * 3
        with cases.case("one is left out"):
            if engine.rank() != ODD:
                told(lambda: call(ones()), f"rank {ODD} waits for 'barrier.noname.0', which rank 0 has not brought")
            engine.barrier(process_set=members)
            assert call(ones()).tolist() == [2] * 3
    with cases.case("the world"):
        in_step()
    engine.barrier("end")
    return cases.done()


def threads() -> int:
    """Threads that bring unnamed operations at the same time never share a number."""
    engine.init()
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
    return 3 * len(calls)


def late_thread() -> int:
    """A rank's second thread comes when its first has waited for long: that wait says nothing of the rank any more."""
    engine.init()
    cases = Cases()
    with cases.case("each rank waits in what the other has yet to bring"):
        if engine.rank() == ODD:
            common("two threads")
            assert common(None).tolist() == [engine.size()] * 3
            assert engine.broadcast(ones(), 0).tolist() == [1] * 3
        else:

            def second() -> None:
                time.sleep(0.5)  # Not for a state: so long this rank's only thread waits.
                common("two threads")
                time.sleep(0.5)  # And so long the other rank's.
                assert common(None).tolist() == [engine.size()] * 3

            thread = threading.Thread(target=second)
            thread.start()
            assert engine.broadcast(ones(), 0).tolist() == [1] * 3
            thread.join()
    return cases.done()
