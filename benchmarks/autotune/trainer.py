"""Rank of a job that trains with the knobs it is given. Started by `benchmarks.autotune.jobs`."""

from __future__ import annotations

import argparse
import importlib
import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.worker import GroupWorker
from benchmarks.training.models import WORKLOADS

TOGETHER = 20  # steps between two checks whether the search is over


class TunedTrainer:
    """Handlers of the requests to a rank."""

    def __init__(self, worker: GroupWorker) -> None:
        self._worker = worker
        self._engine = importlib.import_module("engine")
        self._engine.init()
        torch.manual_seed(0)
        self._workload = WORKLOADS[worker.options.workload]
        self._model = self._workload.build_model()
        self._optimizer: Any = importlib.import_module("engine.torch").DistributedOptimizer(
            self._workload.build_optimizer(self._model), named_parameters=self._model.named_parameters()
        )
        self._batch = self._workload.draw_batch(torch.Generator().manual_seed(1000 + worker.rank))

    def get_knobs(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the knobs in force."""
        return dict(self._engine.knobs())

    def time_block(self, request: dict[str, Any]) -> list[float]:
        """Set the knobs, take untimed and timed steps, and return the seconds of each timed one."""
        self._worker.meet()
        if self._worker.rank == 0:
            self._engine.set_knobs(**request["knobs"])
        for _ in range(request["warmup"]):
            self._step()
        marks = [time.perf_counter()]
        for _ in range(request["steps"]):
            self._step()
            marks.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(marks)]

    def train_until_tuned(self, request: dict[str, Any]) -> dict[str, Any]:
        """Train until the tuner has written its result to the log, and return the number of steps."""
        log, steps, over = Path(request["log"]), 0, np.zeros(1, np.float32)
        while not over[0] and steps < request["most"]:
            for _ in range(TOGETHER):
                self._step()
            steps += TOGETHER
            over[0] = self._worker.rank == 0 and log.exists() and '"final"' in log.read_text(encoding="utf-8")
            over = self._engine.allreduce(over, name="over", op=self._engine.Max)
        return {"steps": steps, "over": bool(over[0])}

    def _step(self) -> None:
        self._optimizer.zero_grad()
        torch.autograd.backward(self._workload.compute_loss(self._model, self._batch))
        self._optimizer.step()


def main() -> None:
    """Join the other ranks and answer requests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=sorted(WORKLOADS), required=True)
    worker = GroupWorker(parser)
    try:
        torch.set_num_threads(1)
        trainer = TunedTrainer(worker)
    except BaseException:
        worker.report_failure()
        raise
    worker.serve({"knobs": trainer.get_knobs, "block": trainer.time_block, "search": trainer.train_until_tuned})
    importlib.import_module("engine").shutdown()


if __name__ == "__main__":
    main()
