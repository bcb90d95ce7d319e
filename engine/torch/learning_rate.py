"""Learning rates for larger batches: the scaling rules, and a gradual warm-up."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LinearLR

from .. import runtime

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
    return lr * _RULES[rule](_positive(factor))


def gradual_warmup(optimizer: torch.optim.Optimizer, steps: int, factor: float | None = None) -> LinearLR:
    """A scheduler that raises each learning rate, in `steps` equal steps, from a fraction of it to what it is now.

    Goyal et al. (2017) begin with the learning rate of a single worker and reach the scaled one after 5 epochs. Call
    `step()` after every optimizer step. It is a scheduler of torch, and combines with others by `SequentialLR` or
    `ChainedScheduler`.

    The paper's momentum correction is for a momentum that contains the learning rate. In `torch.optim.SGD` it does not:
    the velocity is a sum of gradients alone, and there is nothing to correct.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        With the scaled learning rates; wrapped or not.
    steps : int
        Optimizer steps until the learning rates are reached.
    factor : float, optional
        The first step has the learning rate divided by this: the world size by default.

    Returns
    -------
    torch.optim.lr_scheduler.LinearLR

    Raises
    ------
    ValueError
        Fewer steps than 1, or a factor below 1.
    """
    if steps < 1:
        raise ValueError(f"a warm-up takes 1 step or more, not {steps}")
    factor = _positive(factor)
    if factor < 1:
        raise ValueError(f"factor is {factor}; a warm-up divides by 1 or more, to begin below where it ends")
    return LinearLR(optimizer, start_factor=1 / factor, total_iters=steps)


def _positive(factor: float | None) -> float:
    """The factor, the world size by default."""
    if factor is None:
        return float(runtime.size())
    if not 0 < factor < float("inf"):
        raise ValueError(f"factor is {factor}; expected a positive number")
    return factor
