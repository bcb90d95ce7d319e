"""Gradients that travel as float16 or bfloat16, and the expected results, computed by torch."""

from __future__ import annotations

import torch
from torch import nn

import engine

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
Tensors = list[torch.Tensor]


def halved(ranks: Tensors, half: torch.dtype, average: bool = True) -> torch.Tensor:
    """Compute a compressed allreduce with torch: round, add in float32 in rank order, divide, round, widen."""
    parts = [each.float().to(half).float() for each in ranks]
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return (total / len(parts) if average else total).to(half).to(ranks[0].dtype)


def value(rank: int, number: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a rank's gradient, which every rank can compute, with values of many sizes, so that rounding shows."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    return (torch.randn(shape, generator=generator) * 10 ** torch.randn(shape, generator=generator)).to(dtype)


SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "weight": ((37, 11), torch.float32),
    "bias": ((5,), torch.float32),
    "scalar": ((), torch.float64),
    "large": ((300, 401), torch.float64),
    "half": ((9, 3), torch.bfloat16),
    "image": ((4, 3, 5, 5), torch.float32),
}


def parameters() -> dict[str, nn.Parameter]:
    made = {name: nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, (shape, dtype) in SHAPES.items()}
    made["image"].data = made["image"].data.to(memory_format=torch.channels_last)
    return made


def backward(made: dict[str, nn.Parameter], rank: int, number: int = 0, only: set[str] | None = None) -> None:
    """Run a backward pass that gives each parameter `value` as its gradient."""
    chosen = [(k, name, each) for k, (name, each) in enumerate(made.items()) if only is None or name in only]
    terms = [(each * value(rank, 10 * number + k, *each.shape, dtype=each.dtype)).sum() for k, _, each in chosen]
    torch.stack([term.double() for term in terms]).sum().backward()


def of_ranks(made: dict[str, nn.Parameter], name: str, number: int = 0) -> Tensors:
    k = list(made).index(name)
    each = made[name]
    return [value(rank, 10 * number + k, *each.shape, dtype=each.dtype) for rank in range(engine.size())]
