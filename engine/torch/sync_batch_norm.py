"""Batch normalisation with the joint statistics of all ranks' batches.

Each rank computes the mean m and the sum of squared deviations M2 of its n values, in two passes over them. These are
gathered and merged in float64, in the order of ranks, by the formula of Chan, Golub and LeVeque (1983) for partial
samples:

    mean = sum(n m) / sum(n)        M2 = sum(M2 + n (m - mean)^2)

It has no cancellation of large numbers, unlike E[x^2] - E[x]^2. Every rank merges the same numbers in the same order,
so running statistics stay bitwise equal.

Backward needs two more sums over all ranks, of dy and of dy (x - mean): one collective in each direction.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from ..collectives import collectives
from ..collectives.process_sets import ProcessSet, global_process_set
from ..collectives.reduce_ops import Sum
from ..frameworks.agreement import ObjectNumber


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation over the batches of all ranks. In training, forward and backward are collective.

    All ranks of the process set must run it equally often, in the same order; batch sizes may differ, and be 0. In
    evaluation it behaves like `torch.nn.BatchNorm1d` to `3d`, whose `state_dict` it has, and does not communicate.

    Parameters
    ----------
    num_features : int
        Number of channels C, of an input of shape [N, C, ...] with two dimensions or more.
    eps : float
        Number that is added to the variance.
    momentum : float, optional
        Weight of a batch in the running statistics; None averages over all batches.
    affine : bool
        Whether to learn a scale and a shift per channel. Their gradients are those of this rank's batch;
        DistributedOptimizer reduces them like all others.
    track_running_stats : bool
        Whether to keep running statistics for evaluation; without them, evaluation normalises each batch by its own.
    device, dtype : optional
        Device and dtype of parameters and running statistics. float16 and bfloat16 inputs are normalised in float32.
    process_set : ProcessSet, optional
        Process set whose ranks' batches are normalised together. On a rank outside of it the layer behaves like
        `torch.nn.BatchNorm*d`, and does not communicate. A copy of the layer has the same set; an unpickled one has a
        set of the same ranks that was not added yet.

    Raises
    ------
    ValueError
        Forward got fewer than two values per channel on all ranks together, so there is no variance; on all ranks.
    MismatchError
        Forward got inputs with different numbers of channels.
    NotInitializedError
        Forward was called in training, but the process set was not added, or has been removed.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.process_set = process_set
        self.label = ""  # where it is in its model, if known

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_set: ProcessSet = global_process_set) -> nn.Module:
        """Replace every `torch.nn.BatchNorm*d` of a model by a `SyncBatchNorm` with the same parameters and buffers.

        A layer that is a `SyncBatchNorm` already stays unchanged, including its process set.

        Parameters
        ----------
        module : torch.nn.Module
            Model that is changed in place; optimizers of its parameters stay valid.
        process_set : ProcessSet, optional
            Process set of the new layers.

        Returns
        -------
        torch.nn.Module
            `module`, or its replacement if it is a batch normalisation itself.

        Raises
        ------
        ValueError
            A layer is lazy, and does not know its number of channels before its first batch.
        """
        converted: dict[nn.Module, SyncBatchNorm] = {}
        for path, each in list(module.named_modules(remove_duplicate=False)):
            if not isinstance(each, _BatchNorm) or isinstance(each, cls):
                continue
            if each not in converted:
                converted[each] = cls._in_place_of(each, path, process_set)
            if each is module:
                return converted[each]
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, converted[each])
        return module

    @classmethod
    def _in_place_of(cls, plain: _BatchNorm, path: str, process_set: ProcessSet) -> SyncBatchNorm:
        if isinstance(plain, nn.modules.lazy.LazyModuleMixin):
            raise ValueError(
                f"{path or 'the module'} is a {type(plain).__name__} that has seen no batch; give it one before "
                "convert_sync_batchnorm"
            )
        own = cls(
            plain.num_features,
            plain.eps,
            plain.momentum,
            plain.affine,
            plain.track_running_stats,
            process_set=process_set,
        )
        own.weight, own.bias = plain.weight, plain.bias
        own.running_mean, own.running_var = plain.running_mean, plain.running_var
        own.num_batches_tracked = plain.num_batches_tracked
        own.training = plain.training
        own.label = path
        return own

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm expects an input of shape [N, {self.num_features}, ...], not {list(input.shape)}"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise a batch of shape [N, C, ...], over all ranks while training; shape, dtype and format stay."""
        if not self.training or not self.process_set.included() or self.process_set.size() == 1:
            return super().forward(input)
        return self._normalize_over_ranks(input)

    @_disable_dynamo  # Like `torch.compiler.disable`, but without importing the compiler at once.
    def _normalize_over_ranks(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        name = self._name()
        with torch.no_grad():
            mean, square, count = _joint_statistics(input, name, self.process_set)
            self._update_statistics(mean, square / max(count - 1, 1))
        # The input is multiplied in its own precision, or in float32 if that is lower.
        kind = _choose_dtype(input.dtype)
        mean, rstd = mean.to(kind), (square / count + self.eps).rsqrt().to(kind)
        normalised: torch.Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, mean, rstd, count, f"{name}.backward", self.process_set
        )
        return normalised

    def _update_statistics(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Add a batch to the running statistics, with the unbiased variance like torch's layers."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        weight = 1.0 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, batch in ((self.running_mean, mean), (self.running_var, variance)):
            running.copy_((1 - weight) * running.double() + weight * batch)

    def _name(self) -> str:
        """Return the name of the layer's collectives.

        Layers of a process set are numbered in the order of their first use, which is the same on all its ranks.
        """
        if "_number" not in self.__dict__:
            self._number = ObjectNumber("sync_batch_norm")
        return f"sync_batch_norm.{self._number.claim_in(self.process_set)}" + (f".{self.label}" if self.label else "")

    def __getstate__(self) -> dict[str, Any]:
        # A copy is a layer of its own.
        return {name: value for name, value in self.__dict__.items() if name != "_number"}


class _Normalise(torch.autograd.Function):
    """Function (x - mean) * rstd * weight + bias, where mean and rstd depend on x of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        rstd: torch.Tensor,
        count: int,
        name: str,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.count, ctx.name, ctx.process_set = count, name, process_set
        y = x - _per_channel(mean, x)
        if weight is None or bias is None:
            y *= _per_channel(rstd, x)
        else:
            scale = rstd * weight.to(rstd.dtype)
            torch.addcmul(_per_channel(bias.to(y.dtype), x), y, _per_channel(scale, x), out=y)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight, mean, rstd = ctx.saved_tensors
        centred = x - _per_channel(mean, x)
        dy = gradients[0].to(centred.dtype)
        dims = _all_but_channels(x)
        mine = torch.stack([dy.sum(dims), (dy * centred).sum(dims)])
        dx = None
        if ctx.needs_input_grad[0]:
            # The derivatives by the mean and by the variance, on which the outputs of all ranks depend.
            total = collectives.allreduce(mine.double(), Sum, ctx.name, process_set=ctx.process_set)
            by_mean, by_square = (total / ctx.count).to(mine.dtype)
            scale = rstd if weight is None else rstd * weight.to(rstd.dtype)
            dx = centred.mul_(_per_channel(-(rstd**2) * by_square * scale, x)).sub_(_per_channel(by_mean * scale, x))
            dx = dx.addcmul_(dy, _per_channel(scale, x)).to(x.dtype)
        if weight is None:
            return dx, *[None] * 7
        return dx, (mine[1] * rstd).to(weight.dtype), mine[0].to(weight.dtype), *[None] * 5


def _joint_statistics(x: torch.Tensor, name: str, process_set: ProcessSet) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return means and sums of squared deviations over all ranks, [C] float64, and the number of values per channel."""
    channels = x.shape[1]
    row = torch.zeros(1, 1 + 2 * channels, dtype=torch.float64, device=x.device)
    if x.numel():
        dims, mine = _all_but_channels(x), x.numel() // channels
        mean = x.mean(dims, dtype=_choose_dtype(x.dtype))
        centred = x - _per_channel(mean, x)
        # Rounding error of the mean, which is not negligible if the mean is large.
        rest = centred.sum(dims).double()
        row[0, 0] = mine
        row[0, 1 : 1 + channels] = mean + rest / mine
        row[0, 1 + channels :] = centred.square_().sum(dims) - rest.square() / mine
    rows = collectives.allgather(row, name, process_set)
    counts, means, squares = rows[:, :1], rows[:, 1 : 1 + channels], rows[:, 1 + channels :]
    count = int(counts.sum())
    if count < 2:
        raise ValueError(f"{name} needs two values per channel or more over all ranks in training; there are {count}")
    mean = _in_rank_order(counts * means) / count
    return mean, _in_rank_order(squares + counts * (means - mean).square()), count


def _in_rank_order(rows: torch.Tensor) -> torch.Tensor:
    """Add up rows one after the other, since `torch.sum` guarantees no order."""
    return functools.reduce(torch.add, rows.unbind())


def _choose_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _per_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Reshape [C] to [1, C, 1, ...], to broadcast with x."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
