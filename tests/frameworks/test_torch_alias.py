"""Gradients to which autograd gives the same memory, and memory that the user shares out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import engine
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
    """A sum whose gradients have memory of their own, or share it; the hooks fire in the same order."""

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
