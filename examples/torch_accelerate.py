"""Digits with Hugging Face Accelerate: `torchrun --nproc-per-node 2 examples/torch_accelerate.py`.

The engine is named in one line, before the `Accelerator`. `--backend gloo` trains the same model without it.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from common import TRAINING, build_reader, digits, need_library
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="engine", help="of torch.distributed (default: engine)")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--batch", type=int, default=60, help="samples in a step, over all ranks")
options = parser.parse_args()

need_library("accelerate", "pip install accelerate")
from accelerate import Accelerator  # noqa: E402

dist.init_process_group(options.backend)
accelerator = Accelerator(cpu=True)
rank, size = accelerator.process_index, accelerator.num_processes

pictures, labels = (torch.from_numpy(each) for each in digits())
labels = labels.long()
training = TensorDataset(pictures[:TRAINING], labels[:TRAINING])
torch.manual_seed(0)
model = build_reader()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
order = torch.Generator().manual_seed(0)  # Accelerate gives that of rank 0 to all ranks.
loader = DataLoader(training, options.batch // size, shuffle=True, drop_last=True, generator=order)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

began, samples = time.perf_counter(), 0
for epoch in range(options.epochs):
    for chosen, right in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(chosen), right)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        samples += len(chosen) * size
    total = accelerator.reduce(loss.detach(), "mean").item()
    pace = samples / (time.perf_counter() - began)
    accelerator.print(f"epoch {epoch + 1}: loss {total:.6f}, {pace:.0f} samples/s", flush=True)

with torch.no_grad():
    plain = accelerator.unwrap_model(model)
    correct = (plain(pictures[TRAINING:]).argmax(1) == labels[TRAINING:]).float().mean()
accelerator.print(f"{correct:.1%} of 297 new digits are read correctly by {size} ranks on {dist.get_backend()}")
dist.destroy_process_group()
