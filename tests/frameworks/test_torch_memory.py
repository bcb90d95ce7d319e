"""Tensors without memory where their elements would be: refused everywhere with a text, never taken for absent."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import engine
import engine.torch as hvd
from engine.errors import MismatchError, UnsupportedTensorError

from ..on_ranks import on_ranks
from . import toy
from .wrapping import Wrap

pytestmark = on_ranks(*toy.SIZES, toy.BY_METHOD)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose storage is given back, as FSDP does between steps."""
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(4, 4)


def refusal(text: str) -> str:
    """What a refusal says: our own words, or those of a torch that lends memory by `__dlpack__` alone."""
    return text if hasattr(torch.Tensor, "__dlpack_c_exchange_api__") else "cannot be communicated"


MADE: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "freed": (lambda: freed(torch.ones(4, 4)), "it has a shape and no memory"),
    "freed, transposed": (lambda: freed(torch.ones(4, 4).t()), "it has a shape and no memory"),
    "fake": (fake, "it has a shape and no memory"),
    "meta": (lambda: torch.empty(4, 4, device="meta"), "meta"),
}

CALLS: dict[str, Callable[[Any], Any]] = {
    "allreduce": hvd.allreduce,
    "allreduce_": hvd.allreduce_,
    "allreduce_async_": hvd.allreduce_async_,
    "broadcast": lambda tensor: hvd.broadcast(tensor, 0),
    "broadcast_": lambda tensor: hvd.broadcast_(tensor, 0),
    "allgather": hvd.allgather,
    "alltoall": lambda tensor: hvd.alltoall(tensor, [4] + [0] * (engine.size() - 1)),
    "reducescatter": hvd.reducescatter,
    "grouped_allreduce": lambda tensor: hvd.grouped_allreduce([torch.ones(2), tensor]),
    "grouped_allreduce_": lambda tensor: hvd.grouped_allreduce_([tensor, torch.ones(2)]),
    "grouped_allgather": lambda tensor: hvd.grouped_allgather([tensor]),
    "grouped_reducescatter": lambda tensor: hvd.grouped_reducescatter([tensor]),
    "broadcast_parameters": lambda tensor: hvd.broadcast_parameters([("x", tensor)], 0),
    "check_consistency": lambda tensor: engine.check_consistency({"x": tensor}),
}


def refuses_in_every_call(made: Callable[[], torch.Tensor], text: str) -> None:
    """Each call raises on every rank, and the next one of its kind works."""
    for name, call in CALLS.items():
        said = toy.raises(UnsupportedTensorError, lambda call=call: call(made()))  # type: ignore[misc]
        call(torch.ones(4, 4))
        assert refusal(text) in said or text == "meta", f"{name}: {said}"


def test_test_every_call_refuses_tensors_without_memory() -> None:
    for made, text in MADE.values():
        refuses_in_every_call(made, text)


def test_test_every_call_refuses_a_tensor_that_is_spread_over_a_mesh() -> None:
    if engine.size() != 2:  # One size is enough: the import takes a second.
        return
    from torch.distributed.device_mesh import DeviceMesh

    module = import_module("torch.distributed." + ("tensor" if hasattr(nn, "RMSNorm") else "_tensor"))  # since 2.4
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        made = lambda: module.distribute_tensor(torch.ones(4, 4), mesh, [module.Replicate()])  # noqa: E731
        refuses_in_every_call(made, "its to_local()")
        model = nn.ParameterList([nn.Parameter(made())])
        for views in (False, True):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            said = toy.raises(
                UnsupportedTensorError,
                lambda: engine.DistributedOptimizer(optimizer, gradient_as_bucket_view=views),  # noqa: B023
            )
            assert refusal("its to_local()") in said, said
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model[0].grad = made()
        optimizer.step()
        said = toy.raises((UnsupportedTensorError, MismatchError), lambda: hvd.broadcast_optimizer_state(optimizer, 0))
        assert refusal("its to_local()") in said, said
    finally:
        torch.distributed.destroy_process_group()


def test_test_a_gradient_without_memory_is_an_error_of_its_rank(wrap: Wrap) -> None:
    model = toy.mlp()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    first = next(model.parameters())
    last = engine.rank() == engine.size() - 1
    loss = model(torch.ones(2, 8, dtype=torch.float64)).sum()
    handle = first.register_hook(lambda gradient: freed(gradient.clone()) if last else gradient)
    said = ""
    if last:
        said = toy.raises(UnsupportedTensorError, loss.backward)
    else:
        loss.backward()
    handle.remove()
    optimizer.zero_grad()  # The rank that failed brings what it still owes.
    model(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
    optimizer.step()
    engine.check_consistency(model.state_dict())
    optimizer.unwrap()
    assert not last or refusal("it has a shape and no memory") in said, said


def test_test_one_rank_without_memory_is_told_to_all() -> None:
    last = engine.rank() == engine.size() - 1
    for call in (
        lambda tensor: hvd.broadcast_parameters([("x", tensor)], 0),
        hvd.allreduce,
        lambda tensor: hvd.grouped_allreduce([tensor]),
        lambda tensor: engine.check_consistency({"x": tensor}),
    ):
        made = freed(torch.ones(4, 4)) if last else torch.ones(4, 4)
        said = toy.raises((UnsupportedTensorError, MismatchError), lambda call=call, made=made: call(made))  # type: ignore[misc]
        call(torch.ones(4, 4))
        assert refusal("no memory") in said and (last or f"rank {engine.size() - 1} failed at" in said), said


def test_test_a_wrong_argument_of_one_rank_is_told_to_all() -> None:
    last = engine.rank() == engine.size() - 1
    for wrong, right in (
        (lambda: hvd.allreduce(1.5), lambda: hvd.allreduce(torch.ones(2))),
        (lambda: hvd.allreduce_async_(torch.ones(2), True, None, hvd.Sum), lambda: hvd.allreduce_(torch.ones(2))),
        (lambda: hvd.grouped_allgather(3), lambda: hvd.grouped_allgather([torch.ones(2)])),
        (lambda: hvd.allreduce(torch.ones(2), compression=7), lambda: hvd.allreduce(torch.ones(2))),
        (lambda: hvd.sparse_allreduce(torch.ones(2)), lambda: hvd.sparse_allreduce(torch.ones(2).to_sparse())),
    ):
        if last:
            toy.raises(Exception, wrong)
        else:
            assert f"rank {engine.size() - 1} failed at" in toy.raises(MismatchError, right)
        right()


def convert(model: nn.Module) -> None:
    """Move every parameter and gradient to other memory, twice."""
    model.bfloat16()
    model.float()


def convert_by_swapping(model: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    convert(model)


def clone_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def clone_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data = parameter.grad.data.clone()


MOVES = {
    "converted": convert,
    "converted by swapping": convert_by_swapping,
    "data": clone_data,
    "gradients": clone_gradients,
}


def check_moved(wrap: Wrap, move: Callable[[nn.Module], None], here: bool, op: Any) -> None:
    """Gradients are reduced, in steps that keep them and in steps that do not, after memory was moved between steps."""
    ranks = range(1, engine.size() + 1)
    reduced = float(sum(ranks)) if op is hvd.Sum else sum(ranks) / engine.size()
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1.0)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), op=op)
    for step, keep in enumerate((False, False, True, False, True)):
        if here and step == 2:
            move(model)
        optimizer.zero_grad(set_to_none=not keep)
        torch.__future__.set_swap_module_params_on_conversion(False)
        model(torch.full((1, 1), float(engine.rank() + 1))).sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.item() == reduced, f"step {step}: {model.weight.grad.item()}"
        optimizer.step()
    optimizer.unwrap()


def test_test_gradients_are_reduced_after_memory_was_moved(wrap: Wrap) -> None:
    for move in MOVES.values():
        for here in (True, engine.rank() == 0):
            # Torch swaps no gradient that has a weak reference, as Sum keeps: it raises an error with its name.
            for op in (hvd.Average,) if move is convert_by_swapping else (hvd.Average, hvd.Sum):
                check_moved(wrap, move, here, op)


def only_on(rank: int, parameter: nn.Parameter, dtype: torch.dtype | None = None) -> None:
    """A backward pass that makes a gradient on one rank alone."""
    beside = torch.zeros((), requires_grad=True)
    mine = (parameter.to(dtype) if dtype else parameter).sum() * 2 if engine.rank() == rank else beside.sum()
    mine.backward()


def check_lone(case: object, parameter: nn.Parameter, dtype: torch.dtype) -> None:
    gradient = parameter.grad
    assert gradient is not None, case
    assert gradient.dtype == dtype, (case, gradient.dtype)
    assert torch.equal(gradient, torch.full_like(gradient, 2 / engine.size())), (case, gradient)


def test_test_a_rank_without_a_gradient_takes_the_dtype_of_the_others(wrap: Wrap) -> None:
    if not hasattr(torch.Tensor, "grad_dtype"):
        return
    for wanted in (torch.float32, torch.float64, torch.bfloat16):
        for rank in range(engine.size()):
            parameter = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
            parameter.grad_dtype = wanted
            optimizer = wrap(torch.optim.SGD([parameter], lr=0.0))
            for step in range(4):
                only_on((rank + step) % engine.size(), parameter, wanted)
                optimizer.synchronize()
                check_lone((wanted, rank, step), parameter, wanted)
                optimizer.zero_grad()
            optimizer.unwrap()


def change_dtype(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.double()


def change_format(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.to(memory_format=torch.channels_last)


def test_test_a_rank_without_a_gradient_follows_a_parameter_that_was_converted() -> None:
    for change in (change_dtype, change_format):
        for rank in range(engine.size()):
            parameter = nn.Parameter(torch.ones(2, 3, 4, 5))
            optimizer = engine.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.0), check_parameters=False)
            for step in range(4):
                if step == 1:
                    change(parameter)
                only_on((rank + step) % engine.size(), parameter)
                optimizer.synchronize()
                check_lone((change.__name__, rank, step), parameter, parameter.dtype)
                optimizer.zero_grad()
            optimizer.unwrap()
