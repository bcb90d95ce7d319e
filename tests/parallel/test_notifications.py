"""Functions that a thread of the engine calls at the end of operations, and what they may do."""

from __future__ import annotations

import os
import threading
from functools import partial

import numpy as np
import pytest

import engine
from engine.errors import EngineError, ForkedError, NotInitializedError, RankLeftError
from engine.native import core

from ..on_ranks import on_ranks
from ..waiting import let_pass, until
from .arrays import works

pytestmark = on_ranks(2, world=None)

TICKS = 0.5  # seconds in which a wait has looked several times whether it waits in vain


def native() -> core.Engine:
    return engine.session.runtime.current_engine()


def submits_late(rank: int, first: core.Engine, second: core.Engine) -> None:
    """Have a function that is called at the end of an operation of `first` submit one of `second`, late.

    Rank 0's main thread waits in `second` meanwhile, for what rank 1 submits after that.
    """
    own, ended = np.ones(4), threading.Event()

    def submit_late() -> None:
        let_pass(TICKS)
        second.allgather(own, None).wait()
        ended.set()

    begun = np.ones(4)
    if rank == 0:
        begin = first.allreduce(begun, begun, "begin", engine.Sum, 1.0, 1.0)
        begin.notify(submit_late)
        first.barrier("asked").wait()
        second.broadcast(own, own, None, second.numbers[0], True).wait()
        assert ended.wait(30)
    else:
        first.barrier("asked").wait()
        first.allreduce(begun, begun, "begin", engine.Sum, 1.0, 1.0, True).wait()
        second.allgather(own, None, True).wait()
        second.broadcast(own, own, None, second.numbers[0], True).wait()


def test_what_a_notification_submits_late_is_not_left_out(rank: int, size: int) -> None:
    engine.init()
    submits_late(rank, native(), native())
    works(size)
    engine.shutdown()


def test_a_notification_may_submit_to_another_set_late(rank: int, size: int) -> None:
    engine.init()
    formed = native().form((0, 1), 0)
    assert formed is not None
    submits_late(rank, native(), formed)
    formed.close(5.0)
    engine.shutdown()


def test_a_forked_child_cannot_ask_to_be_notified(rank: int, size: int) -> None:
    engine.init()
    tensor = np.ones(4)
    if rank == 0:
        handle = native().allreduce(tensor, tensor, "late", engine.Sum, 1.0, 1.0)
        child = os.fork()
        if child == 0:
            try:
                handle.notify(lambda: None)
            except ForkedError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        native().barrier("forked").wait()
    else:
        native().barrier("forked").wait()
        handle = native().allreduce(tensor, tensor, "late", engine.Sum, 1.0, 1.0)
    handle.wait()
    assert (tensor == size).all()
    engine.shutdown()


def test_a_shutdown_notifies_of_what_was_in_flight(rank: int, size: int) -> None:
    """Either it ends the operation, or the other rank has left before."""
    engine.init(shutdown_timeout=0.1)
    found: list[BaseException] = []
    native().barrier("begun").wait()
    if rank == 0:
        tensor = np.ones(4)
        handle = native().allreduce(tensor, tensor, "alone", engine.Sum, 1.0, 1.0)

        def wait_again() -> None:
            try:
                handle.wait()
            except EngineError as error:
                found.append(error)

        handle.notify(wait_again)
    engine.shutdown()
    if rank == 0:
        until(lambda: found, "the notification comes")
        assert isinstance(found[0], NotInitializedError | RankLeftError)


def raises() -> None:
    raise ArithmeticError("of a notification")


def test_an_exception_of_a_notification_ends_nothing_else(rank: int, size: int) -> None:
    engine.init()
    told: list[int] = []

    def tell(number: int) -> None:
        told.append(number)
        if number < 2:
            raises()

    tensors = [np.ones(4) for _ in range(3)]
    if rank == 1:
        native().barrier("asked").wait()
    handles = [native().allreduce(each, each, None, engine.Sum, 1.0, 1.0) for each in tensors]
    if rank == 0:
        for number, handle in enumerate(handles):
            handle.notify(partial(tell, number))
        native().barrier("asked").wait()
        until(lambda: len(told) == 3, "all are notified, in any order")
    for handle in handles:
        handle.wait()
    with pytest.raises(ArithmeticError, match="of a notification"):
        handles[0].notify(raises)
    works(size)
    engine.shutdown()
