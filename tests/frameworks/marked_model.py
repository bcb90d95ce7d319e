"""A model that records in its backward, compiled too, how many tensors have been reduced by then."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..waiting import NotWithin, until
from . import toy

_passed: Callable[[], object]  # function that the backward of the last marked model calls


def _forward(x: torch.Tensor) -> torch.Tensor:
    """Return the input."""
    return x.clone()


def _backward(gradient: torch.Tensor) -> torch.Tensor:
    _passed()
    return gradient.clone()


class _Function(torch.autograd.Function):
    """Marker for torch before 2.4; a compiler does not trace into it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return _backward(gradients[0])


if hasattr(torch.library, "custom_op"):
    _mark = torch.library.custom_op("enginetest::mark", _forward, mutates_args=())
    _mark_backward = torch.library.custom_op("enginetest::mark_backward", _backward, mutates_args=())
    _mark.register_fake(torch.empty_like)
    _mark_backward.register_fake(torch.empty_like)
    _mark.register_autograd(lambda ctx, gradient: _mark_backward(gradient))
else:
    _mark = _Function.apply


class Marked(nn.Module):
    """An MLP of five layers that waits for `wait_for` reduced tensors when backward has left its last layer.

    It waits as if it were computing, and goes on without them after `patience` seconds.
    """

    def __init__(self, inner: nn.Sequential, wait_for: int, patience: float) -> None:
        super().__init__()
        self.inner = inner
        self.counts: list[int] = []  # tensors reduced by then, for each step
        self._wait_for, self._patience = wait_for, patience
        self._before = 0

    def begin(self) -> None:
        """Prepare a step."""
        global _passed
        _passed, self._before = self._wait, toy.reduced()

    def _wait(self) -> None:
        with contextlib.suppress(NotWithin):  # `counts` shows it; nothing here waits in the engine
            until(lambda: toy.reduced() >= self._before + self._wait_for, "enough is reduced", self._patience)
        self.counts.append(toy.reduced() - self._before)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner[4](_mark(self.inner[:4](x)))
        return result
