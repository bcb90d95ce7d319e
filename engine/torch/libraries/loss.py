"""Losses that are means over different numbers of items per rank, such as tokens without padding."""

from __future__ import annotations

import torch

from ...collectives.reduce_ops import Sum
from ...session import topology
from ..ops import allreduce


def global_mean(total: torch.Tensor, count: torch.Tensor | int) -> torch.Tensor:
    """Make a loss whose average over the ranks is the mean over the items of all ranks. Collective.

    The mean of the ranks' own means differs from it if ranks have different numbers of items. The gradients of this
    loss, averaged by `DistributedOptimizer`, are those of the mean over all items.

    Parameters
    ----------
    total : torch.Tensor
        Sum of the loss over this rank's items.
    count : torch.Tensor or int
        Number of this rank's items. May be 0.

    Returns
    -------
    torch.Tensor
        `total * size() / C`, where C is the sum of `count` over the ranks; 0 if no rank has an item.
    """
    counts = torch.as_tensor(count, dtype=torch.float64, device="cpu").detach().reshape(())
    over_all = float(allreduce(counts, op=Sum, name=None))
    return total * (topology.size() / max(over_all, 1.0))
