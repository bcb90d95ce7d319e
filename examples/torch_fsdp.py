"""A transformer whose parameters are divided among ranks: `torchrun --nproc-per-node 2 examples/torch_fsdp.py`.

Each rank keeps its part of every layer, gathers a layer when it is needed, and gets its part of the layer's gradient
(FSDP2, `fully_shard`). The engine is named in one place; `--backend gloo` trains the same model without it.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="engine", help="of torch.distributed (default: engine)")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--layers", type=int, default=4)
options = parser.parse_args()
LENGTH, BATCH = 32, 8

dist.init_process_group(options.backend)
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))


class Regressor(torch.nn.Module):
    """Transformer that gives one number for each place of a sequence."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = torch.nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).sum(2)


torch.manual_seed(0)
model = Regressor(options.width, options.layers)
whole = sum(each.numel() for each in model.parameters())
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
kept = sum(each.to_local().numel() for each in model.parameters())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

torch.manual_seed(rank)
inputs = torch.randn(BATCH, LENGTH, options.width)
targets = inputs.sin().mean(2)
if rank == 0:
    print(f"{kept:,} of {whole:,} parameters on each of {size} ranks", flush=True)
began = time.perf_counter()
for step in range(options.steps):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    if step % 5 == 4 or step + 1 == options.steps:
        total = loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            pace = (step + 1) * BATCH * size / (time.perf_counter() - began)
            print(f"step {step + 1}: loss {total.item() / size:.6f}, {pace:.1f} samples/s", flush=True)
dist.destroy_process_group()
