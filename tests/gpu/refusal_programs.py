"""Programs of ranks for tests of what `freeze()` refuses, on the stand-ins; each case's error is printed as JSON.

python -m tests.gpu.refusal_programs NAME RANK SIZE KERNELS ...
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import engine
import engine.torch
from engine.collectives.compression import Compression
from engine.errors import EngineError
from engine.session import runtime
from engine.torch import freezing

from ..waiting import until
from .allreduce_programs import allreduce, main
from .device_tensors import DeviceTensor, Framework
from .plane_programs import Rank

freezing.stream_of = lambda _device: Framework.stream.value  # type: ignore[assignment]


def place(on_gpu: bool) -> None:
    """Make the binding take all gradients for tensors on the GPU, or in host memory, where they really are."""
    freezing.is_on_gpu = lambda _tensor: on_gpu  # type: ignore[assignment]


def tell(case: str, act: Callable[[], None]) -> None:
    """Print the error of a refusal."""
    try:
        act()
    except EngineError as error:
        told = f"{type(error).__name__}: {error}"
    else:
        told = "accepted"
    print(json.dumps({case: told}), flush=True)


def trained(layer: torch.nn.Module, loss: Callable[[torch.nn.Module], Any] | None = None, **options: Any) -> Any:
    """Return an optimizer that has made a step, and has its gradients."""
    optimizer = engine.torch.DistributedOptimizer(
        torch.optim.SGD(layer.parameters(), lr=0.1), layer.named_parameters(), **options
    )
    for _ in range(options.get("backward_passes_per_step", 1)):
        (loss or (lambda it: it(torch.ones(2, 32)).sum()))(layer).backward()
    optimizer.step()
    return optimizer


def linear(rows: int = 2) -> torch.nn.Linear:
    """Return a model that is the same on all ranks."""
    torch.manual_seed(0)
    return torch.nn.Linear(32, rows)


@contextlib.contextmanager
def dropped(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer, and unwrap it at the end."""
    try:
        yield optimizer
    finally:
        optimizer.unwrap()


class Doubled:
    """A compressor of the program's own."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the tensor unchanged."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, _context: None) -> torch.Tensor:
        """Return the tensor unchanged."""
        return tensor


def of_options(process_set: Any) -> dict[str, dict[str, Any]]:
    """Return options of an optimizer that cannot be frozen, by case."""
    return {
        "process set": {"process_set": process_set},
        "minimum": {"op": engine.Min},
        "maximum": {"op": engine.Max},
        "product": {"op": engine.Product},
        "adasum": {"op": engine.Adasum},
        "powersgd": {"compression": engine.torch.PowerSGD(1)},
        "own compressor": {"compression": Doubled},
        "tuned": {"compression": Compression.tuned},
        "several passes": {"backward_passes_per_step": 2},
    }


def options(me: Rank) -> None:
    """Try to freeze optimizers with options that cannot be frozen."""
    with me.world("options"):
        place(on_gpu=True)
        for case, given in of_options(engine.add_process_set([0])).items():
            with dropped(trained(linear(64), **given)) as optimizer:
                tell(case, optimizer.freeze)
    with me.world("ordered", device_sums="ordered"), dropped(trained(linear())) as optimizer:
        tell("ordered sums", optimizer.freeze)


def gradients(me: Rank) -> None:
    """Try to freeze optimizers with gradients that cannot be frozen."""
    with me.world("gradients"):
        place(on_gpu=True)
        table = torch.nn.Embedding(4, 3, sparse=True)
        with dropped(trained(table, lambda it: it(torch.tensor([1, 2])).sum())) as optimizer:
            tell("sparse", optimizer.freeze)
        with dropped(trained(linear())) as optimizer:
            optimizer.zero_grad()
            tell("no gradients", optimizer.freeze)
        with dropped(trained(linear())) as optimizer:
            weight = optimizer.param_groups[0]["params"][0]
            weight.grad = torch.ones(32, 2).t()
            tell("other order", optimizer.freeze)
        with dropped(trained(linear())) as optimizer:
            place(on_gpu=False)
            tell("host", optimizer.freeze)


def states(me: Rank) -> None:
    """Try to freeze at moments when it is not possible."""
    with me.world("states"):
        place(on_gpu=True)
        layer = linear()
        plain = torch.optim.SGD(layer.parameters(), lr=0.1)
        with dropped(engine.torch.DistributedOptimizer(plain, layer.named_parameters())) as optimizer:
            tell("before the first step", optimizer.freeze)
        with dropped(trained(linear())) as optimizer:
            with optimizer.no_sync():
                tell("within no_sync", optimizer.freeze)
            weight, bias = optimizer.param_groups[0]["params"]
            handle = weight.register_post_accumulate_grad_hook(lambda _: tell("within backward", optimizer.freeze))
            ((weight * 2).sum() + (bias * 2).sum()).backward()
            handle.remove()
            child = os.fork()
            if not child:
                signal.alarm(20)
                tell("in a child", optimizer.freeze)
                os._exit(0)
            until(lambda: os.waitpid(child, os.WNOHANG)[0], "the child's end")
        left = trained(linear())
    tell("after shutdown", left.freeze)


def old(me: Rank) -> None:
    """Try to freeze with an NCCL that cannot end several communicators."""
    with me.world("old"):
        tell("old NCCL", lambda: runtime.current_device().freeze(0, [], freezing_plain()))
        me.works()


def freezing_plain() -> Any:
    """Return the reduction of a plain sum."""
    from engine.gpu.freezing import Reduction

    return Reduction(0, 1.0, 1.0, None)


def joined(me: Rank) -> None:
    """Try to freeze when the last rank has joined, after GPUs were opened."""
    with me.world("joined"):
        tensor = DeviceTensor(np.ones(4, np.float32))
        allreduce(tensor, tensor).wait()
        if me.rank == me.size - 1:
            engine.join()
            return
        tell("joined", lambda: runtime.current_device().freeze(0, [], freezing_plain()))
        engine.join()


def everything(me: Rank) -> None:
    """Run all cases that one job can show, in order."""
    for program in (options, gradients, states):
        program(me)


PROGRAMS = {each.__name__: each for each in (everything, old, joined)}

if __name__ == "__main__":
    main(PROGRAMS)
