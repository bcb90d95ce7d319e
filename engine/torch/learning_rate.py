"""Gradual warm-up of learning rates for larger batches."""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import LinearLR

from ..config.forms import whole_number
from ..frameworks.learning_rate import resolve_factor


def gradual_warmup(optimizer: torch.optim.Optimizer, steps: int, factor: float | None = None) -> LinearLR:
    """Make a scheduler that raises each learning rate, in `steps` equal steps, from a fraction to its present value.

    Goyal et al. (2017) begin with the learning rate of a single worker and reach the scaled one after 5 epochs. Call
    `step()` after every optimizer step. It is a scheduler of torch, and combines with others by `SequentialLR` or
    `ChainedScheduler`.

    The paper's momentum correction applies to a momentum that contains the learning rate. `torch.optim.SGD` needs none,
    since its velocity is a sum of gradients alone.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Optimizer with the scaled learning rates; wrapped or not.
    steps : int
        Number of optimizer steps until the learning rates are reached.
    factor : float, optional
        Divisor of the learning rate in the first step; the default is the world size.

    Returns
    -------
    torch.optim.lr_scheduler.LinearLR

    Raises
    ------
    ValueError
        `steps` or `factor` is less than 1.
    """
    steps = whole_number("steps", steps, 1)
    factor = resolve_factor(factor)
    if factor < 1:
        raise ValueError(
            f"factor is {factor}; expected 1 or more, since a warm-up begins at the learning rate divided by it"
        )
    return LinearLR(optimizer, start_factor=1 / factor, total_iters=steps)
