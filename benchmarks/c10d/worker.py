"""Rank of torch.distributed on one backend: times blocks of calls, each begun by all ranks together."""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.common.worker import GroupWorker, WrongResultError
from benchmarks.training.models import WORKLOADS


def reduce_and_wait(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)


def reduce_with_future(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor, async_op=True).get_future().wait()


def exchange_in_turn(tensor: torch.Tensor) -> None:
    """Send to the other rank and receive from it, or the reverse."""
    if dist.get_rank() == 0:
        dist.send(tensor, 1)
        dist.recv(tensor, 1)
    else:
        dist.recv(tensor, 0)
        dist.send(tensor, 0)


def exchange_at_once(tensor: torch.Tensor) -> None:
    """Send one half of the tensor to the other rank, and receive the other half from it."""
    other, half = 1 - dist.get_rank(), tensor.numel() // 2
    calls = [dist.P2POp(dist.isend, tensor[:half], other), dist.P2POp(dist.irecv, tensor[half:], other)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()


def reduce_without_torch(tensor: torch.Tensor) -> None:
    """Reduce by the engine's own call, which on gloo does not exist."""
    importlib.import_module("engine.torch").allreduce_(tensor, op=importlib.import_module("engine").Sum)


class ShardedTraining:
    """GPT whose parameters and gradients are divided among the ranks (FSDP2)."""

    def __init__(self) -> None:
        workload = WORKLOADS["gpt"]
        torch.manual_seed(0)
        model = workload.build_model()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        self._model = fully_shard(model, mesh=mesh)
        self._optimizer = workload.build_optimizer(model)
        self._batch = workload.draw_batch(torch.Generator().manual_seed(1000 + dist.get_rank()))
        self._loss = workload.compute_loss

    def step(self) -> None:
        """Take one training step."""
        self._optimizer.zero_grad()
        torch.autograd.backward(self._loss(self._model, self._batch))
        self._optimizer.step()


@lru_cache(maxsize=1)
def build_training() -> ShardedTraining:
    return ShardedTraining()


def train_sharded(tensor: torch.Tensor) -> None:
    build_training().step()


def form_group(tensor: torch.Tensor) -> None:
    FORMED.append(dist.new_group())


FORMED: list[Any] = []
"""Groups that are not destroyed yet: gloo fails to form one that a rank has destroyed already."""
CALLS: dict[str, Callable[[torch.Tensor], None]] = {
    "engine.allreduce_": reduce_without_torch,
    "allreduce": reduce_and_wait,
    "FSDP2 step, GPT": train_sharded,
    "allreduce with a future": reduce_with_future,
    "ping-pong": exchange_in_turn,
    "both directions": exchange_at_once,
    "new_group": form_group,
}


def check_result(case: str, tensor: torch.Tensor, rank: int, ranks: int) -> None:
    """Raise WrongResultError unless a call has made of ranks' numbers what it should."""
    wanted = {
        "engine.allreduce_": ranks * (ranks + 1) / 2,
        "allreduce": ranks * (ranks + 1) / 2,
        "allreduce with a future": ranks * (ranks + 1) / 2,
        "ping-pong": 1.0,
    }
    found = tensor[-1].item()
    if found != wanted.get(case, 2.0 - rank if case == "both directions" else rank + 1.0):
        raise WrongResultError(f"{case} has made {found} on rank {rank}")


class Rank:
    """Answers of one rank."""

    def __init__(self, worker: GroupWorker) -> None:
        self._worker = worker

    def time_block(self, request: dict[str, Any]) -> list[float]:
        """Return the seconds of each iteration; the first is checked."""
        worker, case = self._worker, request["case"]
        call = CALLS[case]
        tensor = torch.full(
            (max(request["bytes"] // 4, 1) * (2 if case == "both directions" else 1),), worker.rank + 1.0
        )
        call(tensor)
        self._destroy_groups()
        check_result(case, tensor, worker.rank, worker.ranks)
        tensor.zero_()
        seconds = []
        for _ in range(request["iterations"]):
            worker.meet()
            begun = time.perf_counter()
            call(tensor)
            seconds.append(time.perf_counter() - begun)
            self._destroy_groups()
        return seconds

    def _destroy_groups(self) -> None:
        if FORMED:
            self._worker.meet()
        while FORMED:
            dist.destroy_process_group(FORMED.pop())


def main() -> None:
    """Serve the controller."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    worker = GroupWorker(parser)
    try:
        torch.set_num_threads(1)
        place = f"file://{Path(worker.options.socket).parent / 'store'}"
        dist.init_process_group(worker.options.backend, place, rank=worker.rank, world_size=worker.ranks)
    except BaseException:
        worker.report_failure()
        raise
    worker.serve({"block": Rank(worker).time_block})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
