"""Refusals of native calls: their conditions, the ranks that get them, and their texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import engine

from ..on_ranks import on_ranks
from .native_calls import Call, Driver
from .test_native_calls import f32, works

pytestmark = on_ranks(1, 2, 3, job="native calls")


def spoil(**fields: Any) -> Callable[[Call], None]:
    """Set fields of a call."""

    def change(call: Call) -> None:
        for name, value in fields.items():
            setattr(call.native, name, value)

    return change


def spoil_tensor(**fields: Any) -> Callable[[Call], None]:
    """Set fields of a call's first tensor."""

    def change(call: Call) -> None:
        for name, value in fields.items():
            setattr(call.tensors[0], name, value)

    return change


def move(call: Call, field: str, by: int) -> None:
    """Move the memory of a call's first tensor."""
    setattr(call.tensors[0], field, getattr(call.tensors[0], field) + by)


def dims(*numbers: int) -> Callable[[Call], None]:
    """Set the dimensions of a call's first tensor."""

    def change(call: Call) -> None:
        call.tensors[0].ndim = len(numbers)
        call.tensors[0].dims[: len(numbers)] = list(numbers)

    return change


# The kind of operation, its fault, and its other options.
REFUSED: dict[str, tuple[str, Callable[[Call], None], dict[str, Any]]] = {
    "a dtype below": ("allreduce", spoil_tensor(dtype=-1), {}),
    "a dtype above": ("allreduce", spoil_tensor(dtype=21), {}),
    "a dtype that is only moved": ("allreduce", spoil_tensor(dtype=11), {}),
    "a dtype of a group": ("allreduce", spoil_tensor(dtype=1000), {"group": True}),
    "an operation": ("allreduce", spoil(op=17), {}),
    "average of bool": ("allreduce", spoil_tensor(dtype=10), {"op": "Average"}),
    "adasum of rows": ("reducescatter", spoil(op=5), {}),
    "dimensions below": ("allreduce", spoil_tensor(ndim=-1), {}),
    "dimensions above": ("allreduce", spoil_tensor(ndim=13), {}),
    "a negative dimension": ("allreduce", dims(-4), {}),
    "two negative dimensions": ("allreduce", dims(-2, -2), {}),
    "more elements than there can be": ("allreduce", dims(1 << 40, 1 << 40), {}),
    "elements that wrap to a few": ("allreduce", dims(1 << 32, 1 << 32, 4), {}),
    "bytes that wrap": ("allreduce", dims((1 << 62) + 1), {}),
    "no tensor": ("allreduce", spoil(count=0), {}),
    "no tensor in a group": ("allreduce", spoil(count=0), {"group": True}),
    "two tensors and no group": ("allreduce", spoil(count=2), {}),
    "a group that is too large": ("allreduce", spoil(count=(1 << 20) + 1), {"group": True}),
    "a group that is much too large": ("allgather", spoil(count=2**32 - 1), {"group": True}),
    "a compression": ("allreduce", spoil(wire=77), {}),
    "a compression beyond the last": ("allreduce", spoil(wire=4), {}),
    "adasum compressed": ("allreduce", spoil(op=5, wire=1), {}),
    "a factor": ("allreduce", spoil(prescale=float("nan")), {}),
    "a factor of the result": ("allreduce", spoil(postscale=float("inf")), {}),
    "a root below": ("broadcast", spoil(root=-1), {}),
    "a root above": ("broadcast", spoil(root=1000), {}),
    "a scalar's rows": ("allgather", spoil_tensor(ndim=0), {}),
    "a scalar's rows to scatter": ("reducescatter", spoil_tensor(ndim=0), {}),
    "no splits": ("alltoall", spoil(splits=None), {"splits": [1, 1, 1, 1]}),
    "more rows than there are": ("alltoall", spoil(), {"splits": [5, 5, 5, 5]}),
    "a negative split": ("alltoall", spoil(), {"splits": [-1, 1, 1, 1]}),
    "splits that wrap": ("alltoall", spoil(), {"splits": [2**63 - 1] * 4}),
    "no source": ("allreduce", spoil_tensor(source=None), {}),
    "no target": ("allreduce", spoil_tensor(target=None), {}),
    "no source of rows": ("allgather", spoil_tensor(source=None), {}),
    "no source in a group": ("allreduce", spoil_tensor(source=None), {"group": True}),
    "no target in a group": ("reducescatter", spoil_tensor(target=None), {"group": True}),
    "a source that is not aligned": ("allreduce", lambda call: move(call, "source", 2), {}),
    "a target that is not aligned": ("allreduce", lambda call: move(call, "target", 1), {}),
    "no tensors at all": ("allreduce", spoil(tensors=None), {}),
}


@pytest.mark.parametrize("name", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("title", REFUSED)
def test_a_call_that_cannot_be_is_told_to_the_others(title: str, name: bool, rank: int, size: int) -> None:
    kind, change, options = REFUSED[title]
    odd = size - 1
    with Driver() as driver:
        plain = {"splits": [1] * size} if kind == "alltoall" else {"group": True} if options.get("group") else {}
        call = driver.call(kind, [f32(4)], name=title if name else None, **(options if rank == odd else plain))
        if rank == odd:
            change(call)
        driver.submit(call)
        call.wait()
        if rank == odd:
            assert call.status == "REFUSED" and "Error: " in call.text, (call.status, call.text)
        else:
            assert call.status == "MISMATCH", (call.status, call.text)
            assert call.text.startswith("MismatchError: ") and f"rank {odd} failed" in call.text, call.text
        again = driver.run(kind, [f32(4)], name=title if name else None, **plain)
        assert again.status == "OK", again.text
        works(driver, size)


NAMELESS: dict[str, Callable[[Call], None]] = {
    "no name": spoil(name_bytes=0),
    "a name that is too long": lambda call: spoil(name=b"x" * 1025, name_bytes=1025)(call),
    "a name that is much too long": lambda call: spoil(name_bytes=2**32 - 1)(call),
    "a kind": spoil(kind=200),
    "another size": spoil(struct_size=8),
    "a larger size": spoil(struct_size=4096),
}


@pytest.mark.parametrize("title", NAMELESS)
def test_what_has_no_name_is_refused_here_alone(title: str, size: int) -> None:
    with Driver() as driver:
        call = driver.call("allreduce", [f32(4)], name="x")
        NAMELESS[title](call)
        driver.submit(call)
        call.wait()
        assert call.status == "REFUSED" and "Error: " in call.text, (call.status, call.text)
        works(driver, size)


@on_ranks(3, job="native calls")
def test_adasum_among_three_ranks_is_refused(rank: int, size: int) -> None:
    with Driver() as driver:
        call = driver.run("allreduce", [f32(4)], op="Adasum", name="three")
        assert call.status == "REFUSED" and "1, 2, 4, 8 .. ranks" in call.text
        works(driver, size)


# ---- memory that cannot be


def overlapping(kind: str, shift: int) -> Callable[[Driver, str], Call]:
    """Call of two tensors, the second of which has its result `shift` bytes after the first tensor's beginning."""

    def make(driver: Driver, name: str) -> Call:
        call = driver.call(kind, [f32(400), f32(400)], name=name, group=True, in_place=True)
        call.tensors[1].target = call.tensors[0].source + shift
        return call

    return make


def twice(driver: Driver, name: str) -> Call:
    """Call of a group of two tensors that are the same, in place."""
    call = overlapping("allreduce", 0)(driver, name)
    call.tensors[1].source = call.tensors[0].source
    return call


def displaced(kind: str, shift: int) -> Callable[[Driver, str], Call]:
    """Call of one tensor whose result partly overlaps it."""

    def make(driver: Driver, name: str) -> Call:
        call = driver.call(kind, [f32(400)], name=name, in_place=True)
        call.tensors[0].target += shift
        return call

    return make


OVERLAPS: dict[str, Callable[[Driver, str], Call]] = {
    "one tensor twice": twice,
    "two results in one place": overlapping("allreduce", 0),
    "a result over another tensor": overlapping("allreduce", 1596),
    "shares over another tensor": overlapping("reducescatter", 0),
    "a result beside its tensor": displaced("allreduce", 4),
    "a share in the middle of its tensor": displaced("reducescatter", 400),
    "a broadcast beside its tensor": displaced("broadcast", 1596),
}


@pytest.mark.parametrize("title", OVERLAPS)
def test_results_that_overlap_are_refused(title: str, rank: int, size: int) -> None:
    with Driver() as driver:
        call = OVERLAPS[title](driver, title)
        driver.submit(call)
        assert call.wait().status == "REFUSED", (call.status, call.text)
        assert "share memory" in call.text or "overlap" in call.text, call.text
        works(driver, size)


def test_tensors_that_are_only_read_may_overlap(rank: int, size: int) -> None:
    """A tensor may be part of another; a result may replace its own tensor, or directly follow another result."""
    with Driver() as driver:
        memory, results = np.full(1200, rank + 1, np.float32), np.empty(1200, np.float32)
        call = driver.call(
            "allreduce", [memory[:400], memory, memory[800:], memory[800:].copy()], name="read", group=True
        )
        for tensor, begin in zip(call.tensors, (0, 400, 800), strict=False):
            tensor.source, tensor.target = memory.ctypes.data + begin * 4 % 3200, results.ctypes.data + begin * 4
            tensor.dims[0] = 400
        call.tensors[3].target = call.tensors[3].source
        driver.submit(call)
        assert call.wait().status == "OK", call.text
        assert (results == size * (size + 1) / 2).all() and (call.sources[3] == results[0]).all()


# ---- calls that whoever makes them refuses, and names that are in flight


@pytest.mark.parametrize("name", ["refused elsewhere", None])
def test_a_fault_is_told_to_the_others(name: str | None, rank: int, size: int) -> None:
    """The text is that of the rank that found it; nothing else of the call is examined."""
    with Driver() as driver:
        call = driver.call("allreduce", [f32(4)], name=name)
        if rank == 0:
            call.native.fault = "ArgumentError: the layer größe has no gradient".encode()
            call.native.tensors, call.native.count, call.native.op = None, 77, 99
        driver.submit(call)
        call.wait()
        assert call.status == ("REFUSED" if rank == 0 else "MISMATCH")
        assert "ArgumentError: the layer größe has no gradient" in call.text
        assert rank == 0 or "rank 0 failed before it was submitted" in call.text
        works(driver, size)


def test_texts_are_utf8_wherever_they_are_cut(rank: int, size: int) -> None:
    """Names are longer than the part shown in a text; a driver decodes each text."""
    with Driver() as driver:
        for k in range(4):
            call = driver.call("allreduce", [f32(4)], name="x" * k + "ö" * 500)
            call.native.fault = ("y" * k + "größe" * 100).encode() if rank == 0 else None
            driver.submit(call)
            assert "ö" in call.wait().text or rank, call.text


def test_a_name_that_is_in_flight(rank: int, size: int) -> None:
    """The second call fails, natively after Python and the other way round; the first goes on.

    The other ranks' second call fails, too, though it comes after their first has ended.
    """
    with Driver() as driver:
        held = driver.call("allreduce", [f32(4)], name="twice")
        if rank == 0:
            driver.submit(held)
        if rank == 0 and size > 1:
            again = driver.run("allreduce", [f32(4)], name="twice")
            assert again.status == "DUPLICATE" and again.text.startswith("DuplicateNameError: rank 0 submitted 'twice'")
            with pytest.raises(engine.errors.DuplicateNameError):
                engine.allreduce_async(f32(4), engine.Sum, "twice")
            handle = engine.allreduce_async(f32(4), engine.Sum, "twice in Python")
            assert driver.run("allreduce", [f32(4)], name="twice in Python").status == "DUPLICATE"
        engine.barrier("the first is in flight")
        if rank != 0:
            driver.submit(held)
            handle = engine.allreduce_async(f32(4), engine.Sum, "twice in Python")
        if size > 1:
            assert (engine.synchronize(handle) == size).all()
        assert held.wait().status == "OK" and (held.targets[0] == size).all()
        if rank != 0:
            again = driver.run("allreduce", [f32(4)], name="twice")
            assert again.status == "MISMATCH" and "submitted 'twice' again before" in again.text, again.text
            with pytest.raises(engine.errors.MismatchError, match="submitted 'twice in Python' again before"):
                engine.allreduce(f32(4), engine.Sum, "twice in Python")
        assert driver.run("allreduce", [f32(4)], name="twice").status == "OK"
        works(driver, size)


def test_names_that_all_ranks_use_twice(rank: int, size: int) -> None:
    """Their refusals meet each other, or a call that came after the first had ended."""
    with Driver() as driver:
        for turn in range(5):
            calls = [driver.call("allreduce", [f32(4)], name=f"all of us {k % 5}") for k in range(15)]
            driver.submit(*calls)
            driver.wait(calls)
            assert {call.status for call in calls} <= {"OK", "DUPLICATE", "MISMATCH"}, turn
            assert all(call.status == "OK" for call in calls[:5])
            engine.barrier()
        works(driver, size)
