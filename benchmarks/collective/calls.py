"""What one submission costs its caller, and what an engine that has nothing to do costs the machine."""

from __future__ import annotations

import importlib
import time
from typing import Any

from benchmarks.common.worker import Worker

ELEMENTS = 256
"""Elements of each tensor: 1 KiB of float32."""


class Hook:
    """Seconds per call of the gradient hook, both ranks submitting the same tensors at the same time.

    Calls the hooks as autograd does, one for each parameter, and leaves autograd itself out of the measurement.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __call__(self, request: dict[str, Any]) -> list[float]:
        """Return the mean over the tensors, for each step. Only the calls are timed, not the reduction's end."""
        import torch

        engine = importlib.import_module("engine")
        binding = importlib.import_module("engine_ext.bindings.gradients")
        ranks, count = self._worker.ranks, int(request["tensors"])

        def unexpected(index: int, parameter: Any, gradient: Any) -> Any:
            raise RuntimeError(f"gradient {index} left the fast path")

        group = binding.GradientGroup(
            importlib.import_module("engine.runtime").engine(), int(engine.Sum), 1.0, 1.0, lambda: None, unexpected
        )
        parameters = [torch.nn.Parameter(torch.zeros(ELEMENTS)) for _ in range(count)]
        hooks = [group.add(parameter, f"hook.{i}", None) for i, parameter in enumerate(parameters)]
        gradients = [torch.zeros(ELEMENTS) for _ in parameters]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        pairs = list(zip(hooks, parameters, strict=True))
        total = ranks * (ranks + 1) // 2
        means = []
        for _ in range(request["warmup"] + request["steps"]):
            for gradient in gradients:
                gradient.fill_(self._worker.rank + 1)
            self._worker.meet()
            start = time.perf_counter()
            for hook, parameter in pairs:
                hook(parameter)
            means.append((time.perf_counter() - start) / count)
            group.finish()
            if any(parameter.grad is None or bool((parameter.grad != total).any()) for parameter in parameters):
                raise RuntimeError("a gradient is not the sum over the ranks")
        return means[request["warmup"] :]


class AsyncCall:
    """Seconds per public asynchronous call, both ranks calling at the same time."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __call__(self, request: dict[str, Any]) -> list[float]:
        """Return the mean over the tensors, for each step. Waiting for the results is not timed."""
        import torch

        engine = importlib.import_module("engine")
        count, total = int(request["tensors"]), self._worker.ranks * (self._worker.ranks + 1) // 2
        named = [(torch.zeros(ELEMENTS), f"call.{i}") for i in range(count)]
        submit, operation = engine.allreduce_async_, engine.Sum
        means = []
        for _ in range(request["warmup"] + request["steps"]):
            for tensor, _name in named:
                tensor.fill_(self._worker.rank + 1)
            handles = []
            self._worker.meet()
            start = time.perf_counter()
            for tensor, name in named:
                handles.append(submit(tensor, op=operation, name=name))
            means.append((time.perf_counter() - start) / count)
            for handle in handles:
                engine.synchronize(handle)
            if not all(bool((tensor == total).all()) for tensor, _ in named):
                raise RuntimeError("a tensor is not the sum over the ranks")
        return means[request["warmup"] :]


def idle(request: dict[str, Any]) -> float:
    """Return the cores that this process uses while its caller sleeps: CPU seconds of all its threads per second."""
    start, used = time.perf_counter(), time.process_time()
    time.sleep(request["seconds"])
    return (time.process_time() - used) / (time.perf_counter() - start)
