"""A training that runs until it is told to end, and whose ranks can be slowed down from outside."""

from __future__ import annotations

from pathlib import Path

import torch

import engine.torch as hvd

from ..waiting import be_late

COMPUTING = 0.02  # seconds a step, asleep: four ranks share the machine's processors


def train() -> int:
    """Train until the file `end` exists; rank R sleeps longer while `slow.R` exists. Return the number of steps."""
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(12)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    slow, end = Path(f"slow.{hvd.rank()}"), Path("end")
    steps = 0
    while True:
        optimizer.zero_grad()
        loss = model(torch.randn(16, 64)).square().mean()
        be_late(COMPUTING + (0.1 if slow.exists() else 0.0))
        loss.backward()
        optimizer.step()
        steps += 1
        if steps % 20 == 0:
            hvd.allgather(loss.detach().reshape(1), name="losses")
            if hvd.broadcast(torch.tensor([float(end.exists())]), 0, name="end").item():
                hvd.barrier()
                return steps
