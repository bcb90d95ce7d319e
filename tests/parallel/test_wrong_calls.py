"""Refusals on the calling rank name the fault, and each leaves the engine working."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import engine
from engine.errors import ConfigError, DuplicateNameError, UnsupportedTensorError
from engine.session import runtime

from ..on_ranks import on_ranks, spare
from .arrays import refused, works

pytestmark = on_ranks(1, 2, 3, spare(4))

GOOD = np.ones(3, np.float32)
CALLS: dict[str, Callable[[Any], Any]] = {
    "allreduce": lambda x: engine.allreduce(x),
    "allreduce_": lambda x: engine.allreduce_(x),
    "allreduce_async": lambda x: engine.allreduce_async(x),
    "allgather": lambda x: engine.allgather(x),
    "broadcast": lambda x: engine.broadcast(x, 0),
    "broadcast_": lambda x: engine.broadcast_(x, 0),
    "reducescatter": lambda x: engine.reducescatter(x),
    "grouped_allreduce": lambda x: engine.grouped_allreduce([GOOD, x]),
}


def wrong(call: Callable[[], Any], text: str, size: int, kind: Any = UnsupportedTensorError) -> None:
    """Check that a call is refused, and that the engine goes on."""
    try:
        refused(call, text, kind)
    finally:
        works(size)


class Hostile:
    """Object that claims to lend memory and does not."""

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("not today")

    def __dlpack_device__(self) -> Any:
        return 1, 0


@pytest.mark.parametrize("call", ["allreduce", "allreduce_", "allgather", "allreduce_async", "broadcast"])
@pytest.mark.parametrize("value", [1.5, 3, True, [1.0, 2.0], (1.0,), 1j], ids=lambda value: type(value).__name__)
def test_numbers_and_lists(value: Any, call: str, size: int) -> None:
    wrong(lambda: CALLS[call](value), f"a {type(value).__name__} is no tensor", size)


def test_negative_number_of_an_optimizer(size: int) -> None:
    native = runtime.current_engine()
    wrong(lambda: native.mark_step(-1), "an optimizer's number is 0 or more, not -1", size, ValueError)


@pytest.mark.parametrize("value", [None, "text", object(), {"a": 1}, {1.0}], ids=lambda value: type(value).__name__)
def test_other_objects(value: Any, size: int) -> None:
    wrong(lambda: engine.allreduce(value), "neither DLPack nor the buffer protocol", size)


@pytest.mark.parametrize("call", ["allreduce", "allreduce_", "allgather", "broadcast_"])
@pytest.mark.parametrize("dtype", ["longdouble", "clongdouble", ">c8", ">f4", ">i8", "M8[s]"])
def test_dtypes_that_nothing_can_be_done_with(dtype: str, call: str, size: int) -> None:
    wrong(lambda: CALLS[call](np.zeros(3, dtype)), "", size)


@pytest.mark.parametrize("call", ["allreduce", "allreduce_", "reducescatter", "grouped_allreduce"])
@pytest.mark.parametrize("dtype", ["complex64", "complex128", "uint32", "uint64"])
def test_reductions_of_dtypes_that_are_moved_only(dtype: str, call: str, size: int) -> None:
    wrong(lambda: CALLS[call](np.zeros(size, dtype)), f"dtype {dtype}, which broadcast", size)


ODD: dict[str, tuple[str, Callable[[], Any], str]] = {
    "a record": ("allreduce", lambda: np.zeros(3, [("a", "f4"), ("b", "i4")]), ""),
    "objects": ("allreduce", lambda: np.array([None, 1], object), ""),
    "text": ("allreduce", lambda: np.array(["a", "b"]), ""),
    "characters": ("allreduce", lambda: memoryview(b"ab").cast("c"), "dtype"),
    "read-only bytes in place": ("allreduce_", lambda: b"abc", ""),
    "hostile": ("allreduce", Hostile, "not today"),
}


@pytest.mark.parametrize("title", ODD)
def test_odd_tensors(title: str, size: int) -> None:
    call, make, text = ODD[title]
    wrong(lambda: CALLS[call](make()), text, size)


@pytest.mark.parametrize("root", ["-1", "size", "2**20"])
def test_roots_that_are_no_rank(root: str, size: int) -> None:
    number = {"-1": -1, "size": size, "2**20": 1 << 20}[root]
    wrong(lambda: engine.broadcast(GOOD, number), f"root rank {number}", size, ValueError)
    wrong(lambda: engine.broadcast_(GOOD, number), f"(0 to {size - 1})", size, ValueError)


@pytest.mark.parametrize("root", [1 << 40, "0", None, 0.5])
def test_roots_that_are_no_number(root: Any, size: int) -> None:
    wrong(lambda: engine.broadcast(GOOD, root), "", size, (TypeError, OverflowError, ValueError))


@pytest.mark.parametrize("op", [len(engine.Op), -1, 99, "Sum"])
def test_operations(op: Any, size: int) -> None:
    wrong(lambda: engine.allreduce(GOOD, op), str(op), size, ValueError)


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -float("inf")])
def test_factors(factor: float, size: int) -> None:
    wrong(lambda: engine.allreduce(GOOD, engine.Sum, None, factor), "", size, ValueError)
    wrong(lambda: engine.allreduce(GOOD, engine.Sum, None, 1.0, factor), "", size, ValueError)


def test_a_factor_as_text(size: int) -> None:
    wrong(lambda: engine.allreduce(GOOD, engine.Sum, None, "2"), "", size, TypeError)  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", ["cycle_time_ms", "no_such_thing"])
def test_settings_while_running(setting: str, size: int) -> None:
    wrong(lambda: engine.init(**{setting: 3}), "running", size, ConfigError)


@on_ranks(2, 3, 4)
def test_the_same_name_twice(rank: int, size: int) -> None:
    if rank == 0:
        first = engine.allreduce_async(GOOD, engine.Sum, "twice")
        refused(lambda: engine.allreduce(GOOD, engine.Sum, "twice"), "'twice' again", DuplicateNameError)
    engine.barrier("go")
    if rank != 0:
        first = engine.allreduce_async(GOOD, engine.Sum, "twice")
    engine.synchronize(first)
    works(size)
