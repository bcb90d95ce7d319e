"""Models, samples and a training loop for jobs that are compared on two backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

WIDTH = 16
SAMPLES = 6  # of one rank in one step

Arrays = list[np.ndarray[Any, Any]]


class Perceptron(nn.Module):
    """Layers of which two have buckets of their own, and of which one may be left out."""

    def __init__(self, width: int = WIDTH, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.seldom = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, samples: torch.Tensor, seldom: bool = False) -> torch.Tensor:
        for layer in self.layers:
            samples = torch.tanh(layer(samples))
        samples = self.norm(samples)
        return self.seldom(samples) if seldom else samples


class Block(nn.Module):
    """Attention and feed-forward layers of a transformer, with names that a tensor-parallel plan can tell apart."""

    def __init__(self, width: int = WIDTH, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.output = nn.Linear(width, width, bias=False)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        normal = self.norm(samples)
        query, key, value = (
            layer(normal).unflatten(-1, (-1, WIDTH // self.heads)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        samples = samples + self.output(mixed.transpose(1, 2).flatten(2))
        return samples + self.narrow(torch.relu(self.wide(samples)))


class Transformer(nn.Module):
    """Blocks one after another."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            samples = block(samples)
        return self.last(samples)


def make_samples(rank: int, step: int, *shape: int) -> torch.Tensor:
    """Return samples that are the same in every job, and differ between ranks and steps."""
    source = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(*(shape or (SAMPLES, WIDTH)), generator=source)


def make_model(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a model that begins with the same parameters on every rank."""
    torch.manual_seed(7)
    return make()


def measure_loss(outputs: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    return (outputs - samples.roll(1, -1)).float().square().mean()


def train(model: Any, rank: int, steps: int = 4, optimizer: Any = None, shape: tuple[int, ...] = ()) -> None:
    """Train for some steps; the optimizer is SGD with a momentum if none is given."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        samples = make_samples(rank, step, *shape)
        measure_loss(model(samples), samples).backward()
        optimizer.step()
        optimizer.zero_grad()


def read_arrays(tensors: Iterable[torch.Tensor]) -> Arrays:
    """Return tensors as arrays, those that lie on several ranks whole. Collective where there are such."""
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in tensors]
    return [each.detach().float().clone().numpy() for each in whole]


def read_state(model: nn.Module) -> Arrays:
    """Return parameters and buffers."""
    return read_arrays([*model.parameters(), *model.buffers()])
