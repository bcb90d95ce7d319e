"""Trainings of one model under all settings that must not change a bit of the result."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import engine
import engine.torch

from ..waiting import be_late

STEPS = 3
BRANCHES = 4
# Knobs that rank 0 turns while the engine runs, by name.
KNOBS: dict[str, dict[str, Any]] = {
    "each tensor alone": {"fusion_threshold": 0},
    "a threshold in the middle of a pass": {"fusion_threshold": 20_000},
    "no cycle": {"cycle_time_ms": 0, "fusion_threshold": 64 << 20},
    "a long cycle": {"cycle_time_ms": 50},
    "small chunks": {"chunk_bytes": 4096, "cycle_time_ms": 1},
    "large chunks": {"chunk_bytes": 1 << 20},
    "streaming stores": {"stores": "streaming"},
    "cached stores": {"stores": "cached"},
}


class Delay(torch.autograd.Function):
    """Does nothing, but its backward may take a while."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.seconds:
            be_late(ctx.seconds)
        return gradients[0], None


class Branches(nn.Module):
    """Independent branches of different sizes, which backward takes in any order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 40 * (k + 1)), nn.Tanh(), nn.Linear(40 * (k + 1), 12)) for k in range(BRANCHES)
        )
        self.norm = engine.torch.SyncBatchNorm(12)

    def forward(self, x: torch.Tensor, order: list[int], delay: Callable[[], float]) -> torch.Tensor:
        """Run the branches; autograd takes them in the reverse of `order`."""
        x = self.norm(x)
        # The gradients of x itself are added in the order of arrival, which varies in one process, too.
        hidden = {k: self.branches[k][:2](x.detach()) for k in order}
        outputs = {k: self.branches[k][2](Delay.apply(hidden[k], delay())) for k in order}
        return torch.stack([outputs[k] for k in range(BRANCHES)]).sum(0) + x


def digest(views: bool, luck: random.Random | None, dtype: torch.dtype = torch.float32) -> str:
    """Train a new model, with random order and delays if `luck` is given; return a digest of the result."""
    model = Branches().to(dtype)
    optimizer = engine.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        model.named_parameters(),
        gradient_as_bucket_view=views,
    )
    for step in range(STEPS):
        order = list(range(BRANCHES))
        if luck is not None:
            luck.shuffle(order)
        generator = torch.Generator().manual_seed(100 * step + engine.rank())
        x = torch.randn(6, 12, generator=generator).to(dtype)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        output = model(x, order, lambda: 0.0 if luck is None else luck.choice([0, 0, 0.001, 0.004]))
        output.float().square().mean().backward()
        optimizer.step()
    engine.check_consistency(model.state_dict())
    found = hashlib.sha256()
    for each in model.state_dict().values():
        found.update(each.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def digests() -> dict[str, str]:
    """Return a digest for each setting and kind of training."""
    engine.init()
    torch.set_num_threads(1)
    found = {}
    for name, knobs in {"default": {}, **KNOBS}.items():
        if engine.rank() == 0 and knobs:
            engine.set_knobs(**knobs)
        for views in (False, True):
            luck = random.Random(f"{name} {views} {engine.rank()}")
            found[f"{name}, views: {views}"] = digest(views, luck)
    found["in order, at once"] = digest(False, None)
    for views in (False, True):
        found[f"bfloat16, views: {views}"] = digest(views, random.Random(engine.rank()), torch.bfloat16)
    return found


def order_of_summation_matters() -> bool:
    """Return whether gradients of such a training have other bits if summed in another order of ranks."""
    generators = [torch.Generator().manual_seed(rank) for rank in range(3)]
    parts = [torch.randn(1000, generator=generator) for generator in generators]
    return not torch.equal(functools.reduce(torch.add, parts), functools.reduce(torch.add, parts[::-1]))
