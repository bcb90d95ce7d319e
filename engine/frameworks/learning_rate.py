"""Scaling rules for the learning rates of larger batches."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..session import topology

_RULES: dict[str, Callable[[float], float]] = {"linear": lambda factor: factor, "sqrt": math.sqrt}


def scale_learning_rate(lr: float, factor: float | None = None, rule: str = "linear") -> float:
    """Return the learning rate for a batch that is `factor` times the original one.

    Parameters
    ----------
    lr : float
        Learning rate for the original batch.
    factor : float, optional
        Ratio of the batch of one step, over all ranks, to the original batch. The default is the world size, which is
        right if each rank has the original batch. Multiply it by the number of accumulated passes, if any.
    rule : str
        `linear`: proportional to the batch, for SGD (Goyal et al. 2017, arXiv:1706.02677). `sqrt`: proportional to its
        square root, for Adam and similar optimizers (Malladi et al. 2022, arXiv:2205.10287).

    Raises
    ------
    ValueError
        The factor is not positive, or the rule is unknown.
    """
    if rule not in _RULES:
        raise ValueError(f"rule is {rule!r}; expected one of {', '.join(map(repr, _RULES))}")
    return lr * _RULES[rule](resolve_factor(factor))


def resolve_factor(factor: float | None) -> float:
    """Return a checked factor; the default is the world size."""
    if factor is None:
        return float(topology.size())
    if not 0 < factor < float("inf"):
        raise ValueError(f"factor is {factor}; expected a positive number")
    return factor
