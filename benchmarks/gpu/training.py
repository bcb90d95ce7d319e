"""Workloads of the parts `steps` and `overlap`: models of `benchmarks/training`, with batches for a GPU."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from benchmarks.training.models import GPT, Batch, ChainWorkload, GPTWorkload, ResNetWorkload, Workload
from benchmarks.training.worker import TrainingVariant

BATCHES = 4


class ResNetOnGpu(ResNetWorkload):
    """ResNet-50 with a batch of 64 images of 224x224."""

    title = "ResNet-50, batch 64 of 224x224"

    def draw_batch(self, generator: torch.Generator) -> Batch:
        images = torch.randn(64, 3, 224, 224, generator=generator)
        return images, torch.randint(1000, (64,), generator=generator)


class GPTOnGpu(GPTWorkload):
    """GPT with a batch of 32 texts of 128 tokens."""

    title = "GPT of 93 MB, batch 32 of 128 tokens"

    def draw_batch(self, generator: torch.Generator) -> Batch:
        text = torch.randint(GPT.VOCABULARY, (32, GPT.TOKENS + 1), generator=generator)
        return text[:, :-1], text[:, 1:]


WORKLOADS: dict[str, Workload] = {w.name: w for w in (ResNetOnGpu(), GPTOnGpu(), ChainWorkload())}


class WorkloadBench:
    """Variants of a workload on one device, each with a model of its own."""

    def __init__(self, workload: Workload, names: Sequence[str], device: str) -> None:
        generator = torch.Generator().manual_seed(1)
        batches = [workload.draw_batch(generator) for _ in range(BATCHES)]
        on_device = [(inputs.to(device), targets.to(device)) for inputs, targets in batches]
        self.device = device  # "cuda:0"; "cpu" in tests
        self.variants = {name: TrainingVariant(name, workload, on_device, device) for name in names}

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)

    def time_block(self, name: str, steps: int) -> float:
        """Take steps of a variant and return the seconds of one; the device is idle before and after."""
        step = self.variants[name].step
        self.synchronize()
        begun = time.perf_counter()
        for _ in range(steps):
            step()
        self.synchronize()
        return (time.perf_counter() - begun) / steps

    def size(self) -> dict[str, int]:
        """Return the number of parameters of a model, and their bytes."""
        parameters = list(next(iter(self.variants.values())).plain.parameters())
        return {"tensors": len(parameters), "bytes": sum(p.numel() * p.element_size() for p in parameters)}

    def compute_difference(self, name: str, other: str) -> float:
        """Return the largest difference between two variants' parameters, relative to the largest of each tensor."""
        pairs = zip(*(self.variants[each].plain.parameters() for each in (name, other)), strict=True)
        with torch.no_grad():
            return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-12)) for a, b in pairs)


def join(where: Path, device: str) -> Any:
    """Start a world of one rank, for the engine and `torch.distributed`; return the module `engine`."""
    backend = "gloo"
    if device != "cpu":
        torch.cuda.set_device(device)
        backend = "nccl"
    meeting = f"file://{where / 'meeting'}"
    torch.distributed.init_process_group(backend, init_method=meeting, rank=0, world_size=1)
    engine = importlib.import_module("engine")
    engine.init()
    return engine
