"""Training for `tests/elastic/test_leaks.py`, with all resources of a worker: `leak_program.py DIRECTORY WORLDS`.

It ends in world number WORLDS. In each world the ranks commit, and wait until the test has inspected them. Then the
world ends: by a failure that kills no rank, or by an action of the test.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import engine
import engine.torch as hvd
from engine.session import runtime
from engine.torch.elastic import ElasticSampler, TorchState, run

from ..waiting import linger, until_files

LENGTH, BATCH = 96, 4


@run
def train(state: Any, model: torch.nn.Module, optimizer: Any, loader: Any, place: Path, worlds: int) -> None:
    while True:
        for number, batch in enumerate(loader):
            optimizer.zero_grad()
            model(batch.float()[:, None]).square().mean().backward()
            optimizer.step()
            state.sampler.record_batch(number, BATCH)
            if number == 1:
                state.commit()
                look(state.world, place)
                if state.world == worlds:
                    return
                end(state.world, place)
        state.sampler.set_epoch(state.sampler.epoch + 1)


def look(world: int, place: Path) -> None:
    """Wait while the test inspects the processes, once all ranks are here."""
    engine.barrier()
    if engine.rank() == 0:
        (place / f"world.{world}").touch()
    until_files(place / f"go.{world}")


def end(world: int, place: Path) -> None:
    """End the world, or let the test kill rank 1."""
    if not (place / f"kill.{world}").exists():
        runtime.current_engine().abort("the test ends the world")
    elif engine.rank() == 1:
        (place / f"dies.{world}").write_text(str(os.getpid()))
        linger()
    engine.barrier()


def main() -> None:
    torch.set_num_threads(1)
    engine.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 300), torch.nn.ReLU(), torch.nn.Linear(300, 1))
    plain = torch.optim.Adam(model.parameters(), 1e-4)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), gradient_as_bucket_view=True)
    rows: Any = range(LENGTH)
    sampler = ElasticSampler(rows)
    loader: Any = DataLoader(rows, BATCH, sampler=sampler, num_workers=1, persistent_workers=True)
    state = TorchState(model, optimizer, sampler=sampler)
    train(state, model, optimizer, loader, Path(sys.argv[1]), int(sys.argv[2]))


if __name__ == "__main__":
    main()
