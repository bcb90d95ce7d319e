"""Training for `tests/elastic/test_slow_jobs.py`; files in the directory `HERE` make ranks late.

`pause`: rank 0 saves once for a while. `loader`: all wait, each in turn first. `slow`: worker 1 is late at each step.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

import engine
import engine.torch as hvd
from engine.torch.elastic import TorchState, run

from ..waiting import be_late

HERE = Path(os.environ["HERE"])
WORKER = int(os.environ["ENGINE_WORKER"])
LATE = 0.05  # seconds by which the slow worker is late at each step


def wait_for_others(state: TorchState) -> None:
    """Be late as the files demand."""
    pause = HERE / "pause"
    if engine.rank() == 0 and pause.exists():
        pause.unlink()
        be_late(1.5)
    if (HERE / "loader").exists():
        be_late(LATE)  # all ranks
    if WORKER == 1 and (HERE / "slow").exists():
        be_late(LATE)


@run
def train(state: TorchState, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Step until the test ends it; print a line for each step with its worker."""
    while True:
        wait_for_others(state)
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        state.step += 1
        with (HERE / f"steps.{WORKER}").open("a") as file:
            file.write(f"{state.step} {engine.size()}\n")
        enough = engine.allreduce(np.array([float((HERE / "stop").exists())]), op=engine.Max, name="enough")
        if enough[0]:
            return
        be_late(0.01)
        state.commit()


def main() -> None:
    engine.init()
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1e-3), model.named_parameters())
    train(TorchState(model, optimizer, step=0), model, optimizer)


if __name__ == "__main__":
    main()
