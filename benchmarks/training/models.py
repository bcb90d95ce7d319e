"""Models that stress communication in different ways, in plain PyTorch.

ResNet-50 (He et al. 2015, arXiv:1512.03385) has 161 tensors, 102 MB and much computation. A GPT (Radford et al. 2019)
has few, large tensors. A chain of 2000 tensors of 1 KiB shows only the cost of each tensor. A stand-in for a job whose
gradients come from an accelerator sleeps in its backward pass, so the processors are free.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]
MOMENTUM = 0.9


class Bottleneck(nn.Module):
    """Convolutions of 1x1, 3x3 and 1x1 with a shortcut; the 3x3 one has the stride."""

    EXPANSION = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.EXPANSION
        self.reduce = _build_convolution(inputs, width, 1, 1)
        self.spatial = _build_convolution(width, width, 3, stride)
        self.expand = _build_convolution(width, outputs, 1, 1)
        same = stride == 1 and inputs == outputs
        self.shortcut: nn.Module = nn.Identity() if same else _build_convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, inputs, h, w] to [n, outputs, h / stride, w / stride]."""
        y = functional.relu(self.reduce(x), inplace=True)
        y = functional.relu(self.spatial(y), inplace=True)
        return functional.relu(self.expand(y) + self.shortcut(x), inplace=True)


class ResNet50(nn.Module):
    """ResNet with 3, 4, 6 and 3 bottleneck blocks and a classifier of 1000 classes."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [_build_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        channels = 64
        for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for block in range(blocks):
                layers.append(Bottleneck(channels, width, stride if block == 0 else 1))
                channels = width * Bottleneck.EXPANSION
        self.features = nn.Sequential(*layers)
        self.classify = nn.Linear(channels, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [n, 3, h, w] to scores [n, 1000]."""
        scores: Tensor = self.classify(self.features(x).mean((2, 3)))
        return scores


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each after a layer norm and with a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.before_perceptron = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, tokens, width] to the same shape."""
        n, tokens, width = x.shape
        joint = self.query_key_value(self.before_attention(x)).view(n, tokens, 3, self.heads, width // self.heads)
        query, key, value = joint.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(n, tokens, width))
        added: Tensor = x + self.narrow(functional.gelu(self.widen(self.before_perceptron(x))))
        return added


class GPT(nn.Module):
    """GPT with six blocks of width 512 and a vocabulary of 8192, tied to the output: 23 M parameters, 93 MB."""

    VOCABULARY, TOKENS, WIDTH, HEADS, BLOCKS = 8192, 128, 512, 8, 6

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.VOCABULARY, self.WIDTH)
        self.positions = nn.Embedding(self.TOKENS, self.WIDTH)
        self.blocks = nn.Sequential(*(Block(self.WIDTH, self.HEADS) for _ in range(self.BLOCKS)))
        self.norm = nn.LayerNorm(self.WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Map token numbers [n, tokens] to scores [n, tokens, vocabulary]."""
        hidden = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return functional.linear(self.norm(self.blocks(hidden)), self.tokens.weight)


class Chain(nn.Module):
    """Chain of 1000 operations `x = x * scale + shift`, with a scale and a shift of 1 KiB each."""

    LENGTH, WIDTH = 1000, 256

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(self.WIDTH)) for _ in range(self.LENGTH))
        self.shifts = nn.ParameterList(nn.Parameter(torch.zeros(self.WIDTH)) for _ in range(self.LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        """Map [width] to [width]."""
        for scale, shift in zip(self.scales, self.shifts, strict=True):
            x = torch.addcmul(shift, x, scale)
        return x


class Paced(torch.autograd.Function):
    """Identity with a parameter whose gradient takes some time, in which the processor is free."""

    SECONDS = 1e-3

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor) -> Tensor:
        ctx.shape = parameter.shape
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(Paced.SECONDS)
        return gradient, gradient.mean().expand(ctx.shape).contiguous()


class DeviceModel(nn.Module):
    """Model of 16 tensors of 4 MiB, whose gradients come one by one, a millisecond apart."""

    LENGTH, WIDTH = 16, 1 << 20

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(self.WIDTH)) for _ in range(self.LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        """Map [n] to [n]."""
        for weight in self.weights:
            x = Paced.apply(x, weight)
        return x


class Elsewhere(torch.optim.Optimizer):
    """Optimizer without a step, which the accelerator would take."""

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


def _build_convolution(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs))


class Workload(ABC):
    """Model with its data and its loss."""

    name: str
    title: str
    rate: float
    """Learning rate, small enough that hundreds of steps on random data neither diverge nor end in denormals."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Return the model, initialized from torch's seed."""

    @abstractmethod
    def draw_batch(self, generator: torch.Generator) -> Batch:
        """Return random inputs and targets."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of one process."""
        return torch.optim.SGD(model.parameters(), lr=self.rate, momentum=MOMENTUM)

    def compute_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the scalar loss."""
        scores: Tensor = model(batch[0])
        return functional.cross_entropy(scores.flatten(0, -2), batch[1].flatten())


class ResNetWorkload(Workload):
    """ResNet-50 with a batch of 2 images of 128x128."""

    name, title, rate = "resnet50", "ResNet-50, batch 2 of 128x128", 1e-3

    def build_model(self) -> nn.Module:
        return ResNet50()

    def draw_batch(self, generator: torch.Generator) -> Batch:
        images = torch.randn(2, 3, 128, 128, generator=generator)
        return images, torch.randint(1000, (2,), generator=generator)


class GPTWorkload(Workload):
    """GPT with a batch of one text of 32 tokens."""

    name, title, rate = "gpt", "GPT of 93 MB, batch 1 of 32 tokens", 1e-3

    def build_model(self) -> nn.Module:
        return GPT()

    def draw_batch(self, generator: torch.Generator) -> Batch:
        text = torch.randint(GPT.VOCABULARY, (1, 33), generator=generator)
        return text[:, :-1], text[:, 1:]


class ChainWorkload(Workload):
    """Chain of 2000 tensors of 1 KiB."""

    name, title, rate = "tiny", "2000 tensors of 1 KiB", 1e-5

    def build_model(self) -> nn.Module:
        return Chain()

    def draw_batch(self, generator: torch.Generator) -> Batch:
        return torch.randn(Chain.WIDTH, generator=generator), torch.randn(Chain.WIDTH, generator=generator)

    def compute_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])


class DeviceWorkload(Workload):
    """Stand-in for an accelerator: the backward pass sleeps, and the optimizer takes no step."""

    name, title, rate = "device", "16 tensors of 4 MiB, 1 ms of sleep each (stand-in for an accelerator)", 1e-5

    def build_model(self) -> nn.Module:
        return DeviceModel()

    def draw_batch(self, generator: torch.Generator) -> Batch:
        x = torch.randn(8, generator=generator).requires_grad_()
        return x, torch.randn(8, generator=generator)

    def compute_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Elsewhere(model.parameters(), {})


WORKLOADS: dict[str, Workload] = {
    w.name: w for w in (ResNetWorkload(), GPTWorkload(), ChainWorkload(), DeviceWorkload())
}
