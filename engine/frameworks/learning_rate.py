"""Learning rates for larger batches: the scaling rules."""

from __future__ import annotations

import math
from collections.abc import Callable

from .. import place

_RULES: dict[str, Callable[[float], float]] = {"linear": lambda factor: factor, "sqrt": math.sqrt}


def scale_learning_rate(lr: float, factor: float | None = None, rule: str = "linear") -> float:
    """The learning rate for a batch that is `factor` times the one that `lr` was found with.

    Parameters
    ----------
    lr : float
        For the original batch.
    factor : float, optional
        How many times larger the batch of one step is, over all ranks: by default the world size, which is right when
        each rank has the original batch; times the number of accumulated passes, if there are any.
    rule : str
        `linear`: proportional to the batch, for SGD (Goyal et al. 2017, arXiv:1706.02677). `sqrt`: proportional to its
        square root, for Adam and its kin (Malladi et al. 2022, arXiv:2205.10287).

    Raises
    ------
    ValueError
        A factor that is not positive; another rule.
    """
    if rule not in _RULES:
        raise ValueError(f"rule is {rule!r}; expected one of {', '.join(map(repr, _RULES))}")
    return lr * _RULES[rule](positive(factor))


def positive(factor: float | None) -> float:
    """The factor, the world size by default."""
    if factor is None:
        return float(place.size())
    if not 0 < factor < float("inf"):
        raise ValueError(f"factor is {factor}; expected a positive number")
    return factor
