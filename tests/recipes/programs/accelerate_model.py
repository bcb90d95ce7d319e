"""Accelerate with a small model, whose group exists before the `Accelerator`: accumulated and clipped gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator
from compared import run_program, save_start
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train() -> nn.Module:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == dist.get_world_size()
    model: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.BatchNorm1d(32), nn.Linear(32, 1))
    save_start(model)
    samples = torch.randn(80, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(samples, samples.sin().sum(1, True)), 4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    for _ in range(3):
        for chosen, right in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(chosen), right))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    assert len(accelerator.gather_for_metrics(torch.ones(3))) == 3 * dist.get_world_size()
    return model.module


if __name__ == "__main__":
    run_program(train)
