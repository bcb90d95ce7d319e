"""Use before init, after shutdown and again, in forked children, and from threads that outlive a world."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import engine
from engine.errors import EngineError, ForkedError, NotInitializedError

from ..on_ranks import Parts, on_ranks, spare
from .arrays import refused, works

pytestmark = on_ranks(1, 2, 3, spare(4), world=None)

GOOD = np.ones(3, np.float32)
CALLS: dict[str, Callable[[], Any]] = {
    "allreduce": lambda: engine.allreduce(GOOD),
    "allreduce_async_": lambda: engine.allreduce_async_(GOOD),
    "broadcast": lambda: engine.broadcast(GOOD, 0),
    "allgather": lambda: engine.allgather(GOOD),
    "barrier": lambda: engine.barrier(),
    "rank": lambda: engine.rank(),
    "size": lambda: engine.size(),
    "local_rank": lambda: engine.local_rank(),
    "set_knobs": lambda: engine.set_knobs(cycle_time_ms=1),
    "knobs": lambda: engine.knobs(),
    "broadcast_object": lambda: engine.broadcast_object(1),
    "allgather_object": lambda: engine.allgather_object(1),
    "check_consistency": lambda: engine.check_consistency({"a": GOOD}),
}
PLACE = ("rank", "size", "local_rank")  # the calls that still work in a forked child


def refused_everywhere(parts: Parts, kind: type[Exception], text: str, names: Any = CALLS) -> None:
    assert not engine.is_initialized()
    for name in names:
        with parts.part(name):
            refused(CALLS[name], text, kind)


def test_before_init(parts: Parts) -> None:
    refused_everywhere(parts, NotInitializedError, "engine.init()")
    engine.shutdown()  # Nothing to end.


def test_worlds_one_after_the_other(parts: Parts, size: int) -> None:
    for turn in range(3):
        engine.init(cycle_time_ms=turn)
        engine.init()
        assert engine.is_initialized()
        with parts.part(f"world {turn}"):
            assert engine.knobs()["cycle_time_ms"] == turn
            works(size)
        left = engine.allreduce_async(GOOD, engine.Sum, "in flight at shutdown")
        done = engine.allreduce_async(GOOD, engine.Sum, "done at shutdown")
        engine.synchronize(done)
        engine.shutdown()
        with parts.part(f"handles after world {turn}"):
            assert engine.synchronize(done).tolist() == [size] * 3
            assert engine.poll(left)
            try:
                assert engine.synchronize(left).tolist() == [size] * 3
            except EngineError:
                assert size > 1  # The first rank to close waits only a limited time for operations in flight.
        refused_everywhere(parts, NotInitializedError, "engine.shutdown()")


@on_ranks(1, 2, 3, 4)
def test_a_forked_child(parts: Parts, rank: int, size: int) -> None:
    me = engine.rank(), engine.size()

    def ask() -> None:
        own = Parts()
        refused_everywhere(own, ForkedError, "forked child", [name for name in CALLS if name not in PLACE])
        own.done()

    with parts.part("calls"):
        assert in_child(ask) == "done"
        assert in_child(lambda: check_equal((engine.rank(), engine.size()), me)) == "done"
        assert in_child(lambda: refused(engine.init, "forked child", ForkedError)) == "done"
        assert in_child(engine.shutdown) == "done"
    if rank != 0:
        engine.barrier("rank 0 has forked")
    waiting = engine.allreduce_async(np.ones(3), engine.Sum, "over a fork")
    if rank == 0:
        if size > 1:  # It is in flight: the others have not submitted it.
            with parts.part("a handle"):
                wait = lambda: engine.synchronize(waiting)  # noqa: E731
                assert in_child(lambda: refused(wait, "forked child", ForkedError)) == "done"
                assert in_child(waiting.__repr__) == "done"
        engine.barrier("rank 0 has forked")
    assert engine.synchronize(waiting).tolist() == [size] * 3
    works(size)


@on_ranks(1, 2, 3, 4)
def test_a_fork_in_another_thread_while_the_engine_works(size: int) -> None:
    worker = threading.Thread(target=lambda: [in_child(lambda: None) for _ in range(3)])
    worker.start()
    for _ in range(50):
        works(size)
    worker.join()


def check_equal(found: object, expected: object) -> None:
    assert found == expected, (found, expected)


def in_child(action: Any) -> str:
    """Run a function in a forked child; return `done`, or its exception."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            action()
            text = "done"
        except BaseException as error:
            text = repr(error)
        os.write(write, text.encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        said = file.read().decode()
    os.waitpid(pid, 0)
    return said
