"""Differentiable collectives, which `engine.torch` calls when a tensor requires a gradient.

`engine.frameworks.backward` defines their gradients. Every rank must run backward through the same collectives in the
same order. Backward passes consist of the same functions, so gradients of gradients flow, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..collectives import collectives, groups
from ..collectives.process_sets import ProcessSet
from ..collectives.reduce_ops import Op
from ..frameworks.backward import (
    are_mathematical,
    backward_name,
    choose_backward_op,
    expect_gradient,
    mathematical_gradients,
    own_rows,
    scatter_factor,
)
from ..session import topology

Context = Any


def call_differentiable(
    function: type[torch.autograd.Function], plain: Callable[..., Any], tensor: torch.Tensor, *arguments: Any
) -> Any:
    """Call `function` if a gradient has to flow to `tensor`, else `plain`, which has the same result."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return function.apply(tensor, *arguments)  # type: ignore[no-untyped-call]
    return plain(tensor, *arguments)


def call_grouped(
    function: type[torch.autograd.Function],
    plain: Callable[..., list[Any]],
    tensors: Sequence[torch.Tensor],
    *settings: Any,
) -> list[torch.Tensor]:
    """Call `function` if a gradient has to flow to any of the tensors, else `plain`, which has the same results."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return list(function.apply(*settings, *tensors))  # type: ignore[no-untyped-call]
    return plain(tensors, *settings)


def _own_rows(total: torch.Tensor, rows: Sequence[int], shape: torch.Size, process_set: ProcessSet) -> torch.Tensor:
    """Return the part of a gathered tensor's gradient that belongs to this rank's input of that shape."""
    return total[own_rows(rows, process_set)].reshape(shape)


def _combine_gradients(
    gradient: torch.Tensor, mathematical: bool, name: str | None, process_set: ProcessSet
) -> torch.Tensor:
    """Combine the gradients of a tensor on which all ranks' outputs depend: their sum, or Horovod's average."""
    op = choose_backward_op(mathematical)
    total = call_differentiable(
        Allreduce, collectives.allreduce, _view_as_real(gradient), op, name, 1.0, 1.0, process_set, None
    )
    return torch.view_as_complex(total) if gradient.is_complex() else total


def _view_as_real(gradient: torch.Tensor) -> torch.Tensor:
    """Return a complex gradient as pairs of real numbers, which the engine can reduce; any other unchanged."""
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient


def _find_differentiable(gradients: Sequence[torch.Tensor]) -> list[int]:
    """Return the indices of gradients with a floating or complex dtype; those of integers are zeros, and not sent."""
    return [k for k, each in enumerate(gradients) if each.is_floating_point() or each.is_complex()]


class Allreduce(torch.autograd.Function):
    """Allreduce whose gradient is the same reduction of the ranks' gradients: a sum for Sum, an average for Average.

    Adasum is not linear. Its gradient is defined as the Adasum of the ranks' gradients of the result.
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
        ctx.settings = op, backward_name(name), prescale, postscale, process_set, compression
        return collectives.allreduce(tensor, op, name, prescale, postscale, process_set, compression)

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> Any:
        expect_gradient(ctx.settings[0], "allreduce")
        reduced = call_differentiable(Allreduce, collectives.allreduce, gradients[0], *ctx.settings)
        return reduced, None, None, None, None, None, None


class GroupedAllreduce(torch.autograd.Function):
    """Allreduce of several tensors, in one request in each direction."""

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
        ctx.settings = op, backward_name(name), prescale, postscale, process_set, compression
        return tuple(groups.grouped_allreduce(tensors, op, name, prescale, postscale, process_set, compression))

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> Any:
        expect_gradient(ctx.settings[0], "grouped_allreduce")
        reduced = call_grouped(GroupedAllreduce, groups.grouped_allreduce, gradients, *ctx.settings)
        return None, None, None, None, None, None, *reduced


class GroupedAllgather(torch.autograd.Function):
    """Allgather of several tensors, in one request in each direction."""

    @staticmethod
    def forward(ctx: Context, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor) -> Any:
        handle = groups.grouped_allgather_async(tensors, name, process_set)
        results = handle.wait()
        ctx.rows, ctx.shapes = handle.rows, [tensor.shape for tensor in tensors]
        ctx.name, ctx.process_set, ctx.mathematical = backward_name(name), process_set, are_mathematical()
        return tuple(results)

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> Any:
        members, op = _find_differentiable(gradients), choose_backward_op(ctx.mathematical)
        sent = [_view_as_real(gradients[k]) for k in members]
        settings = op, ctx.name, 1.0, 1.0, ctx.process_set, None
        mine: list[torch.Tensor | None] = [None] * len(gradients)
        for k, total in zip(
            members, call_grouped(GroupedAllreduce, groups.grouped_allreduce, sent, *settings), strict=True
        ):
            total = torch.view_as_complex(total) if gradients[k].is_complex() else total
            mine[k] = _own_rows(total, ctx.rows[k], ctx.shapes[k], ctx.process_set)
        return None, None, *mine


class GroupedReducescatter(torch.autograd.Function):
    """Reduce-scatter of several tensors, in one request in each direction."""

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
        ctx.op, ctx.name, ctx.process_set, ctx.mathematical = op, backward_name(name), process_set, are_mathematical()
        ctx.factor = scatter_factor(op, prescale, postscale, ctx.mathematical, process_set)
        return tuple(groups.grouped_reducescatter(tensors, op, name, prescale, postscale, process_set, compression))

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> Any:
        expect_gradient(ctx.op, "grouped_reducescatter")
        members = _find_differentiable(gradients)
        with mathematical_gradients(ctx.mathematical):
            totals = call_grouped(
                GroupedAllgather,
                groups.grouped_allgather,
                [gradients[k] for k in members],
                ctx.name,
                ctx.process_set,
            )
        scaled: list[torch.Tensor | None] = [None] * len(gradients)
        for k, total in zip(members, totals, strict=True):
            scaled[k] = total if ctx.factor == 1 else total * ctx.factor
        return None, None, None, None, None, None, *scaled


class Broadcast(torch.autograd.Function):
    """Broadcast. The gradient of the root's input combines those of all ranks' outputs; those of others are zero."""

    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.root_rank, ctx.name, ctx.process_set = root_rank, backward_name(name), process_set
        ctx.mathematical = are_mathematical()
        return collectives.broadcast(tensor, root_rank, name, process_set)

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> Any:
        total = _combine_gradients(gradients[0], ctx.mathematical, ctx.name, ctx.process_set)
        if topology.rank() != ctx.root_rank:  # Zeros with a graph, so that second derivatives run on every rank, too.
            total = total.masked_fill(torch.ones((), dtype=torch.bool, device=total.device), 0)
        return total, None, None, None


class Allgather(torch.autograd.Function):
    """Allgather. The gradient of this rank's rows combines the gradients of all ranks' outputs for these rows."""

    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> Any:
        handle = collectives.allgather_async(tensor, name, process_set)
        result = handle.wait()
        ctx.rows, ctx.shape, ctx.name, ctx.process_set = handle.rows, tensor.shape, backward_name(name), process_set
        ctx.mathematical = are_mathematical()
        return result

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> Any:
        total = _combine_gradients(gradients[0], ctx.mathematical, ctx.name, ctx.process_set)
        return _own_rows(total, ctx.rows, ctx.shape, ctx.process_set), None, None


class Alltoall(torch.autograd.Function):
    """All-to-all, whose gradient is sent back to the ranks from which the rows came."""

    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        handle = collectives.alltoall_async(tensor, splits, name, process_set)
        result = handle.wait()
        ctx.rows, ctx.shape, ctx.name, ctx.process_set = handle.rows, tensor.shape, backward_name(name), process_set
        if splits is None:
            return result
        ctx.mark_non_differentiable(result[1])
        return result

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> Any:
        sent, _ = call_differentiable(Alltoall, collectives.alltoall, gradients[0], ctx.rows, ctx.name, ctx.process_set)
        if len(sent) < ctx.shape[0]:  # Rows beyond the sum of the splits went nowhere.
            sent = torch.cat([sent, sent.new_zeros(ctx.shape[0] - len(sent), *ctx.shape[1:])])
        return sent.reshape(ctx.shape), None, None, None


class Reducescatter(torch.autograd.Function):
    """Reduce-scatter. The gradient of a row, on all ranks, comes from the rank that received the row."""

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
        ctx.op, ctx.name, ctx.process_set, ctx.mathematical = op, backward_name(name), process_set, are_mathematical()
        ctx.factor = scatter_factor(op, prescale, postscale, ctx.mathematical, process_set)
        return collectives.reducescatter(tensor, op, name, prescale, postscale, process_set, compression)

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> Any:
        expect_gradient(ctx.op, "reducescatter")
        with mathematical_gradients(ctx.mathematical):
            total = call_differentiable(Allgather, collectives.allgather, gradients[0], ctx.name, ctx.process_set)
        return total if ctx.factor == 1 else total * ctx.factor, None, None, None, None, None, None


CALLS: dict[str, Callable[..., Any]] = {
    "allreduce": partial(call_differentiable, Allreduce, collectives.allreduce),
    "grouped_allreduce": partial(call_grouped, GroupedAllreduce, groups.grouped_allreduce),
    "broadcast": partial(call_differentiable, Broadcast, collectives.broadcast),
    "allgather": partial(call_differentiable, Allgather, collectives.allgather),
    "grouped_allgather": partial(call_grouped, GroupedAllgather, groups.grouped_allgather),
    "alltoall": partial(call_differentiable, Alltoall, collectives.alltoall),
    "reducescatter": partial(call_differentiable, Reducescatter, collectives.reducescatter),
    "grouped_reducescatter": partial(call_grouped, GroupedReducescatter, groups.grouped_reducescatter),
}
"""Differentiable collectives, by the names of the functions of `engine.torch` that call them."""
