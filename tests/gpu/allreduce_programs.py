"""Programs of ranks for tests of allreduce on GPUs, which are stand-ins; `plane_programs.Rank` has worlds.

python -m tests.gpu.allreduce_programs NAME RANK SIZE KERNELS ...
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.errors import DeviceError, EngineError, MismatchError, UnsupportedTensorError
from engine.native import gradients
from engine.session import runtime

from ..waiting import until
from .device_tensors import DeviceTensor, Framework, Room
from .plane_programs import Rank, planes

DTYPES = ("float16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "int64", "bool")
OPS = {"sum": 0, "average": 1, "min": 2, "max": 3, "product": 4}


_within: list[Any] = []  # engines of process sets; operations go to the last one


def core() -> Any:
    """Return the native engine of the current world, or of a process set."""
    return _within[-1] if _within else runtime.current_engine()


@contextlib.contextmanager
def within(process_set: Any) -> Iterator[SimpleNamespace]:
    """Submit operations in a process set; yield this process's rank in it and its size."""
    _within.append(process_set.engine)
    try:
        yield SimpleNamespace(rank=process_set.rank(), size=process_set.size())
    finally:
        _within.pop()


def allreduce(tensor: Any, output: Any, name: str | None = None, op: str = "sum", **more: Any) -> Any:
    """Submit a tensor, and return its handle."""
    given = {"prescale": 1.0, "postscale": 1.0, "blocking": False, "wire": None} | more
    return core().allreduce(
        tensor, output, name, OPS[op], given["prescale"], given["postscale"], given["blocking"], given["wire"]
    )


def broadcast(tensor: Any, output: Any, root: int, name: str | None = None) -> Any:
    """Submit a tensor, and return its handle."""
    return core().broadcast(tensor, output, name, root)


def values(rank: int, count: int, dtype: str) -> np.ndarray:
    """Return numbers for which sums and products of floats are exact, and those of integers overflow."""
    drawn = np.random.default_rng([rank, count]).integers(-100, 100, count)
    if dtype == "bool":
        return drawn > 50
    return (drawn % 7 - 3 if dtype.startswith("float") else drawn).astype(dtype)


def on_host(mine: np.ndarray, **how: Any) -> np.ndarray:
    """Return what the host-memory plane computes from this rank's values and the others'."""
    wanted = np.empty_like(mine)
    allreduce(mine, wanted, blocking=True, **how).wait()
    return wanted


def compare(got: np.ndarray, wanted: np.ndarray, what: str, op: str = "sum", wire: str | None = None) -> None:
    """Check that bits are equal; an average of halves is divided before it is summed, so rounding may differ."""
    if op == "average" and "float16" in (str(got.dtype), wire):
        np.testing.assert_allclose(got, wanted, rtol=4e-3, atol=4e-3, err_msg=what)
    else:
        np.testing.assert_array_equal(got, wanted, what)


def numbers(me: Rank) -> None:
    """Reduce with every dtype and operation."""
    me.cuda.stand_hosts_are_one(1)  # where a rank is slow, waiters learn from memory what the CUDA thread has seen done
    with me.world("numbers"):
        for dtype in DTYPES:
            for op in OPS:
                if op == "average" and dtype == "bool":
                    continue
                for count in (1, 3, 1000):
                    mine = values(me.rank, count, dtype)
                    given, got = DeviceTensor(mine, late=2.0), DeviceTensor(np.zeros_like(mine))
                    allreduce(given, got, op=op).wait()
                    compare(got.numpy(), on_host(mine, op=op), f"{dtype} {op} {count}", op)


def factors(me: Rank) -> None:
    """Reduce with factors and compression, out of place and in place."""
    me.cuda.stand_hosts_are_one(1)  # where a rank is slow, waiters learn from memory what the CUDA thread has seen done
    with me.world("factors"):
        for dtype, op in itertools.product(("int8", "uint8", "int32", "int64"), ("sum", "average", "product")):
            how = {"op": op, "prescale": 1.5, "postscale": 0.3}
            tensor = DeviceTensor(values(me.rank, 777, dtype), late=1.0)
            allreduce(tensor, tensor, **how).wait()
            compare(tensor.numpy(), on_host(values(me.rank, 777, dtype), **how), f"{dtype} {how}")
        for op, wire in itertools.product(("sum", "average", "max"), (None, "float16", "bfloat16")):
            for dtype, factor in itertools.product(("float32", "float64", "float16"), (1.0, 0.5)):
                how = {"op": op, "wire": wire, "prescale": factor, "postscale": 4 * factor}
                mine = values(me.rank, 777, dtype)
                tensor = DeviceTensor(mine, late=1.0)
                allreduce(tensor, tensor, **how).wait()
                compare(tensor.numpy(), on_host(mine, **how), f"{dtype} {how}", op, wire)


def fused(me: Rank) -> None:
    """Fuse many tensors, also with tensors in host memory between them, and with groups of several dtypes."""
    with me.world("fused", cycle_time_ms=20.0):
        for turn in range(3):
            counts = [1, 17, 1000, 0, 5, 3000] * 10
            given = [DeviceTensor(values(me.rank, count, "float32"), late=1.0) for count in counts]
            handles = [allreduce(tensor, tensor, f"tensor {k}") for k, tensor in enumerate(given)]
            host = values(me.rank, 100, "float32")
            handles.append(allreduce(host, host, "host"))
            for handle in handles:
                handle.wait()
            for count, tensor in zip(counts, given, strict=True):
                wanted = sum(values(rank, count, "float32") for rank in range(me.size))
                compare(tensor.numpy(), wanted, f"turn {turn}, {count}")
            group = [values(me.rank, 10 + k, dtype) for k, dtype in enumerate(DTYPES)]
            tensors = [DeviceTensor(each, late=1.0) for each in group]
            core().allreduce_group(tensors, tensors, "group", OPS["sum"], 1.0, 1.0).wait()
            for tensor, each in zip(tensors, group, strict=True):
                compare(tensor.numpy(), on_host(each), f"group, {each.dtype}")
        done = [row for row in core().history() if row["algorithm"] == "device"]
        assert max(row["tensors"] for row in done) >= 30, done


def pieces(me: Rank) -> None:
    """Reduce in pieces what is larger than the slab, or has more rows than the tables hold."""
    planes.SLAB, planes.TABLES = 1 << 16, 1 << 12
    with me.world("pieces", cycle_time_ms=20.0):
        for op in ("sum", "max"):
            counts = [40000, 7, *range(100), 30000]
            given = [DeviceTensor(values(me.rank, count, "float32"), late=1.0) for count in counts]
            handles = [allreduce(tensor, tensor, f"tensor {k}", op) for k, tensor in enumerate(given)]
            for handle in handles:
                handle.wait()
            for count, tensor in zip(counts, given, strict=True):
                compare(tensor.numpy(), on_host(values(me.rank, count, "float32"), op=op), f"{op} {count}")
        alone = DeviceTensor(values(me.rank, 40000, "float32"))  # it is its own slab, and is divided
        allreduce(alone, alone, "alone", "average").wait()
        compare(alone.numpy(), on_host(values(me.rank, 40000, "float32"), op="average"), "alone")
        group = [values(me.rank, 300 + k, "float64") for k in range(300)]
        # Packing is delayed, while the CUDA thread reaches more pieces than the tables have rows for.
        tensors = [DeviceTensor(each, late=100.0 if k == 299 else 0.0) for k, each in enumerate(group)]
        core().allreduce_group(tensors, tensors, "group", OPS["sum"], 1.0, 1.0).wait()
        for tensor, each in zip(tensors, group, strict=True):
            compare(tensor.numpy(), on_host(each), f"group, {len(each)}")


def many(me: Rank) -> None:
    """Submit more entries than there are events, without a waiting thread; read finished results on any stream."""
    me.cuda.stand_hosts_are_one(1)
    with me.world("many", cycle_time_ms=0.0, fusion_threshold=0):
        counts = range(1, 201)  # all different, so that NCCL would hang if ranks called it in different orders
        tensors = [DeviceTensor(values(me.rank, count, "float32"), late=0.5) for count in counts[:-1]]
        handles = [allreduce(tensor, tensor, f"tensor {k}") for k, tensor in enumerate(tensors)]
        until(lambda: all(handle.done for handle in handles), "the device has passed them")
        tensors.append(DeviceTensor(values(me.rank, counts[-1], "float32"), late=300.0))
        handles.append(allreduce(tensors[-1], tensors[-1], "the last"))
        until(lambda: handles[-1].done, "the device has passed the last one")
        ours, Framework.stream = Framework.stream, Framework.device.new_stream()  # a stream that waits for nothing
        wanted = {count: sum(values(rank, count, "float32") for rank in range(me.size)) for count in counts}
        compare(tensors[-1].numpy(), wanted[counts[-1]], "passed")
        Framework.stream = ours
        for handle in handles[::-1]:
            handle.wait()
        for count, tensor in zip(counts, tensors, strict=True):
            compare(tensor.numpy(), wanted[count], f"many, {count}")


def forgotten(me: Rank) -> None:
    """Drop tensors and handles so that their memory is reused, or wait on another stream (problem 10)."""
    me.cuda.stand_hosts_are_one(1)  # the stand-in does not see the word by which the CUDA thread reports the progress
    with me.world("forgotten"):
        for turn in range(30):
            tensor = DeviceTensor(values(me.rank, 1000, "float32"), late=10.0 if turn % 3 == 0 else 1.0)
            handle = allreduce(tensor, tensor, f"tensor {turn % 7}")
            if turn % 3 == 0:
                ours, Framework.stream = Framework.stream, Framework.device.new_stream()
                handle.wait()
                Framework.stream = ours
                del tensor, handle
                for _ in range(3):  # calls the engine, and the CUDA thread checks the device's progress
                    tensor = DeviceTensor(values(me.rank, 10, "float32"))
                    handle = allreduce(tensor, tensor, "another")
                    for _ in range(3):
                        freed(me)
                    handle.wait()
            elif turn % 3 == 1:
                handle.wait()
            else:
                until(lambda handle=handle: handle.done, "it is done")
            del tensor, handle
        until(lambda: freed(me), "what was given up is freed")


def freed(me: Rank) -> bool:
    """Return whether at most one tensor is alive, after a call of the engine, which frees what it can."""
    host = np.zeros(1, np.float32)
    allreduce(host, host, None).wait()
    return sum(isinstance(each, DeviceTensor) for each in gc.get_objects()) <= 1


def joins(me: Rank) -> None:
    """Join on a rank, which then contributes nothing, not even to groups."""
    with me.world("joins"):
        for turn in range(3):
            for name in ("a", "b"):
                tensor = DeviceTensor(values(me.rank, 100, "float32"))
                allreduce(tensor, tensor, name).wait()
            tensors = [DeviceTensor(values(me.rank, 10 + k, dtype)) for k, dtype in enumerate(DTYPES)]
            core().allreduce_group(tensors, tensors, "group", OPS["sum"], 1.0, 1.0).wait()
            if me.rank == turn % me.size:
                core().join()
                tensor = DeviceTensor(values(me.rank, 100, "float32"))
                allreduce(tensor, tensor, "a").wait()
                continue
            here = [rank for rank in range(me.size) if rank != turn % me.size]
            for op, ufunc in (("sum", np.add), ("max", np.maximum)):
                tensor = DeviceTensor(values(me.rank, 100, "float32"))
                allreduce(tensor, tensor, "a", op).wait()
                compare(tensor.numpy(), ufunc.reduce([values(rank, 100, "float32") for rank in here]), op)
            tensors = [DeviceTensor(values(me.rank, 10 + k, dtype)) for k, dtype in enumerate(DTYPES)]
            core().allreduce_group(tensors, tensors, "group", OPS["sum"], 1.0, 1.0).wait()
            for k, dtype in enumerate(DTYPES):
                every = [values(rank, 10 + k, dtype) for rank in here]
                compare(tensors[k].numpy(), np.add.reduce(every, dtype=dtype), dtype)
            tensors = [DeviceTensor(values(me.rank, 100, "float32")) for _ in range(8)]
            for tensor in tensors:
                allreduce(tensor, tensor, "a").wait()  # the next entry comes while the CUDA thread has this one
            core().join()
            tensor = DeviceTensor(values(me.rank, 100, "float32"))
            allreduce(tensor, tensor, "a").wait()


def broadcasts(me: Rank) -> None:
    """Broadcast every dtype from every root, in place or not, alone, fused and in pieces, with a joined rank."""
    me.cuda.stand_hosts_are_one(1)  # waiters learn from memory what the CUDA thread has seen done
    planes.SLAB, planes.TABLES = 1 << 16, 1 << 12
    with me.world("broadcasts", cycle_time_ms=20.0):
        for dtype, root in itertools.product((*DTYPES, "uint32", "uint64", "complex64"), range(me.size)):
            for count in (3, 1000):
                mine, wanted = (values(rank, count, dtype) for rank in (me.rank, root))
                given, got = DeviceTensor(mine, late=1.0), DeviceTensor(np.zeros_like(mine))
                broadcast(given, got, root).wait()
                np.testing.assert_array_equal(got.numpy(), wanted)
                np.testing.assert_array_equal(given.numpy(), mine)
                broadcast(given, given, root).wait()
                np.testing.assert_array_equal(given.numpy(), wanted)
        for turn, apart in itertools.product(range(2), (False, True)):
            counts = [1, 17, 0, 5, 3000, 40000, *range(100)]
            root = turn % me.size
            given = [DeviceTensor(values(me.rank, count, "float32"), late=0.5) for count in counts]
            got = [DeviceTensor(np.zeros(count, np.float32)) for count in counts] if apart else given
            names = [f"tensor {k} {apart}" for k in range(len(counts))]
            handles = [broadcast(*pair, root, name) for *pair, name in zip(given, got, names, strict=True)]
            for handle in handles:
                handle.wait()
            for count, tensor in zip(counts, got, strict=True):
                np.testing.assert_array_equal(tensor.numpy(), values(root, count, "float32"), f"{turn} {count}")
        done = [row for row in core().history() if row["algorithm"] == "device"]
        assert max(row["tensors"] for row in done) > 1, done
        if me.rank == me.size - 1:
            core().join()
            return
        tensor = DeviceTensor(values(me.rank, 1000, "float32"))
        broadcast(tensor, tensor, 0, "with one that has joined").wait()
        np.testing.assert_array_equal(tensor.numpy(), values(0, 1000, "float32"))
        core().join()


class Parameter:
    """A parameter, which may have a gradient."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.memory: Any = DeviceTensor(np.zeros(count, np.float32))
        self.grad: Any = None


class Binding:
    """Binding with everything that `gradients.GradientGroup` needs of a framework."""

    def __init__(self, parameters: list[Parameter]) -> None:
        self.parameters = parameters

    def memory_of(self, parameter: Parameter) -> Any:
        return parameter.memory

    def replace(self, _index: int, _parameter: Parameter, gradient: Any) -> Any:
        return gradient

    def begin_pass(self) -> None:
        pass

    def shares_memory(self, _gradient: DeviceTensor) -> bool:
        return False

    def rooms_for(self, _index: int) -> Room:
        return Room()

    def room_for(self, index: int) -> DeviceTensor:
        return DeviceTensor(np.zeros(self.parameters[index].count, np.float32))


def hooks(me: Rank) -> None:
    """Submit gradients by hooks on several streams; some ranks lack gradients, and one parameter never has one."""
    with me.world("hooks"):
        parameters = [Parameter(10 * k + 1) for k in range(12)]
        group = gradients.GradientGroup(core(), Binding(parameters), OPS["average"])
        native = [group.add(parameter, f"parameter {k}", None) for k, parameter in enumerate(parameters)]
        ours = [Framework.stream, Framework.device.new_stream()]
        for step in range(6):
            lacks = {rank: {7, (step + 3 * rank) % 12} for rank in range(me.size)}
            for k in reversed(range(12)):
                if k in lacks[me.rank]:
                    continue
                Framework.stream = ours[step > 2 and k % 2]
                parameters[k].grad = DeviceTensor(values(me.rank, parameters[k].count, "float32"), late=0.5)
                native[k](parameters[k])
            Framework.stream = ours[0]
            for k, memory in group.finish():
                parameters[k].grad = memory
            for k, parameter in enumerate(parameters):
                if k == 7:
                    assert parameter.grad is None
                    continue
                have = [values(rank, parameter.count, "float32") for rank in range(me.size) if k not in lacks[rank]]
                assert parameter.grad is not None, k
                compare(parameter.grad.numpy(), np.add.reduce(have) / np.float32(me.size), f"step {step}, {k}")
                parameter.grad = None


def moved(me: Rank) -> None:
    """Move parameters to the GPU and back after the optimizer was made."""
    with me.world("moved"):
        for begins in ("host", "device"):
            parameters = [Parameter(10 * k + 1) for k in range(6)]
            for parameter in parameters if begins == "host" else ():
                parameter.memory = np.zeros(parameter.count, np.float32)
            group = gradients.GradientGroup(core(), Binding(parameters), OPS["average"])
            native = [group.add(each, f"{begins} {k}", None) for k, each in enumerate(parameters)]
            for place in ("device", "host", "device"):
                for k, parameter in enumerate(parameters):
                    mine = values(me.rank, parameter.count, "float32")
                    parameter.grad = mine if place == "host" else DeviceTensor(mine, late=0.5)
                    native[k](parameter)
                assert group.finish() == []
                for k, parameter in enumerate(parameters):
                    total = np.add.reduce([values(rank, parameter.count, "float32") for rank in range(me.size)])
                    have = parameter.grad if place == "host" else parameter.grad.numpy()
                    compare(have, total / np.float32(me.size), f"{begins}, {place}, {k}")
                    parameter.grad = None


def refusals(me: Rank) -> None:
    """Check that impossible operations are refused, and that the world goes on."""
    with me.world("refusals"):
        tensor, host = DeviceTensor(values(me.rank, 4, "float32")), values(me.rank, 4, "float32")
        allreduce(tensor, tensor, "first").wait()
        for tensors in ((tensor, host), (host, tensor)):
            with pytest.raises(UnsupportedTensorError, match="all its tensors on one device"):
                allreduce(*tensors, "apart")
        with pytest.raises(UnsupportedTensorError, match="all its tensors on one device"):
            core().allreduce_group([tensor, host], [tensor, host], "group", 0, 1.0, 1.0)
        with pytest.raises(UnsupportedTensorError, match="makes no room for results"):
            core().allgather(tensor, "allgather", False)
        with pytest.raises(UnsupportedTensorError, match="Adasum takes tensors in the host"):
            core().allreduce(tensor, tensor, "adasum", 5, 1.0, 1.0)
        Framework.ordinal = 1
        with pytest.raises(UnsupportedTensorError, match="cuda:1, but the engine works on cuda:0"):
            allreduce(tensor, tensor, "other device")
        Framework.ordinal = 0
        stream, Framework.stream = Framework.stream, ctypes.c_void_p(2)
        with pytest.raises(UnsupportedTensorError, match="default one of each thread"):
            allreduce(tensor, tensor, "per thread")
        Framework.stream = stream
        assert me.cuda.cuStreamBeginCapture_v2(stream, 1) == 0
        with pytest.raises(DeviceError, match="captured into a CUDA graph"):
            allreduce(tensor, tensor, "captured")
        graph = ctypes.c_void_p()
        assert me.cuda.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0
        given = host if me.rank else tensor
        handle = allreduce(given, given, "mismatch")
        with pytest.raises(MismatchError, match=r"float32\[4\] on a GPU"):
            handle.wait()
        allreduce(tensor, tensor, "last").wait()
        me.works()


def streams(me: Rank) -> None:
    """Use the legacy stream, and one that is destroyed at once, in threads without a context (problems 7 and 14)."""
    with me.world("streams"):
        for turn in range(6):
            ours = Framework.stream
            if turn % 3 == 0:
                Framework.stream = None
            elif turn % 3 == 1:
                Framework.stream = Framework.device.new_stream()
            tensor = DeviceTensor(values(me.rank, 1000, "float32"))
            tensor.compute(values(me.rank, 1000, "float32"), 2.0)
            failures: list[BaseException] = []

            def submit(tensor: DeviceTensor = tensor, failures: list[BaseException] = failures) -> None:
                try:
                    allreduce(tensor, tensor, "tensor").wait()
                except BaseException as error:
                    failures.append(error)

            thread = threading.Thread(target=submit)  # a thread without a context
            thread.start()
            thread.join()
            assert not failures, failures
            wanted = sum(values(rank, 1000, "float32") for rank in range(me.size))
            compare(tensor.numpy(), wanted, f"turn {turn}")
            del tensor, submit, thread
            if turn % 3 == 1:
                assert me.cuda.cuStreamDestroy_v2(Framework.stream) == 0
            Framework.stream = ours


def captures(me: Rank) -> None:
    """Reduce while another thread captures a graph, which forbids calls that would spoil it (problem 15)."""
    with me.world("captures"):
        tensor = DeviceTensor(values(me.rank, 100, "float32"), late=2.0)
        allreduce(tensor, tensor, "first").wait()
        stream, graph = Framework.device.new_stream(), ctypes.c_void_p()
        begun, ended, told = threading.Event(), threading.Event(), []

        def capture() -> None:
            me.context()
            told.append(me.cuda.cuStreamBeginCapture_v2(stream, 0))
            begun.set()
            ended.wait()
            told.append(me.cuda.cuStreamEndCapture(stream, ctypes.byref(graph)))

        thread = threading.Thread(target=capture, daemon=True)
        thread.start()
        begun.wait()
        tensor.compute_again(20.0)
        handle = allreduce(tensor, tensor, "meanwhile")
        until(lambda: handle.done, "it is done")
        handle.wait()
        ended.set()
        thread.join()
        assert told == [0, 0], told


def lost(me: Rank, how: str) -> None:
    """Lose the last rank in the middle of operations, in one of several ways."""
    last = me.rank == me.size - 1
    with me.losing_world("lost", stall_limit=2.0):
        tensor = DeviceTensor(values(me.rank, 1000, "float32"), late=1.0)
        allreduce(tensor, tensor, "first").wait()
        if last:
            allreduce(tensor, tensor, "second")
            if how == "leave":
                return
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        for name in ("second", "third"):
            allreduce(tensor, tensor, name).wait()
    with me.world("again", size=me.size - 1):
        tensor = DeviceTensor(values(me.rank, 1000, "float32"), late=1.0)
        allreduce(tensor, tensor, "first").wait()
        compare(tensor.numpy(), sum(values(rank, 1000, "float32") for rank in range(me.size - 1)), "again")


def fails(me: Rank, call: str) -> None:
    """Make a call of rank 1's CUDA thread fail."""
    with me.refused_world("fails"):
        tensors = [DeviceTensor(values(me.rank, 100, "float32")) for _ in range(2)]
        handles = [allreduce(each, each, f"first {k}") for k, each in enumerate(tensors)]
        for handle in handles:
            handle.wait()
        if me.rank == 1:
            me.fail(call, 1, 1 if call.startswith("nccl") else 700)
        core().barrier("armed").wait()
        core().allreduce_group(tensors, tensors, "group", OPS["sum"], 1.0, 1.0).wait()
        for turn in range(3):
            allreduce(tensors[0], tensors[0], f"later {turn}").wait()


def hangs(me: Rank) -> None:
    """Make a call of NCCL hang on rank 1; rank 0's device waits for it."""
    with me.refused_world("hangs", stall_limit=2.0):
        tensor = DeviceTensor(values(me.rank, 100, "float32"))
        allreduce(tensor, tensor, "first").wait()
        if me.rank == 1:
            me.fail("ncclAllReduce", 1, -1)
        core().barrier("armed").wait()
        tensor = DeviceTensor(values(me.rank, 100, "float32"))
        allreduce(tensor, tensor, "second").wait()
        tensor.numpy()


def endless(me: Rank, what: str) -> None:
    """Run a computation on rank 1's GPU that never ends, of the program or of the engine's kernels."""
    with me.refused_world("endless", stall_limit=2.0, stall_warning=1.0, cycle_time_ms=0.0, fusion_threshold=0):
        tensor = DeviceTensor(values(me.rank, 100, "float32"))
        allreduce(tensor, tensor, "first").wait()
        tensor.numpy()
        if me.rank == 1 and what == "kernels":
            me.cuda.stand_kernels_take(ctypes.c_double(16000))
        late = 8000 if me.rank == 1 and what != "kernels" else 0
        core().barrier("armed").wait()
        crowd = [DeviceTensor(values(me.rank, 10, "float32")) for _ in range(100 if what == "crowd" else 0)]
        tensor.compute(values(me.rank, 100, "float32"), late)
        handle = allreduce(tensor, tensor, "second", prescale=2.0)
        for k, each in enumerate(crowd):  # more than are enqueued at a time, so the thread waits for the device, too
            allreduce(each, each, f"another {k}")
        handle.wait()
        until(lambda: core().failure is not None, "somebody is named", 30)
        raise core().failure


def elsewhere(me: Rank) -> None:
    """Submit a first tensor that is on a GPU on one rank, and in host memory on the other."""
    with me.world("elsewhere", stall_limit=5.0):
        host = values(me.rank, 4, "float32")
        given = host if me.rank else DeviceTensor(host)
        try:
            allreduce(given, given, blocking=True).wait()
        except EngineError as error:
            print(f"refused: {type(error).__name__}: {error}")


PROGRAMS = {
    program.__name__: program
    for program in (
        *(
            numbers,
            factors,
            fused,
            pieces,
            many,
            forgotten,
            joins,
            broadcasts,
            refusals,
            streams,
            captures,
            hooks,
            moved,
        ),
        *(lost, fails, hangs, endless, elsewhere),
    )
}


def main(programs: dict[str, Any], unchecked: tuple[str, ...] = ()) -> None:
    """Run the programs that the command line names, joined by `+`, in order.

    After one of `unchecked`, which fails or hangs, the process ends at once, and no report is looked at.
    """
    faulthandler.enable()
    name, rank, size, kernels, *rest = sys.argv[1:]
    Framework.start()
    me = Rank(int(rank), int(size))
    ctypes.CDLL(kernels)
    for each in name.split("+"):
        if each != name:
            print(f"{each}:", file=sys.stderr, flush=True)  # the last name printed is that of the failed one
        programs[each](me, *rest)
    if name in unchecked:
        os._exit(0)
    assert me.reports() == [], me.reports()


if __name__ == "__main__":
    main(PROGRAMS, ("fails", "hangs", "endless"))
