"""Reduction of Keras gradients on the torch backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..collectives.groups import grouped_allreduce_
from ..frameworks.agreement import columns_of_absent, order_suffix
from ..frameworks.options import ReductionOptions


@torch.compiler.disable
def reduce(
    gradients: Sequence[torch.Tensor | None],
    names: Sequence[str],
    options: ReductionOptions,
    number: int,
    groups: Sequence[Sequence[int]] | None,
) -> list[Any]:
    """Reduce gradients over ranks, in one group and in place if possible. Collective.

    The names are equal and in the same order on all ranks. `number` is that of the optimizer whose step this completes;
    -1: none. `groups` has no effect: all gradients exist already, and are sent in one group.
    """
    sent: list[torch.Tensor] = []
    known: set[int] = set()
    for gradient in gradients:
        if gradient is None:
            continue
        mine = to_dense(gradient).detach()
        # Autograd may give several parameters one tensor, or views that repeat elements.
        if mine.data_ptr() in known or not mine.is_contiguous():
            mine = mine.clone(memory_format=torch.contiguous_format)
        known.add(mine.data_ptr())
        sent.append(mine)
    if absent := [name for name, gradient in zip(names, gradients, strict=True) if gradient is None]:
        sent.append(torch.zeros(0, columns_of_absent(absent), device="cpu"))
    more = f" and {len(names) - 1} more{order_suffix(names)}" if len(names) > 1 else ""
    results = grouped_allreduce_(
        sent,
        options.op,
        names[0] + more,
        options.prescale,
        options.postscale,
        options.process_set,
        options.compression,
    )
    if number >= 0:
        options.process_set.engine.mark_step(number)
    reduced = iter(results)
    return [None if gradient is None else next(reduced) for gradient in gradients]


def to_dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient as a strided tensor."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def divide_gradient(gradient: torch.Tensor, by: int) -> torch.Tensor:
    """Return the gradient divided by a number."""
    return gradient / by


def read_value(variable: Any) -> Any:
    """Return the value of a variable as a NumPy array; bfloat16 as its bits in int16."""
    held = variable.value.detach()
    return held.view(torch.int16).numpy() if held.dtype is torch.bfloat16 else held.numpy()
