"""What ranks do in tests of frozen passes, on the stand-ins.

python -m tests.gpu.freeze_programs NAME RANK SIZE KERNELS ...
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from typing import Any

import numpy as np
import pytest
import torch

import engine.torch
from engine import runtime
from engine.errors import EngineError, MismatchError, RankDiedError, WorldError
from engine.torch import freezing

from ..waiting import until
from .allreduce_programs import OPS, allreduce, main
from .device_tensors import DeviceTensor, Framework
from .plane_programs import Frozen, Rank, Reduction

COUNTS = (1, 5, 1000, 70_000)


def exact(rank: int, count: int, step: int) -> np.ndarray:
    """Numbers whose sums over few ranks are exact in float16, too."""
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
        self.frozen = runtime.device().freeze(0, frozen, Reduction(OPS[op], prescale, 1.0, wire))

    def mine(self, step: int, rank: int | None = None) -> list[np.ndarray]:
        """A rank's gradients of a step."""
        return [
            exact(self.me.rank if rank is None else rank, each.size + k, step)[: each.size].astype(each.dtype)
            for k, each in enumerate(self.like)
        ]

    def compute(self, step: int, late: float = 1.0) -> None:
        """The framework's stream brings them, in a while."""
        for tensor, values in zip(self.tensors, self.mine(step), strict=True):
            tensor.compute(values, late)

    def put(self, step: int) -> None:
        """Copy them there at once."""
        self.compute(step, 0.0)

    def check(self, step: int) -> None:
        """They are what float64 makes of all ranks'."""
        each_rank = [self.mine(step, rank) for rank in range(self.me.size)]
        for k, tensor in enumerate(self.tensors):
            wanted = sum(theirs[k].astype(np.float64) for theirs in each_rank) * self.prescale
            if self.op == "average":
                wanted = wanted / self.me.size
            np.testing.assert_allclose(
                tensor.numpy().astype(np.float64), wanted, rtol=2e-3, atol=4e-3, err_msg=f"g{k} of step {step}"
            )

    def repeat(self) -> None:
        """Enqueue it on the framework's stream."""
        self.frozen.repeat(Framework.stream.value)


class Graph:
    """A graph of what is enqueued within."""

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
        """Run it on the framework's stream."""
        assert self.cuda.cuGraphLaunch(self.run, Framework.stream) == 0


def eager(me: Rank) -> None:
    """Passes that are repeated bring what an allreduce brings, whatever the operation and the type that travels."""
    with me.world("eager"):
        for op, wire, prescale in (("average", None, 1.0), ("sum", None, 0.5), ("average", "float16", 1.0)):
            gradients = Gradients(me, op, wire, prescale)
            for step in range(3):
                gradients.compute(step)
                gradients.repeat()
                gradients.check(step)
            gradients.put(9)
            for tensor in gradients.tensors[:2]:
                allreduce(tensor, tensor, op=op, prescale=prescale).wait()  # others go on, before and behind
            gradients.put(10)
            gradients.repeat()
            gradients.check(10)


def graphs(me: Rank) -> None:
    """A pass is captured, with nothing run meanwhile, and launched again and again."""
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
    """A pass on another stream waits until the slab is free; nothing else orders the two."""
    with me.world("streams"):
        gradients = Gradients(me)
        first, other = Framework.stream, Framework.device.new_stream()
        gradients.put(0)
        Framework.device.synchronize()
        for stream in (first, other, first):
            gradients.frozen.repeat(stream.value)
        Framework.device.synchronize()
        gradients.check(0)  # an average of averages
        me.cuda.cuStreamSynchronize(other)


def differ(me: Rank) -> None:
    """What one rank freezes otherwise is told, on all of them; afterwards it goes on."""
    with me.world("differ"):
        tensor = DeviceTensor(np.ones(8, np.float32))
        sizes = (8, 7 if me.rank == 1 else 8)
        plain = Reduction(OPS["sum"], 1.0, 1.0, None)
        frozen = [Frozen(f"g{k}", "float32", size, tensor.at.value) for k, size in enumerate(sizes)]
        with pytest.raises(MismatchError, match=r"rank 1 has 'g1': 7 x float32, and rank 0 has 'g1': 8 x float32"):
            runtime.device().freeze(0, frozen, plain)
        with pytest.raises(MismatchError, match=r"rank 1 has nothing more, and rank 0 has 'g1'"):
            runtime.device().freeze(
                0, [Frozen(f"g{k}", "float32", 8, 0) for k in range(1 if me.rank == 1 else 2)], plain
            )
        other = Reduction(OPS["average" if me.rank == 1 else "sum"], 1.0, 1.0, None)
        with pytest.raises(MismatchError, match="Reduction"):
            runtime.device().freeze(0, [], other)
        gradients = Gradients(me)
        gradients.put(3)
        gradients.repeat()
        gradients.check(3)


def shuts_down(me: Rank) -> None:
    """A world ends while passes are on the device, which are whole; and another one begins."""
    for turn in range(2):
        with me.world(f"turn {turn}"):
            gradients, graph = Gradients(me), Graph(me)
            with graph if turn else contextlib.nullcontext():
                gradients.repeat()
            Framework.device.synchronize()
            gradients.compute(turn)
            me.slow(0.1)
            graph.launch() if turn else gradients.repeat()
        me.slow(0.0)
        gradients.check(turn)


def dies(me: Rank) -> None:
    """The last rank dies: what waits for it on the others' devices ends, and the world says who it was."""
    with me.world("dies", stall_limit=20.0):
        gradients = Gradients(me)
        gradients.put(0)
        with Graph(me) as graph:
            gradients.repeat()
        Framework.device.synchronize()
        if me.rank == me.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        graph.launch()
        engine = runtime.engine()
        until(lambda: engine.failure is not None, "the world has failed")
        with pytest.raises(WorldError) as told:
            gradients.repeat()
        assert isinstance(told.value, RankDiedError) and told.value.rank == me.size - 1
        Framework.device.synchronize()  # which would not return otherwise


class Model:
    """A model of torch whose gradients lie on the stand-ins' device, which computes nothing: the host does, at once."""

    def __init__(self, me: Rank) -> None:
        self.me = me
        me.cuda.stand_pointer.restype, me.cuda.stand_pointer.argtypes = ctypes.c_void_p, [ctypes.c_uint64]
        self.addresses: dict[int, int] = {}
        self.layers = torch.nn.Linear(3, 5)
        with torch.no_grad():
            for parameter in self.layers.parameters():
                parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) / 8)
        freezing.address_of = lambda tensor: self.addresses.get(tensor.data_ptr(), 0)  # type: ignore[assignment]
        freezing.is_on_gpu = lambda _tensor: True  # type: ignore[assignment]
        freezing.stream_of = lambda _device: Framework.stream.value  # type: ignore[assignment]
        sgd = torch.optim.SGD(self.layers.parameters(), lr=0.125)
        self.optimizer = engine.torch.DistributedOptimizer(sgd, self.layers.named_parameters())

    def place(self) -> None:
        """Have the gradients on the device."""
        for parameter in self.layers.parameters():
            at = Framework.device.put(np.zeros(parameter.shape, np.float32)).value
            memory = (ctypes.c_char * (4 * parameter.numel())).from_address(self.me.cuda.stand_pointer(at))
            parameter.grad = torch.frombuffer(memory, dtype=torch.float32).view(parameter.shape)
            self.addresses[parameter.grad.data_ptr()] = at

    def loss(self, step: int, rank: int) -> torch.Tensor:
        """Of a rank's samples."""
        return (self.layers(torch.full((2, 3), float(step + rank))) ** 2).sum() / 64

    def backward(self, step: int) -> None:
        """This rank's pass."""
        Framework.device.synchronize()
        self.loss(step, self.me.rank).backward()

    def wanted(self, steps: list[int], everywhere: bool = True) -> list[np.ndarray]:
        """The gradients of some steps, over all ranks or of this one alone."""
        ranks = range(self.me.size) if everywhere else [self.me.rank]
        parts = [
            torch.autograd.grad(self.loss(step, rank), list(self.layers.parameters()))
            for step in steps
            for rank in ranks
        ]
        return [sum(part.double().numpy() for part in each) / len(ranks) for each in zip(*parts, strict=True)]

    def check(self, *steps: int, everywhere: bool = True) -> None:
        """The gradients are those."""
        Framework.device.synchronize()
        for parameter, wanted in zip(self.layers.parameters(), self.wanted(list(steps), everywhere), strict=True):
            np.testing.assert_allclose(parameter.grad.numpy(), wanted, rtol=1e-5, err_msg=str(steps))


def optimizer(me: Rank) -> None:
    """An optimizer is frozen, steps, is captured, accumulates, is unfrozen, and told of a gradient that has moved."""
    with me.world("optimizer"):
        model = Model(me)
        with pytest.raises(EngineError, match="run a step first"):
            model.optimizer.freeze()
        model.backward(0)
        model.optimizer.step()
        model.place()
        model.optimizer.freeze()
        made = me.calls("cuMemAlloc")
        model.optimizer.freeze()
        assert me.calls("cuMemAlloc") == made, "it was frozen twice"
        for step in range(1, 4):
            model.optimizer.zero_grad()
            model.backward(step)
            model.check(step)
            model.optimizer.step()
        model.optimizer.zero_grad()
        with Graph(me) as graph:
            model.loss(4, me.rank).backward()
        model.check(4, everywhere=False)
        for _ in range(2):
            graph.launch()
            model.check(4)  # an average of averages, the second time
        model.optimizer.zero_grad()
        with model.optimizer.no_sync():
            model.backward(5)
        model.check(5, everywhere=False)
        model.backward(6)
        model.check(5, 6)
        model.optimizer.unfreeze()
        model.optimizer.step()
        model.optimizer.zero_grad(set_to_none=False)
        model.backward(7)
        model.check(7)

        def move() -> None:
            """The rank that notices it last may still be in the first of these."""
            model.optimizer.freeze()
            model.optimizer.zero_grad()
            parameter = next(iter(model.layers.parameters()))
            parameter.grad = parameter.grad.clone()
            model.backward(8)

        with pytest.raises(WorldError, match=r"gradient of 'gradient\.weight' is elsewhere.*unfreeze\(\) before"):
            move()


PROGRAMS = {each.__name__: each for each in (eager, graphs, streams, differ, shuts_down, dies, optimizer)}

if __name__ == "__main__":
    main(PROGRAMS)
