"""Collectives through which gradients flow: what `engine.torch` calls when a tensor requires a gradient.

The loss is taken to be the sum of what the ranks compute, so that the gradient of a rank's input is the sum over ranks
of what their outputs ask of it. Every rank must run backward through the same collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import collectives, groups, runtime
from ..errors import EngineError
from ..process_sets import ProcessSet
from ..types import Adasum, Average, Op, Sum

Context = Any


def call(
    function: type[torch.autograd.Function], plain: Callable[..., Any], tensor: torch.Tensor, *arguments: Any
) -> Any:
    """The result of `function` if a gradient has to flow to `tensor`, else that of `plain`, which is the same."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return function.apply(tensor, *arguments)  # type: ignore[no-untyped-call]
    return plain(tensor, *arguments)


def call_grouped(
    function: type[torch.autograd.Function],
    plain: Callable[..., list[Any]],
    tensors: Sequence[torch.Tensor],
    *settings: Any,
) -> list[torch.Tensor]:
    """As `call`, for several tensors: the result of `function` if a gradient has to flow to any of them."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return list(function.apply(*settings, *tensors))  # type: ignore[no-untyped-call]
    return plain(tensors, *settings)


def _flows(op: Op, what: str) -> None:
    if op not in (Sum, Average, Adasum):
        raise EngineError(
            f"{what} with op={op.name.title()} has no gradient: only Sum, Average and Adasum do; detach the tensor"
        )


def _backward(name: str | None) -> str | None:
    return None if name is None else f"{name}.backward"


def _own_rows(total: torch.Tensor, rows: Sequence[int], shape: torch.Size, process_set: ProcessSet) -> torch.Tensor:
    """What of a gathered tensor's gradient belongs to this rank's input, which had that shape."""
    rank = process_set.engine.rank
    start = sum(rows[:rank])
    return total[start : start + rows[rank]].reshape(shape)


def _factor(op: Op, prescale: float, postscale: float, process_set: ProcessSet) -> float:
    """By what a reduction multiplies each rank's values."""
    return prescale * postscale / (process_set.size() if op is Average else 1)


class Allreduce(torch.autograd.Function):
    """The gradient of a sum over ranks is the sum of the gradients; of an average, their average.

    Adasum is no linear function. Its gradient is defined as Adasum of the gradients: what the losses ask of the result
    is combined over ranks as the inputs were.
    """

    @staticmethod
    def forward(
        ctx: Context,
        tensor: torch.Tensor,
        op: Op,
        name: str | None,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        compression: Any,
    ) -> Any:
        ctx.settings = op, _backward(name), prescale, postscale, process_set, compression
        return collectives.allreduce(tensor, op, name, prescale, postscale, process_set, compression)

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> Any:
        _flows(ctx.settings[0], "allreduce")
        return collectives.allreduce(gradients[0], *ctx.settings), None, None, None, None, None, None


class GroupedAllreduce(torch.autograd.Function):
    """As `Allreduce`, for several tensors in one request each way."""

    @staticmethod
    def forward(
        ctx: Context,
        op: Op,
        name: str | None,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        compression: Any,
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.settings = op, _backward(name), prescale, postscale, process_set, compression
        return tuple(groups.grouped_allreduce(tensors, op, name, prescale, postscale, process_set, compression))

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> Any:
        _flows(ctx.settings[0], "grouped_allreduce")
        return None, None, None, None, None, None, *groups.grouped_allreduce(gradients, *ctx.settings)


class GroupedAllgather(torch.autograd.Function):
    """As `Allgather`, for several tensors in one request each way."""

    @staticmethod
    def forward(ctx: Context, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor) -> Any:
        handle = groups.grouped_allgather_async(tensors, name, process_set)
        results = handle.wait()
        ctx.rows, ctx.shapes = handle.rows, [tensor.shape for tensor in tensors]
        ctx.name, ctx.process_set = _backward(name), process_set
        return tuple(results)

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> Any:
        totals = groups.grouped_allreduce(gradients, Sum, ctx.name, process_set=ctx.process_set)
        mine = [_own_rows(*each, ctx.process_set) for each in zip(totals, ctx.rows, ctx.shapes, strict=True)]
        return None, None, *mine


class GroupedReducescatter(torch.autograd.Function):
    """As `Reducescatter`, for several tensors in one request each way."""

    @staticmethod
    def forward(
        ctx: Context,
        op: Op,
        name: str | None,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        compression: Any,
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.op, ctx.name, ctx.process_set = op, _backward(name), process_set
        ctx.factor = _factor(op, prescale, postscale, process_set)
        return tuple(groups.grouped_reducescatter(tensors, op, name, prescale, postscale, process_set, compression))

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> Any:
        _flows(ctx.op, "grouped_reducescatter")
        totals = groups.grouped_allgather(gradients, ctx.name, ctx.process_set)
        scaled = (total if ctx.factor == 1 else total * ctx.factor for total in totals)
        return None, None, None, None, None, None, *scaled


class Broadcast(torch.autograd.Function):
    """Every rank's output is the root's input: its gradient is the sum of all. The others' inputs do not matter."""

    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.root_rank, ctx.name, ctx.process_set = root_rank, _backward(name), process_set
        return collectives.broadcast(tensor, root_rank, name, process_set)

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> Any:
        total = collectives.allreduce(gradients[0], Sum, ctx.name, process_set=ctx.process_set)
        return total if runtime.rank() == ctx.root_rank else torch.zeros_like(total), None, None, None


class Allgather(torch.autograd.Function):
    """Every rank's output holds this rank's rows: their gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> Any:
        handle = collectives.allgather_async(tensor, name, process_set)
        result = handle.wait()
        ctx.rows, ctx.shape, ctx.name, ctx.process_set = handle.rows, tensor.shape, _backward(name), process_set
        return result

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> Any:
        total = collectives.allreduce(gradients[0], Sum, ctx.name, process_set=ctx.process_set)
        return _own_rows(total, ctx.rows, ctx.shape, ctx.process_set), None, None


class Alltoall(torch.autograd.Function):
    """The gradient travels back the way that the rows came."""

    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        handle = collectives.alltoall_async(tensor, splits, name, process_set)
        result = handle.wait()
        ctx.rows, ctx.shape, ctx.name, ctx.process_set = handle.rows, tensor.shape, _backward(name), process_set
        if splits is None:
            return result
        ctx.mark_non_differentiable(result[1])
        return result

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> Any:
        sent, _ = collectives.alltoall(gradients[0], ctx.rows, ctx.name, ctx.process_set)
        if len(sent) < ctx.shape[0]:  # Rows beyond the sum of the splits went nowhere.
            sent = torch.cat([sent, sent.new_zeros(ctx.shape[0] - len(sent), *ctx.shape[1:])])
        return sent.reshape(ctx.shape), None, None, None


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
        process_set: ProcessSet,
        compression: Any,
    ) -> Any:
        ctx.op, ctx.name, ctx.process_set = op, _backward(name), process_set
        ctx.factor = _factor(op, prescale, postscale, process_set)
        return collectives.reducescatter(tensor, op, name, prescale, postscale, process_set, compression)

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> Any:
        _flows(ctx.op, "reducescatter")
        total = collectives.allgather(gradients[0], ctx.name, ctx.process_set)
        return total if ctx.factor == 1 else total * ctx.factor, None, None, None, None, None, None
