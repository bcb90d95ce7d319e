"""Programs of ranks for tests of frozen optimizers of torch, on the stand-ins.

python -m tests.gpu.frozen_optimizer_programs NAME RANK SIZE KERNELS ...
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import numpy as np
import pytest
import torch

import engine.torch
from engine.errors import EngineError, NotInitializedError, UnsupportedTensorError, WorldError
from engine.torch import freezing

from .allreduce_programs import main
from .device_tensors import Framework
from .freeze_programs import Graph
from .plane_programs import Rank


class Model:
    """Model of torch whose gradients lie on the stand-ins' device; the host computes them at once."""

    def __init__(self, me: Rank, extra: bool | None = None, op: Any = engine.torch.Average) -> None:
        """Make the model; `extra` adds a parameter, and says whether it requires a gradient from the start."""
        self.me = me
        me.cuda.stand_pointer.restype, me.cuda.stand_pointer.argtypes = ctypes.c_void_p, [ctypes.c_uint64]
        self.addresses: dict[int, int] = {}
        self.layers = torch.nn.Linear(3, 5)
        self.extra = torch.nn.Parameter(torch.ones(2), requires_grad=extra is not False)
        with torch.no_grad():
            for parameter in self.layers.parameters():
                parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) / 8)
        freezing.address_of = lambda tensor: self.addresses.get(tensor.data_ptr(), 0)  # type: ignore[assignment]
        freezing.is_on_gpu = lambda _tensor: True  # type: ignore[assignment]
        freezing.stream_of = lambda _device: Framework.stream.value  # type: ignore[assignment]
        parameters = [*self.layers.parameters(), *([] if extra is None else [self.extra])]
        named = [*self.layers.named_parameters(), ("extra", self.extra)]
        self.optimizer = engine.torch.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.125), named, op=op)
        # A step is computed on the host.
        self.optimizer.register_step_pre_hook(lambda *_: Framework.device.synchronize())

    def place(self) -> None:
        """Move the gradients to the device."""
        for parameter in self.layers.parameters():
            self.put_on_device(parameter)

    def put_on_device(self, parameter: torch.nn.Parameter) -> None:
        """Move a gradient to the device."""
        at = Framework.device.put(np.zeros(parameter.shape, np.float32)).value
        memory = (ctypes.c_char * (4 * parameter.numel())).from_address(self.me.cuda.stand_pointer(at))
        parameter.grad = torch.frombuffer(memory, dtype=torch.float32).view(parameter.shape)
        self.addresses[parameter.grad.data_ptr()] = at

    def loss(self, step: int, rank: int) -> torch.Tensor:
        """Return the loss of a rank's samples."""
        return (self.layers(torch.full((2, 3), float(step + rank))) ** 2).sum() / 64

    def backward(self, step: int) -> None:
        """Run this rank's backward pass."""
        Framework.device.synchronize()
        self.loss(step, self.me.rank).backward()

    def wanted(self, steps: list[int], everywhere: bool = True) -> list[np.ndarray]:
        """Return the gradients of some steps, over all ranks or of this one only."""
        ranks = range(self.me.size) if everywhere else [self.me.rank]
        parts = [
            torch.autograd.grad(self.loss(step, rank), list(self.layers.parameters()))
            for step in steps
            for rank in ranks
        ]
        return [sum(part.double().numpy() for part in each) / len(ranks) for each in zip(*parts, strict=True)]

    def check(self, *steps: int, everywhere: bool = True) -> None:
        """Check that the gradients are those of these steps."""
        self.compare(self.wanted(list(steps), everywhere))

    def compare(self, gradients: list[np.ndarray]) -> None:
        """Compare the gradients with these."""
        Framework.device.synchronize()
        for parameter, wanted in zip(self.layers.parameters(), gradients, strict=True):
            np.testing.assert_allclose(parameter.grad.numpy(), wanted, rtol=1e-5)

    def step(self, *steps: int, everywhere: bool = True, closure: Any = None) -> None:
        """Make a step with the gradients of some passes."""
        wanted = self.wanted(list(steps), everywhere)
        self.optimizer.step(closure)
        self.compare(wanted)

    def freeze(self) -> None:
        """Run a step, and freeze the optimizer."""
        self.backward(0)
        self.optimizer.step()
        self.place()
        self.optimizer.freeze()


def optimizer(me: Rank) -> None:
    """Freeze an optimizer, step, capture, accumulate, unfreeze, and report a gradient that has moved."""
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
            """Raise in one of these calls; the last rank to notice may still be in the first."""
            model.optimizer.freeze()
            model.optimizer.zero_grad()
            parameter = next(iter(model.layers.parameters()))
            parameter.grad = parameter.grad.clone()
            model.backward(8)

        with pytest.raises(WorldError, match=r"gradient of 'gradient\.weight' is elsewhere.*unfreeze\(\) before"):
            move()


def no_sync(me: Rank) -> None:
    """Check that gradients accumulated in no_sync() are reduced before a step, and that freezing there is refused."""
    with me.world("no_sync"):
        model = Model(me)
        optimizer = model.optimizer
        with optimizer.no_sync(), pytest.raises(EngineError, match=r"run a step first"):
            optimizer.freeze()
        model.backward(0)
        optimizer.step()
        model.place()
        with optimizer.no_sync(), pytest.raises(EngineError, match=r"freeze\(\) was called inside no_sync\(\)"):
            optimizer.freeze()
        optimizer.freeze()
        with optimizer.no_sync():
            with optimizer.no_sync():
                model.backward(1)
            model.backward(2)
            with pytest.raises(EngineError, match=r"unfreeze\(\) was called inside no_sync\(\)"):
                optimizer.unfreeze()
            model.check(1, 2, everywhere=False)
        model.step(1, 2)
        optimizer.zero_grad()
        with optimizer.no_sync():
            model.backward(3)
        optimizer.synchronize()
        model.check(3)
        model.step(3)
        optimizer.zero_grad()
        with optimizer.no_sync():
            model.backward(4)
        optimizer.zero_grad()
        sums = me.calls("ncclAllReduce")
        optimizer.step()
        assert me.calls("ncclAllReduce") == sums, "what has been zeroed was reduced"
        with optimizer.no_sync():
            model.backward(5)
        optimizer.unfreeze()
        model.step(5)
        optimizer.freeze()
        optimizer.zero_grad()
        with optimizer.no_sync():
            model.backward(5)
        optimizer.unfreeze()
        optimizer.freeze()
        model.step(5)  # what was accumulated before is reduced after both

        def closure() -> None:
            optimizer.zero_grad()
            with optimizer.no_sync():
                model.backward(6)

        model.step(6, closure=closure)
        optimizer.zero_grad()
        with optimizer.no_sync():
            model.backward(7)
        with optimizer.skip_synchronize():
            model.step(7, everywhere=False)


def new_gradients(me: Rank) -> None:
    """End the job by the first gradient of a parameter that had none when the optimizer was frozen, naming it."""

    def added(model: Model) -> None:
        model.optimizer.add_param_group({"params": [model.extra]})
        (model.loss(1, me.rank) + model.extra.sum()).backward()

    def alone(model: Model) -> None:
        model.optimizer.add_param_group({"params": [model.extra]})
        model.extra.sum().backward()
        model.optimizer.step()

    def thawed(model: Model) -> None:
        model.extra.requires_grad_(True)
        (model.loss(1, me.rank) + model.extra.sum()).backward()

    def apart(model: Model) -> None:
        with model.optimizer.no_sync():
            model.extra.sum().backward()
        model.backward(1)

    for extra, act in ((None, added), (None, alone), (False, thawed), (True, apart)):
        with me.world(act.__name__):
            model = Model(me, extra)

            def come(model: Model = model, act: Any = act) -> None:
                """Raise in one of these calls; the last rank to notice may still be in the first."""
                model.freeze()
                act(model)

            with pytest.raises(WorldError, match=r"gradient of '\w+\.extra', of which there was none .* has come"):
                come()


def replaced(me: Rank) -> None:
    """Check that hooks stay when torch swaps the parameters' tensors; other parameters in their place are named."""
    with me.world("replaced"):
        model = Model(me)
        model.freeze()
        for parameter in model.layers.parameters():
            gradient, parameter.grad = parameter.grad, None
            torch.utils.swap_tensors(parameter, torch.nn.Parameter(parameter.detach().clone()))
            parameter.grad = gradient
        model.optimizer.zero_grad()
        model.backward(1)
        model.check(1)
        model.optimizer.step()
        model.optimizer.zero_grad()
        model.layers.load_state_dict(
            {name: each.clone() for name, each in model.layers.state_dict().items()}, assign=True
        )
        model.backward(2)
        with pytest.raises(EngineError, match=r"'\w+\.weight' is in no module any more"):
            model.optimizer.step()


def homeless(me: Rank) -> None:
    """Check that freezing an optimizer outside of a world says why it is refused."""
    with me.world("homeless"):
        optimizer = Model(me).optimizer
        optimizer._engine.leave_behind()
        with pytest.raises(NotInitializedError, match="wrapped in an earlier world"):
            optimizer.freeze()


def in_hand(me: Rank) -> None:
    """Check that gradients of no_sync() are reduced, and that a pending sum and several passes per step are refused."""
    with me.world("in hand"):
        model = Model(me, True)
        optimizer = model.optimizer
        model.backward(0)
        optimizer.step()
        model.place()
        with optimizer.no_sync():
            model.backward(1)
        optimizer.freeze()
        model.step(1)
        optimizer.zero_grad()
        optimizer.set_backward_passes_per_step(1)
        with pytest.raises(EngineError, match=r"the optimizer is frozen, and reduces each pass"):
            optimizer.set_backward_passes_per_step(2)
        with optimizer.no_sync():
            model.extra.sum().backward()
        optimizer.zero_grad()
        model.backward(2)
        model.step(2)
        optimizer.unfreeze()
        optimizer.freeze()
    with me.world("sums"):
        model = Model(me, op=engine.torch.Sum)
        model.backward(0)
        model.optimizer.step()
        model.backward(1)
        with pytest.raises(EngineError, match=r"a sum would count them twice"):
            model.optimizer.freeze()
        model.optimizer.step()
        model.place()
        model.optimizer.freeze()


def apart(me: Rank) -> None:
    """Check that a refusal on the last rank is raised on all, with its number and reason; then all freeze."""
    last = me.rank == me.size - 1
    with me.world("apart"):
        model = Model(me)
        optimizer = model.optimizer

        def expect(kind: type[EngineError], why: str) -> None:
            said = why if last else rf"freeze\(\) is refused, since not all ranks can\n  rank {me.size - 1}: {why}"
            with pytest.raises(kind if last else EngineError, match=f"^{said}"):
                optimizer.freeze()

        model.backward(0)
        optimizer.step()
        model.place()
        freezing.is_on_gpu = lambda _tensor: not last  # type: ignore[assignment]
        expect(UnsupportedTensorError, r"freeze\(\): the gradient of '\S+' is in the host's memory")
        freezing.is_on_gpu = lambda _tensor: True  # type: ignore[assignment]
        with optimizer.no_sync() if last else contextlib.nullcontext():
            expect(EngineError, r"freeze\(\) was called inside no_sync\(\)")
        optimizer.freeze()
        if last:
            optimizer.unfreeze()
        with pytest.raises(EngineError, match=r"on rank 0 it is frozen already, and not on the others"):
            optimizer.freeze()
        if not last:
            optimizer.unfreeze()
        optimizer.freeze()
        optimizer.zero_grad()
        model.backward(1)
        model.check(1)


def two(me: Rank) -> None:
    """End the job by one backward with a frozen optimizer and another one, instead of a deadlock."""
    for both in (False, True):
        with me.world(f"two {both}"):
            model, other = Model(me), torch.nn.Linear(3, 5)
            reducing = engine.torch.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1))

            def meet(model: Model = model, other: Any = other, reducing: Any = reducing, both: bool = both) -> None:
                """Raise in one of these calls; the last rank to notice may still be in the first."""
                other(torch.ones(2, 3)).sum().backward()
                reducing.step()
                if both:
                    for parameter in other.parameters():
                        model.put_on_device(parameter)
                    reducing.freeze()
                model.freeze()
                (model.loss(1, me.rank) + other(torch.ones(2, 3)).sum()).backward()

            with pytest.raises(WorldError, match="two optimizers reduce in one backward, and one of them is frozen"):
                meet()


PROGRAMS = {
    each.__name__: each for each in (optimizer, no_sync, new_gradients, replaced, homeless, in_hand, apart, two)
}

if __name__ == "__main__":
    main(PROGRAMS)
