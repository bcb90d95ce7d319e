"""Digits with torch's DistributedDataParallel: `torchrun --nproc-per-node 2 examples/torch_ddp.py`.

The engine is named in one place. `--backend gloo` trains the same model without it.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from common import batch, build_reader, digits
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="engine", help="of torch.distributed (default: engine)")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=60, help="samples in a step, over all ranks")
options = parser.parse_args()

dist.init_process_group(options.backend)
rank, size = dist.get_rank(), dist.get_world_size()

pictures, labels = (torch.from_numpy(each) for each in digits())
torch.manual_seed(0)
model = build_reader()
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

began = time.perf_counter()
for step in range(options.steps):
    chosen = torch.from_numpy(batch(step, options.batch)[rank::size])
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(pictures[chosen]), labels[chosen].long())
    loss.backward()
    optimizer.step()
    if step % 50 == 49 or step + 1 == options.steps:
        total = loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            pace = (step + 1) * options.batch / (time.perf_counter() - began)
            print(f"step {step + 1}: loss {total.item() / size:.6f}, {pace:.0f} samples/s", flush=True)

if rank == 0:
    with torch.no_grad():
        right = (model.module(pictures[1500:]).argmax(1) == labels[1500:]).float().mean()
    print(f"{right:.1%} of 297 new digits are read correctly by {size} ranks on {dist.get_backend()}")
dist.destroy_process_group()
