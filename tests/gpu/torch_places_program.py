"""Places of gradients of torch tensors that are in host memory and claim to be on a GPU, where nothing moves.

test_torch_places.py runs it as a separate process, in which torch's tensors have another exchange table.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import weakref
from typing import Any

import torch

import engine.torch
from engine.session import runtime
from engine.torch.hooks import TorchReducer

from ..parallel.pretended_gpu import PretendedGpu
from .device_tensors import BORROW, STREAM, Table, capsule

ALIGNMENT = 16
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_own = Table.from_address(_pointer(torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api"))


@BORROW
def _borrow(tensor: torch.Tensor, out: Any) -> int:
    status = int(_own.borrow(tensor, out))
    out[0].device_type = 2
    return status


@STREAM
def _current_stream(_type: int, _ordinal: int, out: Any) -> int:
    out[0] = None
    return 0


_table = Table(1, 3, None, _own.allocate, _own.managed_from, _own.managed_to, _borrow, _current_stream)


class Model(torch.nn.Module):
    """Layers of several dtypes and layouts, one of which is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.image = torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.first = torch.nn.Linear(3, 5)
        self.unused = torch.nn.Linear(3, 5)
        self.wide = torch.nn.Linear(5, 7).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = self.image(x.expand(1, 2, 3, 3).contiguous(memory_format=torch.channels_last)).sum(dim=(2, 3))
        return self.wide(self.first(image).double()).sum()


def wrapped(model: torch.nn.Module, **options: Any) -> Any:
    """Return an optimizer with gradients side by side."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return engine.torch.DistributedOptimizer(
        optimizer, model.named_parameters(), gradient_as_bucket_view=True, check_parameters=False, **options
    )


def used(model: Model) -> list[torch.nn.Parameter]:
    """Return the parameters with a gradient, in the order in which gradients arrive."""
    layers = (model.wide, model.first, model.image)
    return [parameter for layer in layers for parameter in (layer.bias, layer.weight)]


def train(model: Model, x: torch.Tensor) -> list[int]:
    """Run a pass, and return the places of the gradients."""
    model(x).backward()
    assert model.unused.weight.grad is None
    return [parameter.grad.data_ptr() for parameter in used(model)]


def steps() -> None:
    """Check that gradients are in the same places in every step, with the parameters' layouts."""
    model, x = Model(), torch.ones(1)
    optimizer = wrapped(model)
    places = train(model, x)
    assert all(place % ALIGNMENT == 0 for place in places)
    optimizer.step()
    for to_none in (True, False, True):
        optimizer.zero_grad(set_to_none=to_none)
        if to_none:
            assert all(parameter.grad is None for parameter in model.parameters())
        assert train(model, x) == places
        optimizer.step()
    for parameter in used(model):
        assert parameter.grad.shape == parameter.shape and parameter.grad.dtype == parameter.dtype
        assert parameter.grad.stride() == parameter.stride()
    singles = sorted((p.grad.data_ptr(), 4 * p.numel()) for p in used(model) if p.dtype == torch.float32)
    for (begin, size), (following, _) in itertools.pairwise(singles):
        assert 0 <= following - begin - size < ALIGNMENT, "they are not side by side"


def accumulates() -> None:
    """Check that passes without a reduction add to what is there, new or in its place."""
    model, x = Model(), torch.ones(1)
    optimizer = wrapped(model, backward_passes_per_step=2)
    model(x).backward()
    once = model.first.weight.grad.clone()
    places = train(model, x)
    model.first.weight.grad.copy_(once)  # nothing has moved there
    with optimizer.no_sync():
        model(x).backward()
    assert torch.equal(model.first.weight.grad, 2 * once)
    optimizer.step()
    assert [parameter.grad.data_ptr() for parameter in used(model)] == places


def grows() -> None:
    """Check that parameters added later have a buffer of their own."""
    model, later, x = Model(), torch.nn.Linear(4, 4), torch.ones(1)
    optimizer = wrapped(model)
    optimizer._engine.names = None  # later parameters are named by their place
    places = train(model, x)
    optimizer.add_param_group({"params": list(later.parameters())})
    optimizer.zero_grad()
    (model(x) + later(torch.ones(4)).sum()).backward()
    assert [parameter.grad.data_ptr() for parameter in used(model)] == places
    assert later.weight.grad is not None and later.weight.grad.data_ptr() not in places


def moved_by_hand() -> None:
    """Give a gradient other memory: the result is still in its place, and so is the gradient."""
    model, x = Model(), torch.ones(1)
    optimizer = wrapped(model)
    places = train(model, x)
    for _ in range(2):
        for parameter in used(model):
            parameter.grad.data = torch.full_like(parameter, 7.0)
        optimizer.zero_grad(set_to_none=False)
        assert train(model, x) == places
        optimizer.step()


def goes() -> None:
    """Check that the memory is freed with the optimizer and its gradients."""
    model, x = Model(), torch.ones(1)
    optimizer = wrapped(model)
    train(model, x)
    storage = weakref.ref(model.first.weight.grad.untyped_storage())
    buffers = [
        weakref.ref(buffer)
        for each in set(optimizer._engine.reducer._places.values())
        for buffer in each._buffers.values()
    ]
    optimizer.unwrap()
    optimizer.zero_grad()
    del optimizer
    gc.collect()
    runtime.current_engine().free_deferred()
    assert storage() is None and all(buffer() is None for buffer in buffers)


if __name__ == "__main__":
    torch.Tensor.__dlpack_c_exchange_api__ = capsule(_table)  # type: ignore[attr-defined]
    TorchReducer.takes_place = lambda _self, _parameter: True  # type: ignore[method-assign]
    TorchReducer.rooms_for = lambda _self, _index: list  # type: ignore[method-assign, assignment, return-value]
    engine.init(cycle_time_ms=1.0)
    gpu = PretendedGpu(runtime.current_engine())
    for program in (steps, accumulates, grows, moved_by_hand, goes):
        program()
    engine.shutdown()
    gpu.end()
    print("well")
