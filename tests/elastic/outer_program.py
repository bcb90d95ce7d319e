"""Training with `OuterOptimizer` for `tests/elastic/test_outer.py`: `outer_program.py DIRECTORY STEPS [within]`.

Each worker writes the number of its process, and a line for each world. It trains until the file `enough` exists, at
least STEPS steps, and writes the loss of the shared parameters at the end. `within`: gradients are averaged within the
host, by a wrapping that each world makes anew.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import engine
import engine.torch as hvd

from ..waiting import let_pass

EVERY, FRAGMENTS, DELAY = 6, 2, 2
COMMITS = 5  # steps between commits: some have a synchronisation in flight
PAUSE = 0.002  # seconds that a step computes


def make_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and outputs of a linear model."""
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    return inputs, inputs @ torch.arange(1.0, 9.0, dtype=torch.float64)[:, None] / 8 + 0.5


def main() -> None:
    directory, steps = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(int(os.environ["ENGINE_WORKER"]))  # a newcomer's own values must not matter
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 1)).double()
    inner = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    optimizer = hvd.OuterOptimizer(inner, model.named_parameters(), every=EVERY, fragments=FRAGMENTS, delay=DELAY)
    state: Any = hvd.elastic.TorchState(model, optimizer, step=0)
    worker = os.environ["ENGINE_WORKER"]

    @hvd.elastic.run
    def train(state: Any) -> None:
        if sys.argv[3:] != ["within"]:
            train_in_world(state)
            return
        hvd.DistributedOptimizer(inner, model.named_parameters(), process_set=hvd.host_process_set())
        try:
            train_in_world(state)
        finally:
            inner.unwrap()  # type: ignore[attr-defined]

    def train_in_world(state: Any) -> None:
        engine.check_consistency(optimizer.shared_parameters())
        with (directory / f"worlds.{worker}").open("a") as file:
            file.write(f"{os.getpid()} {state.world} {engine.rank()} {engine.size()} {state.step}\n")
        while True:
            inputs, outputs = make_batch(state.step * 16 + engine.rank())
            optimizer.zero_grad()
            (model(inputs) - outputs).square().mean().backward()
            optimizer.step()
            state.step += 1
            assert optimizer.steps == state.step, (optimizer.steps, state.step)
            let_pass(PAUSE)
            if state.step % COMMITS == 0:
                state.commit()
                (directory / f"step.{worker}").write_text(str(state.step))
                engine.check_consistency(optimizer.shared_parameters())
                enough = np.array([float((directory / "enough").exists() and state.step >= steps)])
                if engine.allreduce(enough, op=engine.Min, name="enough")[0]:
                    break
        optimizer.synchronize_all()
        engine.check_consistency(dict(model.named_parameters()))

    train(state)
    inputs, outputs = make_batch(10**6)
    loss = (model(inputs) - outputs).square().mean().item()
    (directory / f"result.{engine.rank()}").write_text(f"{loss} {state.step}")


if __name__ == "__main__":
    main()
