"""Prepared allreduces: values, memory that moves, usual calls of other ranks, and every way in which they fail."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import engine
from engine.errors import (
    CollectiveError,
    DuplicateNameError,
    EngineError,
    ForkedError,
    MismatchError,
    NotInitializedError,
    UnsupportedTensorError,
)

from ..on_ranks import on_ranks
from ..waiting import let_pass, until
from .arrays import works

pytestmark = on_ranks(1, 2, 3)


@pytest.mark.parametrize("count", [0, 1, 63, 1024, 70_001, 300_000])
def test_each_call_reduces_the_present_values(count: int, rank: int, size: int) -> None:
    tensor = np.zeros(count)
    add_up = engine.prepare_allreduce(tensor, engine.Sum)
    for turn in range(5):
        tensor[:] = rank + turn
        assert add_up() is tensor
        assert (tensor == size * (size - 1) / 2 + size * turn).all()


def test_operations_scales_and_dtypes(rank: int, size: int) -> None:
    for dtype in ("float16", "float32", "float64", "int8", "int64", "bool"):
        largest = np.full((3, 2), rank + 1, dtype)
        engine.prepare_allreduce(largest, engine.Max)()
        assert (largest == np.full((3, 2), size, dtype)).all()
    scaled = np.full(5, rank, np.float64)
    average = engine.prepare_allreduce(scaled, prescale_factor=2.0, postscale_factor=3.0)
    average()
    assert np.allclose(scaled, 3 * (size - 1))


def test_other_ranks_may_call_allreduce(rank: int, size: int) -> None:
    tensor = np.ones(10, np.float32)
    add_up = engine.prepare_allreduce(tensor, engine.Sum, "one of two ways")
    for turn in range(6):
        tensor[:] = turn
        if (rank + turn) % 2:
            engine.allreduce_(tensor, engine.Sum, "one of two ways")
        else:
            add_up()
        assert (tensor == size * turn).all()


def test_names_of_those_without_one_count_on(rank: int, size: int) -> None:
    if rank == 0:
        engine.prepare_allreduce(np.ones(1), name="of one rank alone")
    tensors = [np.full(2, float(number)) for number in range(4)]
    prepared = [engine.prepare_allreduce(tensor, engine.Sum) for tensor in tensors]
    assert len({each.name for each in prepared}) == 4
    for each in reversed(prepared):
        each()
    assert [tensor[0] for tensor in tensors] == [0, size, 2 * size, 3 * size]


@on_ranks(2, 3)
def test_in_a_process_set(rank: int, size: int) -> None:
    odd = engine.add_process_set(range(0, size, 2))
    if rank % 2 == 0:
        tensor = np.ones(3)
        engine.prepare_allreduce(tensor, engine.Sum, process_set=odd)()
        assert tensor[0] == len(range(0, size, 2))
    engine.remove_process_set(odd)


COPIED: dict[str, Callable[[], Any]] = {
    "strided": lambda: np.ones((4, 4))[:, 1],
    "read-only": lambda: np.broadcast_to(np.ones(1), (3,)),
    "list": lambda: [1.0, 2.0],
    "number": lambda: 3.0,
}


@pytest.mark.parametrize("kind", COPIED)
def test_what_would_be_copied_is_refused(kind: str, size: int) -> None:
    with pytest.raises(UnsupportedTensorError):
        engine.prepare_allreduce(COPIED[kind](), engine.Sum)
    works(size)


@on_ranks(2, 3)
def test_what_cannot_be_prepared_is_told(rank: int, size: int) -> None:
    tensor: Any = [1.0] if rank == size - 1 else np.ones(1)
    if rank == size - 1:
        with pytest.raises(UnsupportedTensorError):
            engine.prepare_allreduce(tensor, engine.Sum)
    else:
        with pytest.raises(CollectiveError, match="list is no tensor"):
            engine.prepare_allreduce(tensor, engine.Sum)()
    after = np.ones(2)
    engine.prepare_allreduce(after, engine.Sum)()
    assert after[0] == size


@on_ranks(2, 3)
def test_ranks_that_disagree(rank: int, size: int) -> None:
    tensor = np.ones(4, np.float32 if rank else np.float64)
    add_up = engine.prepare_allreduce(tensor, engine.Sum, "of two dtypes")
    for _ in range(3):
        with pytest.raises(MismatchError, match="float64"):
            add_up()
    assert tensor.tolist() == [1.0] * 4
    same = np.ones(4, np.float32)
    again = engine.prepare_allreduce(same, engine.Sum, "of two dtypes")
    again()
    assert same.tolist() == [size] * 4


@on_ranks(2, 3)
def test_one_thread_calls_at_a_time(rank: int, size: int) -> None:
    tensor = np.ones(1)
    add_up = engine.prepare_allreduce(tensor, engine.Sum, "in two threads")
    if rank == 0:
        refused: list[str] = []

        def call() -> None:
            try:
                add_up()
            except EngineError as error:
                refused.append(str(error))

        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: refused, "the refusal of one of two calls")
        engine.barrier("refused")
        for thread in threads:
            thread.join()
        assert len(refused) == 1 and "another thread" in refused[0]
    else:
        engine.barrier("refused")
        add_up()
    assert tensor[0] == size
    works(size)


@on_ranks(2, 3)
def test_a_name_in_flight(rank: int, size: int) -> None:
    tensor = np.ones(2)
    add_up = engine.prepare_allreduce(tensor, engine.Sum, "under way")
    other = np.ones(2)
    if rank == 0:
        handle = engine.allreduce_async_(other, engine.Sum, "under way")
        with pytest.raises(DuplicateNameError):
            add_up()
        engine.barrier("it was refused")
        handle.wait()
    else:
        engine.barrier("it was refused")
        add_up()
    assert (other if rank == 0 else tensor)[0] == size
    tensor[:] = 1
    add_up()
    assert tensor[0] == size


@on_ranks(2, 3)
def test_an_interrupted_call_leaves_its_operation(rank: int, size: int) -> None:
    """The other ranks get their result, as of an interrupted `allreduce_`, and the tensor is kept until then."""
    tensor = np.ones(3)
    add_up = engine.prepare_allreduce(tensor, engine.Sum, "interrupted")
    if rank == 0:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            add_up()
        signal.signal(signal.SIGINT, before)
        engine.barrier("interrupted it")
        until(lambda: tensor[0] == size, "the end of the interrupted operation")
    else:
        engine.barrier("interrupted it")
        add_up()
    assert tensor[0] == size
    tensor[:] = 1
    engine.barrier("the name is free")
    add_up()
    assert tensor[0] == size


def test_dropped_ones_forget_their_names(size: int) -> None:
    tensor = np.ones(1)
    for number in range(3000):
        engine.prepare_allreduce(tensor, engine.Sum, f"never called {number}")
    for number in range(50):
        tensor[0] = 1
        engine.prepare_allreduce(tensor, engine.Sum, f"called once {number}")()
        assert tensor[0] == size
    gc.collect()
    works(size)


@on_ranks(2, 3)
def test_a_rank_that_has_joined(rank: int, size: int) -> None:
    tensor = np.full(2, 5.0)
    add_up = engine.prepare_allreduce(tensor, engine.Sum, "who has not joined")
    add_up()
    if rank:
        tensor[:] = 1
        add_up()
        assert tensor[0] == size - 1
    engine.join()
    tensor[:] = 1
    add_up()
    assert tensor[0] == size


@on_ranks(1, 2, world=None)
def test_it_ends_with_its_world(rank: int, size: int) -> None:
    engine.init()
    tensor = np.ones(2)
    add_up = engine.prepare_allreduce(tensor, engine.Sum)
    add_up()
    child = os.fork()
    if child == 0:
        try:
            add_up()
        except ForkedError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    engine.shutdown()
    with pytest.raises(NotInitializedError):
        add_up()
    with pytest.raises(NotInitializedError):
        engine.prepare_allreduce(tensor)
    engine.init()
    with pytest.raises(NotInitializedError):
        add_up()
    tensor[:] = 1
    engine.prepare_allreduce(tensor, engine.Sum)()
    assert tensor[0] == size
    engine.shutdown()
    del add_up
    gc.collect()


@on_ranks(2, 3)
def test_a_late_rank_is_waited_for(rank: int, size: int) -> None:
    tensor = np.ones(1)
    add_up = engine.prepare_allreduce(tensor, engine.Sum, "late")
    begun = time.monotonic()
    if rank == size - 1:
        let_pass(0.35)  # ticks of the others pass
    add_up()
    assert tensor[0] == size
    assert time.monotonic() - begun > 0.3 or rank == size - 1
