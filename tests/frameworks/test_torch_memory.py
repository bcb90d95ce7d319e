"""Tensors without memory for their elements: refused everywhere with a text, never taken for absent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import engine
import engine.torch as hvd
from engine.errors import EngineError, MismatchError, UnsupportedTensorError

from ..on_ranks import on_ranks
from . import toy
from .wrapping import Wrap

pytestmark = on_ranks(*toy.SIZES, toy.BY_METHOD)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose storage is freed, as FSDP does between steps."""
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(4, 4)


def refusal(text: str) -> str:
    """Return the expected text: the engine's, or that of a torch that lends memory only by `__dlpack__`."""
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
    """Check that each call raises on every rank, and that the next call of its kind works."""
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
    optimizer.zero_grad()  # The rank that failed submits what it still owes.
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
    with swapping():
        convert(model)


def load_by_swapping(model: nn.Module) -> None:
    with swapping():
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})


@contextmanager
def swapping() -> Iterator[None]:
    """Make torch swap tensors when it converts or loads a module in this block."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def clone_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def clone_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data = parameter.grad.data.clone()


def share(model: nn.Module) -> None:
    """Move the storages themselves, which several tensors may view."""
    model.share_memory()


MOVES = {
    "converted": convert,
    "converted by swapping": convert_by_swapping,
    "loaded by swapping": load_by_swapping,
    "data": clone_data,
    "gradients": clone_gradients,
    "shared": share,
}
MOMENTS = "before zero_grad", "after zero_grad", "between two backwards", "before step"


def check_moved(wrap: Wrap, how: str, when: str, here: bool, op: Any) -> None:
    """Check that gradients are reduced, in steps that keep them or not, whenever memory was moved."""
    ranks = range(1, engine.size() + 1)
    reduced = float(sum(ranks)) if op is hvd.Sum else sum(ranks) / engine.size()
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1.0)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), op=op)

    def backward() -> None:
        model(torch.full((1, 1), float(engine.rank() + 1))).sum().backward()

    def gradient() -> float:
        assert model.weight.grad is not None
        return model.weight.grad.item()

    for step, keep in enumerate((False, False, True, False, True)):
        moments = dict.fromkeys(MOMENTS, lambda: None)
        if here and step == 2:
            moments[when] = lambda: MOVES[how](model)
        moments["before zero_grad"]()
        optimizer.zero_grad(set_to_none=not keep)
        moments["after zero_grad"]()
        backward()
        assert gradient() == reduced, f"{how} {when}, step {step}: {gradient()}"
        if op is hvd.Average:
            moments["between two backwards"]()
            backward()
            assert gradient() == 2 * reduced, f"{how} {when}, step {step}, second backward: {gradient()}"
        moments["before step"]()
        optimizer.step()
        assert gradient() == (2 if op is hvd.Average else 1) * reduced, f"{how} {when}, step {step}: {gradient()}"
    optimizer.unwrap()


@pytest.mark.sample(8)
@pytest.mark.parametrize("how", MOVES)
def test_test_gradients_are_reduced_after_memory_was_moved(how: str, wrap: Wrap) -> None:
    # Parameters that torch loads by swapping lose their gradient, in one process, too.
    for when in MOMENTS[:2] if how == "loaded by swapping" else MOMENTS:
        for here in (True, engine.rank() == 0):
            check_moved(wrap, how, when, here, hvd.Average)
            # Torch refuses to swap a gradient that Sum remembers; see the test after this one.
            if when != "between two backwards" and (when == "after zero_grad" or "swapping" not in how):
                check_moved(wrap, how, when, here, hvd.Sum)


def test_test_a_swap_of_a_gradient_that_is_remembered_says_what_to_do(wrap: Wrap) -> None:
    if not hasattr(torch.utils, "swap_tensors"):  # since torch 2.3
        return
    model = nn.Linear(1, 1, bias=False)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), op=hvd.Sum)
    for use in (lambda: None, optimizer.step):
        model(torch.ones(1, 1)).sum().backward()
        use()
        with pytest.raises(RuntimeError, match=r"swap Linear\.weight") as caught:
            convert_by_swapping(model)
        assert "Convert or load the module after zero_grad()" in str(caught.value.__cause__)
        optimizer.zero_grad()
        model.float()
    optimizer.unwrap()


def test_test_hooks_stay_with_their_parameters_when_two_are_swapped(wrap: Wrap) -> None:
    if not hasattr(torch.utils, "swap_tensors"):  # since torch 2.3
        return
    first, second, other = (nn.Parameter(torch.full((3,), value)) for value in (1.0, 2.0, 4.0))
    optimizer = wrap(torch.optim.SGD([first, second], lr=0.0))
    torch.utils.swap_tensors(first, second)
    torch.utils.swap_tensors(first, other)
    mine = engine.rank() + 1
    loss: Any = ((1.0 * first + 10.0 * second + 100.0 * other) * mine).sum()
    loss.backward()
    assert [each[0].item() for each in (first, second, other)] == [4.0, 1.0, 2.0]
    average = (engine.size() + 1) / 2
    for parameter, value in ((first, average), (second, 10 * average), (other, 100 * mine)):
        assert parameter.grad is not None and (parameter.grad == value).all(), (parameter.grad, value)
    optimizer.unwrap()


def assign(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def assign_a_part(model: nn.Module) -> None:
    model.load_state_dict({"1.weight": model.state_dict()["1.weight"].clone()}, strict=False, assign=True)


def set_anew(model: Any) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def convert_to_others(model: nn.Module) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        convert(model)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


@pytest.mark.sample(8)
@pytest.mark.parametrize("replace", [assign, assign_a_part, set_anew, convert_to_others])
@pytest.mark.parametrize("named", [True, False])
def test_test_parameters_that_were_replaced_are_named(replace: Callable[[Any], None], named: bool, wrap: Wrap) -> None:
    for before_training in (False, True):
        for keep in (False, True):
            model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
            optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters() if named else None)

            def step(model: nn.Module = model, optimizer: Any = optimizer) -> None:
                model(torch.full((1, 2), float(engine.rank() + 1))).sum().backward()
                optimizer.step()

            if not before_training:
                step()
            replace(model)
            optimizer.zero_grad(set_to_none=not keep)
            said = toy.raises(EngineError, step)
            assert "is in no module any more" in said and "Linear.weight" in said, said
            optimizer.unwrap()
            optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
            model.zero_grad()
            step()
            engine.check_consistency(toy.gradients_of(model))
            optimizer.unwrap()


def test_test_a_parameter_that_is_not_used_is_no_replaced_one(wrap: Wrap) -> None:
    """A model of equal shapes trains beside it, on this rank only."""
    model, alone = toy.mlp(), toy.mlp()
    unused = nn.Parameter(torch.ones(3, 2))
    named = [*model.named_parameters(), ("unused", unused)]
    optimizer = wrap(torch.optim.SGD([each for _, each in named], lr=0.1), named)
    for step in range(5):
        optimizer.zero_grad()
        toy.loss_of(alone, toy.whole_batch(step)).backward()
        if step % 2:
            toy.loss_of(model, toy.shard(toy.whole_batch(step))).backward()
        optimizer.step()
    toy.check_same_everywhere(toy.parameters_of(model))
    optimizer.unwrap()


def test_test_parameters_that_a_step_reduces_are_no_replaced_ones(wrap: Wrap) -> None:
    """The parameters are in no module, and a layer of equal shape trains beside them, on this rank only."""
    alone, mine = nn.Linear(2, 1, bias=False), float(engine.rank() + 1)
    alone(torch.ones(1, 2)).sum().backward()
    average = (engine.size() + 1) / 2
    for passes in (1, 2):
        parameter = nn.Parameter(torch.zeros(1, 2))
        optimizer = wrap(torch.optim.SGD([parameter], lr=1.0), backward_passes_per_step=passes)

        def accumulate(parameter: nn.Parameter = parameter, optimizer: Any = optimizer) -> None:
            with optimizer.no_sync():
                (parameter * mine).sum().backward()

        def set_by_hand(parameter: nn.Parameter = parameter) -> None:
            parameter.grad = torch.full_like(parameter, mine)

        def leave_window_open(parameter: nn.Parameter = parameter) -> None:
            (parameter * mine).sum().backward()

        for step, bring in enumerate((accumulate, set_by_hand, leave_window_open) * 3):
            optimizer.zero_grad()
            bring()
            optimizer.step()
            expected = torch.full_like(parameter, -average * (step + 1))
            assert torch.equal(parameter.detach(), expected), (passes, bring, parameter)
        optimizer.unwrap()


def only_on(rank: int, parameter: nn.Parameter, dtype: torch.dtype | None = None) -> None:
    """Run a backward pass that makes a gradient on one rank only."""
    beside = torch.zeros((), requires_grad=True)
    mine = (parameter.to(dtype) if dtype else parameter).sum() * 2 if engine.rank() == rank else beside.sum()
    mine.backward()


def check_lone(case: object, parameter: nn.Parameter, dtype: torch.dtype) -> None:
    gradient = parameter.grad
    assert gradient is not None, case
    assert gradient.dtype == dtype, (case, gradient.dtype)
    assert torch.equal(gradient, torch.full_like(gradient, 2 / engine.size())), (case, gradient)


@pytest.mark.sample(1)
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


def test_test_a_rank_without_a_gradient_brings_zeros_of_the_wanted_dtype_to_a_scheme() -> None:
    if not hasattr(torch.Tensor, "grad_dtype"):
        return
    for rank in range(engine.size()):
        parameter = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
        parameter.grad_dtype = torch.float32
        scheme = engine.torch.PowerSGD(rank=4, start_iter=1, min_compression_rate=0.0)
        optimizer = engine.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.0), compression=scheme)
        for step in range(3):
            only_on((rank + step) % engine.size(), parameter, torch.float32)
            optimizer.synchronize()
            assert parameter.grad is not None and parameter.grad.dtype is torch.float32, (rank, step, parameter.grad)
            torch.testing.assert_close(parameter.grad, torch.full((4, 4), 2 / engine.size()))
            optimizer.zero_grad()
        optimizer.unwrap()


def change_dtype(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.double()


def change_format(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.to(memory_format=torch.channels_last)


@pytest.mark.sample(1)
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
