"""Rank that trains one model in several ways, a block of steps at a time. Started by `benchmarks.training.run`.

All variants are in the same processes, each with its own model and optimizer. So the drift of the machine and the
effects of a process's memory layout are the same for all.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import time
import zlib
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common.worker import GroupWorker, instrument_block
from benchmarks.training.models import WORKLOADS, Workload

BATCHES = 8


class TrainingVariant:
    """Model with its way to combine gradients and its position in the data; all on one device of torch."""

    def __init__(
        self, name: str, workload: Workload, batches: list[tuple[Tensor, Tensor]], device: str = "cpu"
    ) -> None:
        torch.manual_seed(0)
        self._workload = workload
        self._batches = batches
        self._steps = 0
        self.plain = workload.build_model().to(device)
        self._model: nn.Module = self.plain
        self._optimizer: Any = workload.build_optimizer(self.plain)
        self._zero: dict[str, bool] = {}
        if name.startswith("ddp"):
            group = torch.distributed.new_group(backend="engine") if name == "ddp_engine" else None
            self._model = DistributedDataParallel(
                self.plain, process_group=group, gradient_as_bucket_view=name == "ddp_view"
            )
            if name == "ddp_silent":
                self._model.register_comm_hook(None, noop_hook)
        elif name.startswith("engine"):
            binding = importlib.import_module("engine.torch")
            self._optimizer = binding.DistributedOptimizer(
                self._optimizer,
                named_parameters=[(f"{name}.{key}", value) for key, value in self.plain.named_parameters()],
                gradient_as_bucket_view=name.startswith("engine_view"),
                **({"compression": importlib.import_module("engine").Compression.fp16} if "fp16" in name else {}),
            )
            if name == "engine_view_kept":
                self._zero = {"set_to_none": False}

    def step(self) -> None:
        """Take one training step."""
        self.backward(self.forward())
        self.update()

    def forward(self) -> Tensor:
        """Return the loss of the next batch, after clearing the gradients of the last one."""
        batch = self._batches[self._steps % len(self._batches)]
        self._steps += 1
        self._optimizer.zero_grad(**self._zero)
        return self._workload.compute_loss(self._model, batch)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients, and combine them."""
        torch.autograd.backward(loss)

    def update(self) -> None:
        """Take the optimizer's step."""
        self._optimizer.step()


class TrainingRank:
    """Handlers of the requests to a rank."""

    def __init__(self, worker: GroupWorker) -> None:
        self._worker = worker
        self._variants: dict[str, TrainingVariant] = {}
        self._workload = WORKLOADS[worker.options.workload]
        generator = torch.Generator().manual_seed(1000 + worker.rank)
        self._batches = [self._workload.draw_batch(generator) for _ in range(BATCHES)]

    def build_variant(self, request: dict[str, Any]) -> dict[str, int]:
        """Create one variant, and return the number and the bytes of its parameters."""
        variant = TrainingVariant(request["variant"], self._workload, self._batches)
        self._variants[request["variant"]] = variant
        parameters = list(variant.plain.parameters())
        return {"tensors": len(parameters), "bytes": sum(p.numel() * p.element_size() for p in parameters)}

    def time_block(self, request: dict[str, Any]) -> dict[str, Any]:
        """Meet the other ranks once, and take untimed and timed steps.

        Returns `seconds` of each timed step, and `processor`: seconds of all threads of this rank per step, including
        the writing at a timeline's end.
        """
        step, clock = self._variants[request["variant"]].step, time.perf_counter
        with instrument_block("timeline" if request["variant"] == "engine_timeline" else request.get("watched", "")):
            self._worker.meet()
            for _ in range(request["warmup"]):
                step()
            used = time.process_time()
            marks = [clock()]
            for _ in range(request["steps"]):
                step()
                marks.append(clock())
        processor = (time.process_time() - used) / request["steps"]
        return {"seconds": [after - before for before, after in itertools.pairwise(marks)], "processor": processor}

    def compute_digest(self, request: dict[str, Any]) -> int:
        """Return a checksum of all parameters of a variant."""
        value = 0
        for parameter in self._variants[request["variant"]].plain.parameters():
            value = zlib.crc32(parameter.detach().contiguous().numpy().tobytes(), value)
        return value

    def compute_difference(self, request: dict[str, Any]) -> float:
        """Return the largest relative difference between the parameters of two variants."""
        with torch.no_grad():
            pairs = zip(*(self._variants[name].plain.parameters() for name in request["variants"]), strict=True)
            return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-12)) for a, b in pairs)


def main() -> None:
    """Join the other ranks and answer requests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=sorted(WORKLOADS), required=True)
    parser.add_argument("--engine", action="store_true")
    worker = GroupWorker(parser)
    try:
        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{worker.options.socket}.meeting", rank=worker.rank, world_size=worker.ranks
        )
        if worker.options.engine:
            importlib.import_module("engine").init()
        rank = TrainingRank(worker)
    except BaseException:
        worker.report_failure()
        raise
    worker.serve(
        {
            "build": rank.build_variant,
            "block": rank.time_block,
            "digest": rank.compute_digest,
            "difference": rank.compute_difference,
        }
    )
    if worker.options.engine:
        importlib.import_module("engine").shutdown()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
