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


def call_single(function: Any, plain: Callable[..., Any], tensor: torch.Tensor, *settings: Any) -> Any:
    """Call a function that takes groups with a single tensor, which is no group, or else `plain`."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return function.apply(False, *settings, tensor)[0]
    return plain(tensor, *settings)


def call_all(function: Any, grouped: bool, tensors: Sequence[torch.Tensor], *settings: Any) -> list[torch.Tensor]:
    """Call `function` if a gradient has to flow to any of the tensors, else the engine's collective of its kind."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return list(function.apply(grouped, *settings, *tensors))
    return _run_collective(function.kind, grouped, tensors, *settings)


def _run_collective(kind: str, grouped: bool, tensors: Sequence[torch.Tensor], *settings: Any) -> list[torch.Tensor]:
    """Run a collective of a group of tensors, or of a single one."""
    if grouped:
        return list(getattr(groups, f"grouped_{kind}")(tensors, *settings))
    return [getattr(collectives, kind)(tensors[0], *settings)]


def _combine_gradients(
    gradients: Sequence[torch.Tensor], grouped: bool, mathematical: bool, name: str | None, process_set: ProcessSet
) -> list[torch.Tensor]:
    """Combine the gradients of tensors on which all ranks' outputs depend: their sums, or Horovod's averages."""
    # The engine reduces complex numbers as pairs of real ones.
    sent = [torch.view_as_real(each.resolve_conj()) if each.is_complex() else each for each in gradients]
    op = choose_backward_op(mathematical)
    totals = call_all(Allreduce, grouped, sent, op, name, 1.0, 1.0, process_set, None)
    return [
        torch.view_as_complex(total) if each.is_complex() else total
        for each, total in zip(gradients, totals, strict=True)
    ]


def _find_differentiable(gradients: Sequence[torch.Tensor]) -> list[int]:
    """Return the indices of gradients with a floating or complex dtype; those of integers are zeros, and not sent."""
    return [k for k, each in enumerate(gradients) if each.is_floating_point() or each.is_complex()]


class Allreduce(torch.autograd.Function):
    """Allreduce whose gradient is the same reduction of the ranks' gradients: a sum for Sum, an average for Average.

    Adasum is not linear. Its gradient is defined as the Adasum of the ranks' gradients of the result. Several tensors
    (`grouped`) are one request in each direction, here and below.
    """

    kind = "allreduce"

    @staticmethod
    def forward(
        ctx: Context,
        grouped: bool,
        op: Op,
        name: str | None,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        compression: Any,
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.grouped = grouped
        ctx.settings = op, backward_name(name), prescale, postscale, process_set, compression
        settings = op, name, prescale, postscale, process_set, compression
        return tuple(_run_collective("allreduce", grouped, tensors, *settings))

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> Any:
        expect_gradient(ctx.settings[0], "grouped_allreduce" if ctx.grouped else "allreduce")
        return *[None] * 7, *call_all(Allreduce, ctx.grouped, gradients, *ctx.settings)


class Allgather(torch.autograd.Function):
    """Allgather. The gradient of this rank's rows combines the gradients of all ranks' outputs for these rows."""

    kind = "allgather"

    @staticmethod
    def forward(ctx: Context, grouped: bool, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor) -> Any:
        ctx.grouped, ctx.name, ctx.process_set = grouped, backward_name(name), process_set
        ctx.shapes, ctx.mathematical = [tensor.shape for tensor in tensors], are_mathematical()
        if grouped:
            handle: Any = groups.grouped_allgather_async(tensors, name, process_set)
            results = tuple(handle.wait())
            ctx.rows = handle.rows
            return results
        handle = collectives.allgather_async(tensors[0], name, process_set)
        result = handle.wait()
        ctx.rows = [handle.rows]
        return (result,)

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> Any:
        members = _find_differentiable(gradients)
        sent = [gradients[k] for k in members]
        mine: list[torch.Tensor | None] = [None] * len(gradients)
        totals = _combine_gradients(sent, ctx.grouped, ctx.mathematical, ctx.name, ctx.process_set)
        for k, total in zip(members, totals, strict=True):
            mine[k] = total[own_rows(ctx.rows[k], ctx.process_set)].reshape(ctx.shapes[k])
        return None, None, None, *mine


class Reducescatter(torch.autograd.Function):
    """Reduce-scatter. The gradient of a row, on all ranks, comes from the rank that received the row."""

    kind = "reducescatter"

    @staticmethod
    def forward(
        ctx: Context,
        grouped: bool,
        op: Op,
        name: str | None,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        compression: Any,
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.grouped, ctx.op, ctx.name, ctx.process_set = grouped, op, backward_name(name), process_set
        ctx.mathematical = are_mathematical()
        ctx.factor = scatter_factor(op, prescale, postscale, ctx.mathematical, process_set)
        settings = op, name, prescale, postscale, process_set, compression
        return tuple(_run_collective("reducescatter", grouped, tensors, *settings))

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> Any:
        expect_gradient(ctx.op, "grouped_reducescatter" if ctx.grouped else "reducescatter")
        members = _find_differentiable(gradients)
        sent = [gradients[k] for k in members]
        scaled: list[torch.Tensor | None] = [None] * len(gradients)
        with mathematical_gradients(ctx.mathematical):
            totals = call_all(Allgather, ctx.grouped, sent, ctx.name, ctx.process_set)
        for k, total in zip(members, totals, strict=True):
            scaled[k] = total if ctx.factor == 1 else total * ctx.factor
        return *[None] * 7, *scaled


class Broadcast(torch.autograd.Function):
    """Broadcast. The gradient of the root's input combines those of all ranks' outputs; those of others are zero."""

    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.root_rank, ctx.name, ctx.process_set = root_rank, backward_name(name), process_set
        ctx.mathematical = are_mathematical()
        return collectives.broadcast(tensor, root_rank, name, process_set)

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> Any:
        [total] = _combine_gradients(gradients[:1], False, ctx.mathematical, ctx.name, ctx.process_set)
        if topology.rank() != ctx.root_rank:  # Zeros with a graph, so that second derivatives run on every rank, too.
            total = total.masked_fill(torch.ones((), dtype=torch.bool, device=total.device), 0)
        return total, None, None, None


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


CALLS: dict[str, Callable[..., Any]] = {
    "allreduce": partial(call_single, Allreduce, collectives.allreduce),
    "grouped_allreduce": partial(call_all, Allreduce, True),
    "broadcast": partial(call_differentiable, Broadcast, collectives.broadcast),
    "allgather": partial(call_single, Allgather, collectives.allgather),
    "grouped_allgather": partial(call_all, Allgather, True),
    "alltoall": partial(call_differentiable, Alltoall, collectives.alltoall),
    "reducescatter": partial(call_single, Reducescatter, collectives.reducescatter),
    "grouped_reducescatter": partial(call_all, Reducescatter, True),
}
"""Differentiable collectives, by the names of the functions of `engine.torch` that call them."""
