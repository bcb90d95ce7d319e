"""Collectives through which gradients flow: what `engine.torch` calls when a tensor requires a gradient.

The loss is taken to be the sum of what the ranks compute, so that the gradient of a rank's input is the sum over ranks
of what their outputs ask of it. Every rank must run backward through the same collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine import collectives, groups, runtime
from engine.errors import EngineError
from engine.types import Average, Op, Sum

Context = Any


def call(
    function: type[torch.autograd.Function], plain: Callable[..., Any], tensor: torch.Tensor, *arguments: Any
) -> Any:
    """The result of `function` if a gradient has to flow to `tensor`, else that of `plain`, which is the same."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return function.apply(tensor, *arguments)  # type: ignore[no-untyped-call]
    return plain(tensor, *arguments)


def grouped(tensors: Sequence[torch.Tensor], *settings: Any) -> list[torch.Tensor]:
    """The grouped allreduce of `tensors`, with gradients if any of them has to get one."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return list(GroupedAllreduce.apply(*settings, *tensors))  # type: ignore[no-untyped-call]
    return groups.grouped_allreduce(tensors, *settings)


def _linear(op: Op, what: str) -> None:
    if op not in (Sum, Average):
        raise EngineError(
            f"{what} with op={op.name.title()} has no gradient: only Sum and Average are linear; detach the tensor"
        )


def _backward(name: str | None) -> str | None:
    return None if name is None else f"{name}.backward"


class Allreduce(torch.autograd.Function):
    """The gradient of a sum over ranks is the sum of the gradients; of an average, their average."""

    @staticmethod
    def forward(
        ctx: Context,
        tensor: torch.Tensor,
        op: Op,
        name: str | None,
        prescale: float,
        postscale: float,
        compression: Any,
    ) -> Any:
        ctx.settings = op, _backward(name), prescale, postscale, compression
        return collectives.allreduce(tensor, op, name, prescale, postscale, compression)

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> Any:
        _linear(ctx.settings[0], "allreduce")
        return collectives.allreduce(gradients[0], *ctx.settings), None, None, None, None, None


class GroupedAllreduce(torch.autograd.Function):
    """As `Allreduce`, for several tensors in one request each way."""

    @staticmethod
    def forward(
        ctx: Context,
        op: Op,
        name: str | None,
        prescale: float,
        postscale: float,
        compression: Any,
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.settings = op, _backward(name), prescale, postscale, compression
        return tuple(groups.grouped_allreduce(tensors, op, name, prescale, postscale, compression))

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> Any:
        _linear(ctx.settings[0], "grouped_allreduce")
        return None, None, None, None, None, *groups.grouped_allreduce(gradients, *ctx.settings)


class Broadcast(torch.autograd.Function):
    """Every rank's output is the root's input: its gradient is the sum of all. The others' inputs do not matter."""

    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, root_rank: int, name: str | None) -> Any:
        ctx.root_rank, ctx.name = root_rank, _backward(name)
        return collectives.broadcast(tensor, root_rank, name)

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> Any:
        total = collectives.allreduce(gradients[0], Sum, ctx.name)
        return total if runtime.rank() == ctx.root_rank else torch.zeros_like(total), None, None


class Allgather(torch.autograd.Function):
    """Every rank's output holds this rank's rows: their gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, name: str | None) -> Any:
        handle = collectives.allgather_async(tensor, name)
        result = handle.wait()
        ctx.rows, ctx.shape, ctx.name = handle.rows, tensor.shape, _backward(name)
        return result

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> Any:
        total = collectives.allreduce(gradients[0], Sum, ctx.name)
        start = sum(ctx.rows[: runtime.rank()])
        return total[start : start + ctx.rows[runtime.rank()]].reshape(ctx.shape), None


class Alltoall(torch.autograd.Function):
    """The gradient travels back the way that the rows came."""

    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, splits: Any, name: str | None) -> Any:
        handle = collectives.alltoall_async(tensor, splits, name)
        result = handle.wait()
        ctx.rows, ctx.shape, ctx.name = handle.rows, tensor.shape, _backward(name)
        if splits is None:
            return result
        ctx.mark_non_differentiable(result[1])
        return result

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> Any:
        sent, _ = collectives.alltoall(gradients[0], ctx.rows, ctx.name)
        if len(sent) < ctx.shape[0]:  # Rows beyond the sum of the splits went nowhere.
            sent = torch.cat([sent, sent.new_zeros(ctx.shape[0] - len(sent), *ctx.shape[1:])])
        return sent.reshape(ctx.shape), None, None


class Reducescatter(torch.autograd.Function):
    """Each row went to one rank: all ranks' inputs get the gradient from there."""

    @staticmethod
    def forward(
        ctx: Context,
        tensor: torch.Tensor,
        op: Op,
        name: str | None,
        prescale: float,
        postscale: float,
        compression: Any,
    ) -> Any:
        ctx.op, ctx.name = op, _backward(name)
        ctx.factor = prescale * postscale / (runtime.size() if op is Average else 1)
        return collectives.reducescatter(tensor, op, name, prescale, postscale, compression)

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> Any:
        _linear(ctx.op, "reducescatter")
        total = collectives.allgather(gradients[0], ctx.name)
        return total if ctx.factor == 1 else total * ctx.factor, None, None, None, None, None
