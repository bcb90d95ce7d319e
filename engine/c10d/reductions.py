"""Torch's reductions in terms of the engine's: operation, factor, and what the engine cannot reduce itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..collectives.reduce_ops import Average, Max, Min, Op, Product, Sum

_Kind: Any = dist.ReduceOp.RedOpType
_NATIVE = {_Kind.SUM: Sum, _Kind.AVG: Average, _Kind.MIN: Min, _Kind.MAX: Max, _Kind.PRODUCT: Product}
_BITWISE: dict[Any, Callable[..., Any]] = {
    _Kind.BAND: torch.bitwise_and,
    _Kind.BOR: torch.bitwise_or,
    _Kind.BXOR: torch.bitwise_xor,
}


def read_reduction(given: Any) -> tuple[Op, float]:
    """Return the operation and the prescale factor of a `ReduceOp`, or of a member of its enumeration.

    Raises ValueError if the engine has no such reduction.
    """
    kind = given if isinstance(given, _Kind) else given.op
    native = _NATIVE.get(kind)
    if native is not None:
        return native, 1.0
    if kind == _Kind.PREMUL_SUM:
        factor = given.factor if hasattr(given, "factor") else given.__getstate__()[1]
        if isinstance(factor, torch.Tensor):
            factor = factor.item()
        return Sum, float(factor)
    raise ValueError(f"engine: torch's reduction {kind} is not supported here")


def find_bitwise(given: Any) -> Callable[..., Any] | None:
    """Return torch's function for a bitwise reduction; None for other reductions."""
    return _BITWISE.get(given if isinstance(given, _Kind) else given.op)


def reduce_bitwise(function: Callable[..., Any], parts: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    """Combine the parts of all ranks bit by bit into `target`."""
    total = parts[0].clone()
    for part in parts[1:]:
        function(total, part, out=total)
    target.copy_(total.view(target.shape))


def as_reals(tensor: torch.Tensor, op: Op) -> torch.Tensor:
    """Return a complex tensor as pairs of floats, which only sums and averages treat alike; others unchanged."""
    if not tensor.is_complex():
        return tensor
    if op not in (Sum, Average):
        raise ValueError(f"engine: complex tensors are summed or averaged, and not reduced by {op!r}")
    return torch.view_as_real(tensor.resolve_conj())
