"""Programs of ranks for tests of frozen passes, on the stand-ins.

python -m tests.gpu.freeze_programs NAME RANK SIZE KERNELS ...
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

from engine.errors import DeviceError, ForkedError, MismatchError, NotInitializedError, RankDiedError, WorldError
from engine.gpu.device import Device
from engine.session import runtime

from ..waiting import let_pass, until
from .allreduce_programs import OPS, allreduce, main
from .device_tensors import DeviceTensor, Framework
from .plane_programs import Frozen, FrozenPass, Rank, Reduction

COUNTS = (1, 5, 1000, 70_000)


def exact(rank: int, count: int, step: int) -> np.ndarray:
    """Return numbers whose sums over few ranks are exact, even in float16."""
    return np.random.default_rng([rank, count, step]).integers(-8, 8, count).astype(np.float64)


class Gradients:
    """Tensors of some dtypes on the device, and a frozen pass over them."""

    def __init__(self, me: Rank, op: str = "average", wire: str | None = None, prescale: float = 1.0) -> None:
        self.me, self.op, self.prescale = me, op, prescale
        dtypes = ("float32", "float16", "float64")
        self.like = [np.zeros(count, dtype) for dtype in dtypes for count in COUNTS]
        self.tensors = [DeviceTensor(each) for each in self.like]
        frozen = [
            Frozen(f"g{k}", str(each.dtype), each.size, self.tensors[k].at.value) for k, each in enumerate(self.like)
        ]
        self.frozen = runtime.current_device().freeze(0, frozen, Reduction(OPS[op], prescale, 1.0, wire))

    def mine(self, step: int, rank: int | None = None) -> list[np.ndarray]:
        """Return a rank's gradients of a step."""
        return [
            exact(self.me.rank if rank is None else rank, each.size + k, step)[: each.size].astype(each.dtype)
            for k, each in enumerate(self.like)
        ]

    def compute(self, step: int, late: float = 1.0) -> None:
        """Write the gradients on the framework's stream, after a while."""
        for tensor, values in zip(self.tensors, self.mine(step), strict=True):
            tensor.compute(values, late)

    def put(self, step: int) -> None:
        """Copy the gradients to the device at once."""
        self.compute(step, 0.0)

    def check(self, step: int) -> None:
        """Check the gradients against those that float64 gives for all ranks."""
        each_rank = [self.mine(step, rank) for rank in range(self.me.size)]
        for k, tensor in enumerate(self.tensors):
            wanted = sum(theirs[k].astype(np.float64) for theirs in each_rank) * self.prescale
            if self.op == "average":
                wanted = wanted / self.me.size
            np.testing.assert_allclose(
                tensor.numpy().astype(np.float64), wanted, rtol=2e-3, atol=4e-3, err_msg=f"g{k} of step {step}"
            )

    def repeat(self) -> None:
        """Enqueue the pass on the framework's stream."""
        self.frozen.enqueue_pass(Framework.stream.value)


class Graph:
    """Graph of the work that is enqueued in its block."""

    def __init__(self, me: Rank) -> None:
        self.cuda, self.run = me.cuda, ctypes.c_void_p()

    def __enter__(self) -> Graph:
        assert self.cuda.cuStreamBeginCapture_v2(Framework.stream, 0) == 0
        return self

    def __exit__(self, *_: Any) -> None:
        graph = ctypes.c_void_p()
        assert self.cuda.cuStreamEndCapture(Framework.stream, ctypes.byref(graph)) == 0
        assert self.cuda.cuGraphInstantiateWithFlags(ctypes.byref(self.run), graph, ctypes.c_ulonglong(0)) == 0
        assert self.cuda.cuGraphDestroy(graph) == 0

    def launch(self) -> None:
        """Launch the graph on the framework's stream."""
        assert self.cuda.cuGraphLaunch(self.run, Framework.stream) == 0

    def destroy(self) -> None:
        """Destroy the graph, as a program should before its world ends."""
        assert self.cuda.cuGraphExecDestroy(self.run) == 0


def eager(me: Rank) -> None:
    """Check that repeated passes equal an allreduce, for every operation and wire dtype."""
    with me.world("eager"):
        for op, wire, prescale in (("average", None, 1.0), ("sum", None, 0.5), ("average", "float16", 1.0)):
            gradients = Gradients(me, op, wire, prescale)
            for step in range(3):
                gradients.compute(step)
                gradients.repeat()
                gradients.check(step)
            gradients.put(9)
            for tensor in gradients.tensors[:2]:
                allreduce(tensor, tensor, op=op, prescale=prescale).wait()  # other operations work, before and after
            gradients.put(10)
            gradients.repeat()
            gradients.check(10)


def graphs(me: Rank) -> None:
    """Capture a pass, during which nothing runs, and launch it repeatedly."""
    with me.world("graphs"):
        gradients = Gradients(me)
        gradients.put(0)
        gradients.repeat()
        gradients.check(0)
        gradients.put(1)
        Framework.device.synchronize()
        with Graph(me) as graph:
            gradients.repeat()
        for tensor, mine in zip(gradients.tensors, gradients.mine(1), strict=True):
            np.testing.assert_array_equal(tensor.numpy(), mine, "a capture has run")
        for step in range(2, 6):
            gradients.compute(step)
            graph.launch()
            gradients.check(step)
        gradients.put(7)
        gradients.repeat()
        gradients.check(7)
        allreduce(gradients.tensors[0], gradients.tensors[0], "as ever").wait()
        Framework.device.synchronize()


def streams(me: Rank) -> None:
    """Run a pass on another stream, which waits until the slab is free; nothing else orders the two."""
    with me.world("streams"):
        gradients = Gradients(me)
        first, other = Framework.stream, Framework.device.new_stream()
        gradients.put(0)
        Framework.device.synchronize()
        for stream in (first, other, first):
            gradients.frozen.enqueue_pass(stream.value)
        Framework.device.synchronize()
        gradients.check(0)  # an average of averages
        me.cuda.cuStreamSynchronize(other)


def differ(me: Rank) -> None:
    """Check that a difference in what ranks freeze is reported on all of them, and that they go on."""
    with me.world("differ"):
        tensor = DeviceTensor(np.ones(8, np.float32))
        sizes = (8, 7 if me.rank == 1 else 8)
        plain = Reduction(OPS["sum"], 1.0, 1.0, None)
        frozen = [Frozen(f"g{k}", "float32", size, tensor.at.value) for k, size in enumerate(sizes)]
        with pytest.raises(MismatchError, match=r"rank 1 has 'g1': 7 x float32, and rank 0 has 'g1': 8 x float32"):
            runtime.current_device().freeze(0, frozen, plain)
        with pytest.raises(MismatchError, match=r"rank 1 has nothing more, and rank 0 has 'g1'"):
            runtime.current_device().freeze(
                0, [Frozen(f"g{k}", "float32", 8, 0) for k in range(1 if me.rank == 1 else 2)], plain
            )
        other = Reduction(OPS["average" if me.rank == 1 else "sum"], 1.0, 1.0, None)
        with pytest.raises(MismatchError, match="Reduction"):
            runtime.current_device().freeze(0, [], other)
        gradients = Gradients(me)
        gradients.put(3)
        gradients.repeat()
        gradients.check(3)


def shuts_down(me: Rank) -> None:
    """End a world while passes are on the device, which complete; another world begins."""
    for turn in range(2):
        with me.world(f"turn {turn}"):
            gradients, graph = Gradients(me), Graph(me)
            with graph if turn else contextlib.nullcontext():
                gradients.repeat()
            Framework.device.synchronize()
            gradients.compute(turn)
            me.slow(0.1)
            graph.launch() if turn else gradients.repeat()
            if turn:
                graph.destroy()
        me.slow(0.0)
        gradients.check(turn)


def dies(me: Rank) -> None:
    """Kill the last rank: waits for it on other devices end, and the world names it."""
    with me.world("dies", stall_limit=20.0):
        gradients = Gradients(me)
        gradients.put(0)
        with Graph(me) as graph:
            gradients.repeat()
        Framework.device.synchronize()
        if me.rank == me.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        graph.launch()
        engine = runtime.current_engine()
        until(lambda: engine.failure is not None, "the world has failed")
        with pytest.raises(WorldError) as told:
            gradients.repeat()
        assert isinstance(told.value, RankDiedError) and told.value.rank == me.size - 1
        Framework.device.synchronize()  # it would hang if a wait were left
        cuda_thread = gradients.frozen._plane.cuda_thread
        both = ("ncclCommRevoke", "ncclCommAbort")  # calls for each of two communicators
        until(lambda: sum(map(me.calls, both)) >= 2 and cuda_thread.call is None, "the CUDA thread has ended them")
        graph.launch()
        Framework.device.synchronize()


def outlived(me: Rank) -> None:
    """Keep a graph longer than its world: neither the end nor the next world waits, and its memory is freed with it."""
    with me.world("first"):
        gradients = Gradients(me)
        gradients.put(0)
        with Graph(me) as graph:
            gradients.repeat()
        graph.launch()
        gradients.check(0)
        begun = time.monotonic()
    assert time.monotonic() - begun < 12, "the end has waited for the graph"
    assert me.calls("cuModuleUnload") == 0, "the graph's kernels are gone"
    freed = me.calls("cuMemFree")
    with me.world("second"):
        others = Gradients(me)
        others.put(1)
        others.repeat()
        others.check(1)
    graph.destroy()
    until(lambda: me.calls("cuModuleUnload") == 2, "the kernels of both worlds are gone")
    assert me.calls("cuMemFree") > freed + 4, "the memory of the graph's pass is there"


def lacks_memory(me: Rank) -> None:
    """Run out of memory for a pass on one rank: all ranks name it, none waits for it, and all go on."""
    with me.world("lacks memory"):
        framework = Gradients(me)
        for call in ("cuMemAlloc", "cuMemHostAlloc"):
            tensor = DeviceTensor(np.ones(8, np.float32))
            if me.rank == me.size - 1:
                me.fail(call, 1, 2)
            with pytest.raises(DeviceError, match=rf"rank {me.size - 1} cannot freeze .*CUDA_ERROR_OUT_OF_MEMORY"):
                runtime.current_device().freeze(
                    0, [Frozen("g", "float32", 8, tensor.at.value)], Reduction(OPS["sum"], 1.0, 1.0, None)
                )
        for gradients in (framework, Gradients(me)):
            gradients.put(1)
            gradients.repeat()
            gradients.check(1)


def leaves(me: Rank) -> None:
    """Leave after frozen passes and launched graphs are over on the device.

    This also holds during a capture, when the device's state cannot be queried.
    """
    other = Framework.device.new_stream()

    def end_capture(asked: int) -> None:
        until(lambda: me.calls("cuCtxSynchronize") > asked, "the device is asked")
        let_pass(0.2)
        me.cuda.cuStreamEndCapture(other, ctypes.byref(ctypes.c_void_p()))

    states: list[int] = []
    close = Device.close

    def query_and_close(device: Device) -> None:
        states.append(me.cuda.cuStreamQuery(Framework.stream))
        close(device)

    Device.close = query_and_close  # type: ignore[method-assign]
    for turn in range(3):
        states.clear()
        with me.world(f"turn {turn}"):
            gradients, graph = Gradients(me), Graph(me)
            gradients.put(0)
            gradients.repeat()
            with graph:
                gradients.repeat()
            me.slow(0.5 if turn == 2 else 0.2)
            graph.launch() if turn else gradients.repeat()
            if turn == 2:
                assert me.cuda.cuStreamBeginCapture_v2(other, 2) == 0  # another thread may end this capture
                threading.Thread(target=end_capture, args=(me.calls("cuCtxSynchronize"),)).start()
        me.slow(0.0)
        graph.destroy()
        assert states == [0], "it has left before"


def nothing(me: Rank) -> None:
    """Freeze, repeat and capture a pass over no elements."""
    with me.world("nothing"):
        allocate = me.calls("cuMemAlloc")
        empty = runtime.current_device().freeze(0, [], Reduction(OPS["sum"], 1.0, 1.0, None))
        assert me.calls("cuMemAlloc") > allocate
        empty.enqueue_pass(Framework.stream.value)
        with Graph(me) as graph:
            empty.enqueue_pass(Framework.stream.value)
        graph.launch()
        Framework.device.synchronize()
        graph.destroy()


def under_way(me: Rank) -> None:
    """Check that freezing is refused while an operation is in flight on any rank, and works after it."""
    with me.world("under way"):
        tensor, first = DeviceTensor(np.ones(8, np.float32)), me.rank == 0
        allreduce(tensor, tensor, "opened").wait()
        handle = allreduce(tensor, tensor, "late") if first else None
        with pytest.raises(DeviceError, match=r"rank 0 cannot freeze .*'late' is under way"):
            Gradients(me)
        (handle or allreduce(tensor, tensor, "late")).wait()
        gradients = Gradients(me)
        gradients.put(1)
        gradients.repeat()
        gradients.check(1)


def meanwhile(me: Rank) -> None:
    """Submit on another thread while a pass is frozen: the operation waits, and has one place on all ranks."""
    me.cuda.stand_hosts_are_one(1)
    unite = FrozenPass._connect_ranks
    with me.world("meanwhile"):
        tensor = DeviceTensor(exact(me.rank, 8, 0).astype(np.float32))
        allreduce(tensor, tensor, "opened").wait()

        def submit() -> None:
            me.context()
            allreduce(tensor, tensor, "meanwhile").wait()

        thread = threading.Timer(0.3 * me.rank, submit)

        def unites(self: FrozenPass, its: str, seconds: float) -> str:
            thread.start()
            if me.rank == 0:
                let_pass(1.0)  # The other rank's thread reaches it before the tensor, and this one's would after it.
            return unite(self, its, seconds)

        FrozenPass._connect_ranks = unites  # type: ignore[method-assign]
        gradients = Gradients(me)
        FrozenPass._connect_ranks = unite  # type: ignore[method-assign]
        thread.join()
        gradients.put(1)
        gradients.repeat()
        gradients.check(1)
        wanted = sum(exact(rank, 8, 0) for rank in range(me.size))
        np.testing.assert_array_equal(tensor.numpy(), me.size * wanted)


def clocks(me: Rank) -> None:
    """Check that the device's clock is still compared with the host's when passes are frozen."""
    with me.world("clocks"):
        Gradients(me)
        before = me.calls("cuEventRecord")
        until(lambda: me.calls("cuEventRecord") > before, "a comparison of the clocks")


class Interrupted:
    """A CUDA thread whose first wait for enqueued work is interrupted before the CUDA thread has ended it."""

    def __init__(self, cuda_thread: Any) -> None:
        self.cuda_thread, self.interrupted, self.busy = cuda_thread, False, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cuda_thread, name)

    def replay_pass(self, at: int, stream: int) -> None:
        """Take an item; the CUDA thread must have none."""
        assert not self.busy, "the CUDA thread has the item still"
        self.busy = True
        self.cuda_thread.replay_pass(at, stream)

    def pass_ended(self, at: int, seconds: float) -> str | None:
        """Raise an interrupt, or wait."""
        if self.busy and not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        why: str | None = self.cuda_thread.pass_ended(at, seconds)
        self.busy = self.busy and why is None
        return why


def interrupted(me: Rank) -> None:
    """Check that work which an interrupt left in the CUDA thread is awaited before the pass is repeated."""
    with me.world("interrupted"):
        gradients = Gradients(me)
        plane = gradients.frozen._plane
        plane.cuda_thread = Interrupted(plane.cuda_thread)  # type: ignore[assignment]
        gradients.put(0)
        with pytest.raises(KeyboardInterrupt):
            gradients.repeat()
        gradients.repeat()
        gradients.check(0)  # an average of averages


def ended(me: Rank) -> None:
    """Check that a pass is refused after its world, and in a forked child, where no thread would enqueue it."""
    with me.world("ended"):
        gradients = Gradients(me)
        gradients.put(0)
        gradients.repeat()
        gradients.check(0)
        child = os.fork()
        if not child:
            signal.alarm(20)
            try:
                gradients.repeat()
            except ForkedError:
                os._exit(0)
            os._exit(1)
        _, status = until(lambda: (told := os.waitpid(child, os.WNOHANG))[0] and told, "the child's end")
        assert status == 0, "the child was not refused"
    for number in range(2):
        with pytest.raises(NotInitializedError, match="frozen anew"):
            gradients.repeat()
        if not number:
            with me.world("another"):
                Gradients(me).repeat()


ALL = (
    eager,
    graphs,
    streams,
    differ,
    shuts_down,
    dies,
    interrupted,
    ended,
    outlived,
    lacks_memory,
    leaves,
    nothing,
    under_way,
    meanwhile,
    clocks,
)
PROGRAMS = {each.__name__: each for each in ALL}

if __name__ == "__main__":
    main(PROGRAMS)
