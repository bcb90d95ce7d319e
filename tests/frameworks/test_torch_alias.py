"""Gradients to which autograd gives the same memory, and memory that the user shares between gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import engine
import engine.torch as hvd
from engine.errors import EngineError

from ..on_ranks import on_ranks
from . import toy
from .wrapping import Wrap

pytestmark = on_ranks(*toy.SIZES)

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
FORWARDS: dict[str, Forward] = {
    "view": lambda a, b: a.view(-1) + b.view(-1),
    "stack": lambda a, b: torch.stack([a, b]).sum(0),
    "unsqueeze": lambda a, b: a.unsqueeze(0) + b.unsqueeze(0),
    "transpose": lambda a, b: a.t() + b.t(),
    "pieces": lambda a, b: torch.cat([a, b]),
    "a piece of the other": lambda a, b: a.view(-1) + torch.cat([b.view(-1)[:100], b.view(-1)[100:]]),
}


def pair() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(120, 90)) for _ in range(2)]


def backward(output: torch.Tensor) -> None:
    (output * (engine.rank() + 1)).sum().backward()


def mean() -> float:
    return (engine.size() + 1) / 2


def test_shared_memory_is_reduced_once_for_each(wrap: Wrap) -> None:
    wrong = {}
    for name, forward in FORWARDS.items():
        parameters = pair()
        optimizer = wrap(torch.optim.SGD(parameters, lr=0.0))
        for step in range(4):
            optimizer.zero_grad()
            backward(forward(*parameters))
            if not all((parameter.grad == mean()).all() for parameter in parameters if parameter.grad is not None):
                wrong[name, step] = [parameter.grad for parameter in parameters]
            optimizer.step()
        optimizer.unwrap()
    assert not wrong, wrong


class Added(torch.autograd.Function):
    """A sum whose gradients have their own memory, or share it; the hooks fire in the same order."""

    share = False

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        views = [gradients[0].view(-1).view_as(gradients[0]) for _ in range(2)]
        return tuple(views if Added.share else [view.clone() for view in views])


def test_memory_that_comes_to_be_shared_is_an_error_once() -> None:
    parameters = pair()
    optimizer = engine.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0))
    Added.share = False
    for _ in range(4):
        optimizer.zero_grad()
        backward(Added.apply(*parameters))
    Added.share = True
    optimizer.zero_grad()
    text = toy.raises(EngineError, lambda: backward(Added.apply(*parameters)))
    assert "share memory" in text and "Repeat the step from zero_grad" in text, text
    for _ in range(2):
        optimizer.zero_grad()
        backward(Added.apply(*parameters))
        assert all((parameter.grad == mean()).all() for parameter in parameters if parameter.grad is not None)


def test_a_flat_buffer_of_the_users_stays_in_use() -> None:
    parameters = pair()
    flat = torch.zeros(2 * 120 * 90)
    for parameter, part in zip(parameters, flat.chunk(2), strict=True):
        parameter.grad = part.view(120, 90)
    optimizer = engine.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0))
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        backward(FORWARDS["view"](*parameters))
        assert (flat == mean()).all()
        optimizer.step()


def test_a_negated_view_keeps_its_sign() -> None:
    parameter = nn.Parameter(torch.ones(4))
    parameter.register_hook(lambda gradient: torch._neg_view(gradient.clone()) if engine.rank() == 0 else gradient)
    optimizer = engine.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.0), op=engine.Sum)
    for _ in range(3):
        optimizer.zero_grad()
        (parameter * 2).sum().backward()
        assert parameter.grad is not None
        assert (parameter.grad == 2 * (engine.size() - 2)).all()


def whole(a: nn.Parameter, b: nn.Parameter) -> None:
    b.grad = a.grad


def view(a: nn.Parameter, b: nn.Parameter) -> None:
    assert a.grad is not None
    b.grad = a.grad.view(-1).view_as(b)


def detached(a: nn.Parameter, b: nn.Parameter) -> None:
    assert a.grad is not None
    b.grad = a.grad.detach()


def same_data(a: nn.Parameter, b: nn.Parameter) -> None:
    assert a.grad is not None
    b.grad = torch.zeros_like(b)
    b.grad.data = a.grad.data


def moved(a: nn.Parameter, b: nn.Parameter) -> None:
    b.grad, a.grad = a.grad, None


def moved_view(a: nn.Parameter, b: nn.Parameter) -> None:
    assert a.grad is not None
    b.grad, a.grad = a.grad.view(-1).view_as(b), None


TIES = [whole, view, detached, same_data, moved, moved_view]
WAYS: dict[str, dict[str, Any]] = {
    "sum": {"op": hvd.Sum},
    "max": {"op": hvd.Max},
    "product": {"op": hvd.Product},
    "average": {"op": hvd.Average},
    "average with a factor": {"op": hvd.Average, "prescale_factor": 2.0},
}


def expected(way: str) -> float:
    ranks = range(1, engine.size() + 1)
    averages = {"average": mean(), "average with a factor": 2 * mean()}
    return averages.get(way, float({"sum": sum, "max": max, "product": math.prod}.get(way, sum)(ranks)))


def check_values(case: object, parameters: Iterable[nn.Parameter], value: float) -> None:
    for index, parameter in enumerate(parameters):
        assert parameter.grad is None or (parameter.grad == value).all(), (case, index, parameter.grad)


def make_tied(wrap: Wrap, **options: Any) -> tuple[list[nn.Parameter], Any]:
    parameters = [nn.Parameter(torch.ones(4, 6)) for _ in range(2)]
    return parameters, wrap(torch.optim.SGD(parameters, lr=0.0), **options)


@pytest.mark.sample(1)
def test_gradients_tied_after_backward_are_reduced_once(wrap: Wrap) -> None:
    for way, options in WAYS.items():
        for tie in TIES:
            (a, b), optimizer = make_tied(wrap, **options)
            for step in range(3):
                optimizer.zero_grad()
                backward(a)
                tie(a, b)
                optimizer.step()
                check_values((way, tie.__name__, step), [a, b], expected(way))
                assert b.grad is not None
            optimizer.unwrap()


def test_gradients_tied_before_backward_are_reduced_once(wrap: Wrap) -> None:
    for way, options in WAYS.items():
        for tie in (whole, view, detached):
            (a, b), optimizer = make_tied(wrap, **options)
            for step in range(4):
                optimizer.zero_grad(set_to_none=False)
                if not step or wrap.views:  # Shared memory has a place for each gradient, so they no longer alias.
                    a.grad = torch.zeros_like(a)
                    tie(a, b)
                backward(a)
                check_values((way, tie.__name__, step), [a, b], expected(way))
                optimizer.step()
                check_values((way, tie.__name__, step, "stepped"), [a, b], expected(way))
            optimizer.unwrap()


def test_gradients_tied_in_a_window_are_reduced_once(wrap: Wrap) -> None:
    for tie in (whole, view):
        for passes in (1, 2, 3):  # passes of the window; with 3 the step reduces what two have left
            (a, b), optimizer = make_tied(wrap, op=hvd.Sum, backward_passes_per_step=passes)
            for step in range(3):
                optimizer.zero_grad()
                with optimizer.no_sync() if passes == 1 else nullcontext():
                    backward(a)
                tie(a, b)
                backward(a)
                check_values((tie.__name__, passes, step), [a, b] if passes < 3 else [], 2 * expected("sum"))
                optimizer.step()
                check_values((tie.__name__, passes, step, "stepped"), [a, b], 2 * expected("sum"))
            optimizer.unwrap()


def test_tied_gradients_set_by_hand_are_reduced_once(wrap: Wrap) -> None:
    (a, b), optimizer = make_tied(wrap, op=hvd.Sum)
    for step in range(3):
        a.grad = torch.full_like(a, float(engine.rank() + 1))
        b.grad = a.grad
        optimizer.step()
        check_values(step, [a, b], expected("sum"))
        optimizer.zero_grad()
    optimizer.unwrap()


def test_a_slice_of_a_reduced_gradient_is_not_reduced_again(wrap: Wrap) -> None:
    a, b = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(6, 2))
    optimizer = wrap(torch.optim.SGD([a, b], lr=0.0), op=hvd.Sum)
    for _ in range(3):
        optimizer.zero_grad()
        backward(a)
        assert a.grad is not None
        b.grad = a.grad[:, 1:3]
        optimizer.step()
        check_values("slice", [a, b], expected("sum"))
    optimizer.unwrap()


def test_late_gradients_beside_reduced_ones_in_one_buffer_are_reduced(wrap: Wrap) -> None:
    for cut in (lambda buffer: (buffer[:6], buffer[6:]), lambda buffer: (buffer[::2], buffer[1::2])):
        a, b = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(6, 4))
        optimizer = wrap(torch.optim.SGD([a, b], lr=0.0), op=hvd.Sum)
        for step in range(3):
            optimizer.zero_grad()
            backward(a)
            mine, theirs = cut(torch.full((12, 4), float(engine.rank() + 1)))
            a.grad = mine.copy_(a.grad)  # like a program that flattens gradients
            b.grad = theirs
            optimizer.step()
            check_values(step, [a, b], expected("sum"))
        optimizer.unwrap()


def test_a_gradient_partly_in_a_reduced_one_is_refused(wrap: Wrap) -> None:
    a, b = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))
    optimizer = wrap(torch.optim.SGD([a, b], lr=0.0), op=hvd.Sum)
    backward(a)
    buffer = torch.full((9,), float(engine.rank() + 1))
    a.grad, b.grad = buffer[:6].copy_(a.grad), buffer[3:]
    said = toy.raises(EngineError, optimizer.step)
    assert "group0.param1' lies in part where other gradients do" in said, said
    optimizer.unwrap()


def test_sparse_gradients_tied_after_backward_are_reduced_once() -> None:
    parameters = [nn.Parameter(torch.ones(4, 6)) for _ in range(2)]
    optimizer = engine.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0), op=hvd.Sum)
    a, b = parameters
    for _ in range(3):
        optimizer.zero_grad()
        backward(nn.functional.embedding(torch.arange(4), a, sparse=True))
        b.grad = a.grad
        optimizer.step()
        assert a.grad is not None and b.grad is not None
        assert (a.grad.to_dense() == expected("sum")).all()
        assert (b.grad.to_dense() == expected("sum")).all()
    optimizer.unwrap()


def test_gradients_tied_on_one_rank_alone_are_an_error_there(wrap: Wrap) -> None:
    if engine.size() == 1:
        return
    (a, b), optimizer = make_tied(wrap, op=hvd.Sum)
    backward(a)
    if engine.rank() == 0:
        b.grad = a.grad
        assert "tie gradients on all ranks, or on none" in toy.raises(EngineError, optimizer.step)
    else:
        b.grad = torch.ones_like(b)
        optimizer.step()
    optimizer.unwrap()
