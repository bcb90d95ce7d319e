"""Elastic training on tiny tensors, whose ranks `tests/metrics/dashboards_seen.py` slows down, stops and kills.

Each worker writes the number of its process into the file `pid.SLOT`, and is late at each step while the file
`slow.SLOT` exists. The training ends when the file `end` exists.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

import engine
import engine.torch as hvd
from engine.torch.elastic import TorchState, run

from ..waiting import be_late

COMPUTING = 0.03  # seconds of a step, asleep: eight ranks share the machine's processors
LATE = 0.06  # seconds by which a slow rank is late
SAVED_EVERY = 20  # steps


@run
def train(
    state: TorchState, model: torch.nn.Module, optimizer: torch.optim.Optimizer, part: engine.ProcessSet, slot: str
) -> None:
    """Train until the file `end` exists."""
    slow, end = Path(f"slow.{slot}"), Path("end")
    while True:
        optimizer.zero_grad()
        loss = model(torch.randn(8, 128)).square().mean()
        be_late(COMPUTING + (LATE if slow.exists() else 0.0))
        loss.backward()
        optimizer.step()
        state.step += 1
        if part.included():
            hvd.allreduce(loss.detach(), name="loss", process_set=part)
        if state.step % SAVED_EVERY == 0:
            hvd.allgather(loss.detach().reshape(1), name="losses")
            if hvd.broadcast(torch.tensor([float(end.exists())]), 0, name="end").item():
                return
            state.commit()


def main() -> None:
    part = engine.ProcessSet([0, 1, 2, 3])
    engine.init(process_sets=[part])
    slot = str(engine.rank())
    Path(f"pid.{slot}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    train(TorchState(model, optimizer, step=0), model, optimizer, part, slot)


if __name__ == "__main__":
    main()
