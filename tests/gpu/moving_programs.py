"""Programs of ranks for tests of allgather, alltoall and reducescatter on GPUs, which are stand-ins.

python -m tests.gpu.moving_programs NAME+NAME+... RANK SIZE KERNELS ...
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import signal
import time
from typing import Any

import numpy as np
import pytest

from engine.errors import EngineError, UnsupportedTensorError
from engine.native import gradients

from ..waiting import let_pass, until
from .allreduce_programs import DTYPES, OPS, Binding, Parameter, compare, core, main
from .device_tensors import DeviceTensor, Framework, Room
from .plane_programs import Rank, planes
from .submitted import drawn, exchange, gather, gather_group, own_rows, scatter, seen

MOVED = ("float16", "bool", "float32", "complex64")


# ---- numbers ---------------------------------------------------------------------------------------------------------


def numbers(me: Rank) -> None:
    """Compare all operations with those in host memory."""
    with me.world("numbers"):
        gathers(me)
        exchanges(me)
        scatters(me)


def gathers(me: Rank) -> None:
    """Gather equal and uneven rows, none on some ranks or on all, alone and in groups."""
    for dtype, more in zip(MOVED, ((), (3,), (2, 2), (0,)), strict=True):
        for k, rows in enumerate((5, 1 + 2 * me.rank, 4 * (me.rank == me.size - 1), 0)):
            gather(f"{dtype} {more} {k}", drawn(me.rank, rows, dtype, *more)).check()
    for turn in range(2):
        group = [
            drawn(me.rank, (7 * me.rank + 3 * k + turn) % 5, dtype, *[2] * (k % 3)) for k, dtype in enumerate(MOVED)
        ]
        gather_group(f"group {turn}", [*group, drawn(me.rank, 6, "int8")]).check()
    whole = DeviceTensor(drawn(me.rank, 40, "uint8"), late=1.0)
    handle = core().allgather(whole.slice(3, 20 + me.rank), "where it lies", False, Room())
    handle.wait()
    wanted = np.concatenate([drawn(rank, 40, "uint8")[3 : 20 + rank] for rank in range(me.size)])
    np.testing.assert_array_equal(handle.gathered[0].numpy(), wanted)


def exchanges(me: Rank) -> None:
    """Exchange equal and uneven parts, none for some ranks, and rows that are not sent."""
    for k, dtype in enumerate(("float32", "bool", "complex64", "int16", "float16")):
        splits = np.random.default_rng([me.rank, k]).integers(0, 4, me.size)
        splits = [[2] * me.size, splits, [0] * me.size, [me.rank] * me.size, splits * (np.arange(me.size) == 0)][k]
        for more in ((), (3,)):
            rows = drawn(me.rank, sum(splits) + k % 2, dtype, *more)
            exchange(f"to each {dtype} {more}", rows, [int(each) for each in splits]).check()


def scatters(me: Rank) -> None:
    """Scatter every dtype and reduction, with and without even rows, in groups, with factors and compression."""
    for dtype, op in itertools.product(DTYPES, OPS):
        if op != "average" or dtype != "bool":
            scatter(me, f"{dtype} {op}", [drawn(me.rank, 7, dtype, 2)], op).check(op)
    for rows, op in itertools.product((6, 1, 0), ("sum", "min")):
        scatter(me, f"{rows} rows {op}", [drawn(me.rank, rows, "float32", 3)], op).check(op)
    for op in ("sum", "average", "max"):
        group = [drawn(me.rank, 3 + k, dtype, *[2] * (k % 2)) for k, dtype in enumerate(DTYPES[:-1])]
        scatter(me, f"group {op}", [*group, *group[:3]], op).check(op)
        for dtype, wire in (("float32", None), ("float32", "bfloat16"), ("float32", "float16"), ("float16", None)):
            how = {"wire": wire, "prescale": 0.5, "postscale": 3.0}
            for rows in (6, 7):
                scatter(me, f"{dtype} {op} {wire} {rows}", [drawn(me.rank, rows, dtype, 3)], op, **how).check(op, wire)
        scatter(me, f"{op} in place", [drawn(me.rank, 6, "float32", 3)], op).check(op)


def slabs(me: Rank) -> None:
    """Move data larger than the slab, in pieces."""
    planes.SLAB, planes.TABLES = 1 << 16, 1 << 12
    with me.world("slabs"):
        for op in ("sum", "max"):
            scatter(me, f"long {op}", [drawn(me.rank, 20001, "float32", 3)], op).check(op)
            scatter(me, f"long {op} compressed", [drawn(me.rank, 20000, "float32", 3)], op, wire="float16").check(
                op, "float16"
            )
            group = [drawn(me.rank, 300 + k, "float64") for k in range(200)]
            scatter(me, f"many {op}", group, op).check(op)
        gather("long", drawn(me.rank, 30000 * me.rank + 1, "float32")).check()
        exchange("long to each", drawn(me.rank, 60000, "float32"), [60000 // me.size] * me.size).check()


def joins(me: Rank) -> None:
    """Join on a rank, which then sends and receives nothing."""
    planes.SLAB, planes.TABLES = 1 << 16, 1 << 12
    with me.world("joins"):
        for turn in range(2):
            gone = (turn + me.size - 1) % me.size
            gather("first", drawn(me.rank, 3, "float32")).check()
            if me.rank == gone:
                core().join()
                continue
            gather(f"rows {turn}", drawn(me.rank, 5, "float32", 3)).check()
            gather(f"many rows {turn}", drawn(me.rank, 30000 + me.rank, "float32")).check()
            gather_group(f"group {turn}", [drawn(me.rank, 2 + k + me.rank, "int16") for k in range(4)]).check()
            exchange(f"to each {turn}", drawn(me.rank, 40000 * me.size, "int16"), [40000] * me.size).check()
            for op in ("sum", "average", "min"):
                scatter(me, f"part {op} {turn}", [drawn(me.rank, 2 * me.size, "float32", 3)], op).check(op)
                group = [drawn(me.rank, 4 + k, "int32" if k % 2 else "float32", 2) for k in range(5)]
                scatter(me, f"parts {op} {turn}", group, op).check(op)
            core().join()
        gather("last", drawn(me.rank, 3, "float32")).check()


class Sparse:
    """A sparse gradient: its row numbers and rows, in either memory."""

    def __init__(self, me: Rank, k: int, place: Any) -> None:
        count = (me.rank + k) % 4
        self.indices = place(np.arange(count, dtype=np.int64).reshape(count, 1) * 2)
        self.values = place(drawn(me.rank, count, "float32", 3))


class SparseBinding(Binding):
    """Binding that replaces a sparse gradient by its parts."""

    def replace(self, _index: int, _parameter: Parameter, gradient: Any) -> Any:
        return (gradient.indices, gradient.values, [10, 3], None) if isinstance(gradient, Sparse) else gradient


def sparse(me: Rank) -> None:
    """Reduce gradients that are sparse, absent on some ranks, and dense in the next pass; and sparse tensors."""
    with me.world("sparse"):
        parameters = [Parameter(30) for _ in range(4)]
        for parameter in parameters:
            parameter.memory = DeviceTensor(np.zeros((10, 3), np.float32))
        group = gradients.GradientGroup(core(), SparseBinding(parameters), OPS["average"])
        native = [group.add(parameter, f"parameter {k}", None) for k, parameter in enumerate(parameters)]
        for step in range(4):
            for k, parameter in enumerate(parameters):
                parameter.grad = None
                if k == 3 and me.rank == step % me.size:  # this rank lacks it
                    continue
                dense = k == 1 or (k == 2 and step % 2)
                mine = drawn(me.rank, 10, "float32", 3)
                parameter.grad = DeviceTensor(mine, late=1.0) if dense else Sparse(me, k, DeviceTensor)
                native[k](parameter)
            found = dict(group.finish())
            for k in (0, 3) if step % 2 else (0, 2, 3):
                ranks = [rank for rank in range(me.size) if k != 3 or rank != step % me.size]
                (indices, rows, length), (rest, _, row) = found[k]
                counts = [(rank + k) % 4 if rank in ranks else 0 for rank in range(me.size)]
                assert (list(rows), length if any(counts) else 8, row if any(counts) else 12) == (counts, 8, 12)
                wanted = [2 * each for count in counts for each in range(count)]
                np.testing.assert_array_equal(seen(indices, np.int64), wanted)
                parts = [drawn(rank, count, "float32", 3).ravel() for rank, count in enumerate(counts)]
                np.testing.assert_array_equal(seen(rest, np.float32), np.concatenate(parts))
            total = np.add.reduce([drawn(rank, 10, "float32", 3) for rank in range(me.size)])
            compare(parameters[1].grad.numpy(), total / np.float32(me.size), f"step {step}")


# ---- order, memory and waits -----------------------------------------------------------------------------------------


def released() -> bool:
    """Return whether no tensor is alive, after the engine has freed what it can."""
    core().free_deferred()
    return not any(isinstance(each, DeviceTensor) for each in gc.get_objects())


def mixed(me: Rank) -> None:
    """Run random operations with many in flight, waited for in any order; some are dropped."""
    draw, own = np.random.default_rng(7), np.random.default_rng([8, me.rank])
    me.cuda.stand_hosts_are_one(1)  # the stand-in does not see the word by which the CUDA thread reports the progress
    with me.world("mixed", cycle_time_ms=1.0):
        for turn in range(4):
            pending = []
            for k in range(12):
                kind, dtype = draw.integers(5), str(draw.choice(["float32", "int32", "float64"]))
                rows, width = int(own.integers(0, 9)), int(draw.integers(1, 40))
                name = f"{kind} {turn} {k}"
                if kind == 0:
                    pending.append((gather(name, drawn(me.rank, rows, dtype, width)), "sum"))
                elif kind == 1:
                    count = int(draw.integers(1, 4))
                    pending.append(
                        (gather_group(name, [drawn(me.rank, rows + each, dtype) for each in range(count)]), "sum")
                    )
                elif kind == 2:
                    splits = [int(each) for each in own.integers(0, 5, me.size)]
                    pending.append((exchange(name, drawn(me.rank, sum(splits), dtype, width), splits), "sum"))
                else:
                    op = str(draw.choice(["sum", "max", "average"]))
                    pending.append(
                        (scatter(me, name, [drawn(me.rank, int(draw.integers(0, 9)), dtype, width)], op), op)
                    )
            for k in own.permutation(len(pending)):
                submitted, op = pending[k]
                pending[k] = None  # type: ignore[call-overload]
                if own.integers(4):
                    submitted.check(op)
                del submitted
        until(released, "what was given up is freed")


def forgotten(me: Rank) -> None:
    """Drop results and handles before the device is done, or another stream has waited (problem 10)."""
    me.cuda.stand_hosts_are_one(1)
    with me.world("forgotten"):
        for turn in range(12):
            tensor = DeviceTensor(drawn(me.rank, 100 + me.rank, "float32"), late=10.0 if turn % 3 == 0 else 1.0)
            handle = core().allgather(tensor, f"tensor {turn % 5}", False, Room())
            if turn % 3 == 0:
                ours, Framework.stream = Framework.stream, Framework.device.new_stream()
                handle.wait()
                Framework.stream = ours
            elif turn % 3 == 1:
                handle.wait()
                handle.gathered[0].numpy()
            del tensor, handle
        until(released, "what was given up is freed")


def alone(me: Rank) -> None:
    """Submit without any further call: operations go on, and other ranks' GPUs do not wait."""
    with me.world("alone"):
        handle = core().allgather(DeviceTensor(drawn(me.rank, 3 + me.rank, "float32")), "rows", False, Room())
        if me.rank == 0:
            until(lambda: os.path.exists("read"), "the other has its result")
        else:
            handle.wait()
            handle.gathered[0].numpy()
            open("read", "w").close()
        handle.wait()


def prompt(me: Rank) -> None:
    """Check that an operation that has waited for a result's memory goes on at once, not at the next poll."""

    def late(sizes: list[int]) -> list[DeviceTensor]:
        let_pass(0.05)  # until the CUDA thread has come, and sleeps
        return Room(0.0)(sizes)

    with me.world("prompt"):
        took = []
        for turn in range(12):
            tensor, begun = DeviceTensor(drawn(me.rank, 3, "float32")), time.monotonic()
            core().allgather(tensor, f"rows {turn}", True, late).wait()
            took.append(time.monotonic() - begun)
        assert min(took) < 0.09, took  # it polls every 0.1 s


def captures(me: Rank) -> None:
    """Get memory for results while a thread captures a graph and forbids others to allocate (problem 15)."""
    with me.world("captures"):
        gather("first", drawn(me.rank, 3, "float32")).check()
        tensor = DeviceTensor(drawn(me.rank, 3 + me.rank, "float32"))
        stream, graph, room = Framework.device.new_stream(), ctypes.c_void_p(), Room()
        assert me.cuda.cuStreamBeginCapture_v2(stream, 0) == 0  # global
        handle = core().allgather(tensor, "meanwhile", False, room)
        until(lambda: handle.done, "it is done")
        assert me.cuda.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0, "the capture is spoilt"
        handle.wait()
        wanted = np.concatenate([drawn(rank, 3 + rank, "float32") for rank in range(me.size)])
        np.testing.assert_array_equal(seen(handle.gathered[0], np.float32), wanted)


# ---- failures --------------------------------------------------------------------------------------------------------


def refusals(me: Rank) -> None:
    """Check that impossible operations are refused, and that the world goes on."""
    with me.world("refusals"):
        tensor, host = DeviceTensor(drawn(me.rank, 4, "float32")), drawn(me.rank, 4, "float32")
        gather("first", host).check()
        for call in (lambda: core().allgather(tensor, "a"), lambda: core().alltoall(tensor, [1] * me.size, "a")):
            with pytest.raises(UnsupportedTensorError, match="makes no room for results"):
                call()
        with pytest.raises(UnsupportedTensorError, match="all its tensors on one device"):
            core().allgather_group([tensor, host], "group", False, None, Room())
        with pytest.raises(UnsupportedTensorError, match="all its tensors on one device"):
            core().reducescatter(tensor, host[: own_rows(me, 4)], "part", 0, 1.0, 1.0)
        with pytest.raises(EngineError, match="use allreduce"):
            core().reducescatter(tensor, tensor.slice(0, own_rows(me, 4)), "part", 5, 1.0, 1.0)
        gather("last", host).check()


def noroom(me: Rank) -> None:
    """Run out of memory for a result on one rank: all ranks are told."""

    def none(sizes: list[int]) -> list[DeviceTensor]:
        raise MemoryError(f"the GPU is full, and {sum(sizes)} bytes are wanted")

    begun = time.monotonic()
    with me.refused_world("noroom"):
        gather("first", drawn(me.rank, 3, "float32")).check()
        tensor = DeviceTensor(drawn(me.rank, 3, "float32"))
        core().allgather(tensor, "second", False, none if me.rank == 1 else Room()).wait()
        core().allgather(tensor, "third", False, Room()).wait()
        core().barrier("all").wait()
    assert time.monotonic() - begun < planes.CLOSING, "the CUDA thread still waits for room"


def slowroom(me: Rank) -> None:
    """Let NCCL fail while rank 1's CUDA thread waits for the framework's memory."""

    def late(sizes: list[int]) -> list[DeviceTensor]:
        me.fail("ncclCommGetAsyncError", 1, 2)
        until(lambda: core().failure is not None, "the failure is seen", 20)
        return Room()(sizes)

    with me.world("slowroom"):
        gather("first", drawn(me.rank, 3, "float32")).check()
        tensor = DeviceTensor(drawn(me.rank, 3, "float32"))

        def again() -> None:
            while True:
                core().allgather(tensor, "second", False, late if me.rank == 1 else Room()).wait()
                core().barrier("all").wait()

        with pytest.raises(EngineError, match="rank 1 failed: ncclCommGetAsyncError failed"):
            again()


def fails(me: Rank, call: str) -> None:
    """Make a call of rank 1's CUDA thread fail."""
    with me.refused_world("fails"):
        gather("first", drawn(me.rank, 3, "float32")).check()
        core().barrier("ready").wait()
        if me.rank == 1:
            me.fail(call, 1, 1 if call.startswith("nccl") else 700)
        core().barrier("armed").wait()
        pending = [
            gather("rows", drawn(me.rank, 3, "float32")),
            gather("uneven", drawn(me.rank, 3 + me.rank, "float32")),
            exchange("to each", drawn(me.rank, 2 * me.size, "float32"), [2] * me.size),
            scatter(me, "part", [drawn(me.rank, 2 * me.size, "float32")], "sum"),
        ]
        for submitted in pending:
            submitted.handle.wait()
        core().barrier("all").wait()


def lost(me: Rank) -> None:
    """Kill the last rank while an operation is in flight."""
    last = me.rank == me.size - 1
    with me.losing_world("lost", stall_limit=2.0):
        gather("first", drawn(me.rank, 3, "float32")).check()
        tensor = DeviceTensor(drawn(me.rank, 3 + me.rank, "float32"), late=5.0)
        handle = core().alltoall(tensor, [1] * me.size, "second", False, Room())
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        handle.wait()
        core().allgather(tensor, "third", False, Room()).wait()
    with me.world("again", size=me.size - 1):
        core().allgather(DeviceTensor(drawn(me.rank, 3, "float32")), "rows", False, Room()).wait()


PROGRAMS = {
    program.__name__: program
    for program in (
        *(numbers, sparse, slabs, joins, mixed, forgotten, alone),
        *(captures, prompt, refusals, noroom, slowroom, fails, lost),
    )
}


if __name__ == "__main__":
    main(PROGRAMS, ("fails", "noroom", "slowroom"))
