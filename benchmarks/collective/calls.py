"""Cost of one submission for its caller, and cost of an idle engine for the machine."""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.common.worker import GroupWorker, instrument_block

ELEMENTS = 256
"""Number of elements of each tensor: 1 KiB of float32."""


class Hooks:
    """Submission of 2000 small gradients in a step, the same ones on every rank at the same time.

    Calls the hooks as autograd does, one for each parameter, but without autograd itself.
    """

    def __init__(self, worker: GroupWorker) -> None:
        self._worker = worker
        self._count = 0

    def submit(self, request: dict[str, Any]) -> list[float]:
        """Return the seconds per call of the hook, for each step. The end of the reduction is not timed."""
        steps = self._time_hooks(request["tensors"], request["warmup"] + request["steps"])
        return [seconds / self._count for seconds in steps][request["warmup"] :]

    def time_steps(self, request: dict[str, Any]) -> dict[str, Any]:
        """Take untimed and timed steps to the reduction's end, the timed ones `watched` as requested.

        Nothing else runs between timed steps: the gradients stay zero, and the ranks meet only once. Returns `seconds`
        of each timed step, and `processor`: seconds of all threads of this rank per step, including the writing at the
        timeline's end.
        """
        for _ in self._time_hooks(request["tensors"], request["warmup"]):
            pass
        for gradient in self._gradients:
            gradient.zero_()
        pairs, finish, clock = self._pairs, self._group.finish, time.perf_counter
        with instrument_block(request.get("watched", "")):
            self._worker.meet()
            used = time.process_time()
            marks = [clock()]
            for _ in range(request["steps"]):
                for hook, parameter in pairs:
                    hook(parameter)
                finish()
                marks.append(clock())
        processor = (time.process_time() - used) / request["steps"]
        self._check_gradients(0)
        return {"seconds": [after - before for before, after in itertools.pairwise(marks)], "processor": processor}

    def _prepare(self, count: int) -> None:
        import torch

        engine = importlib.import_module("engine")
        binding = importlib.import_module("engine_ext.bindings.gradients")

        native = importlib.import_module("engine.session.runtime").current_engine()
        try:
            self._group = binding.GradientGroup(native, _FastPath(), int(engine.Sum))
        except TypeError:  # An older build measured with `--against` may take functions instead.
            fast = _FastPath()
            functions = fast.begin_pass, fast.replace, fast.shares_memory, fast.separate
            self._group = binding.GradientGroup(native, int(engine.Sum), 1.0, 1.0, *functions)
        parameters = [torch.nn.Parameter(torch.zeros(ELEMENTS)) for _ in range(count)]
        hooks = [self._group.add(parameter, f"hook.{i}", None) for i, parameter in enumerate(parameters)]
        self._gradients = [torch.zeros(ELEMENTS) for _ in parameters]
        for parameter, gradient in zip(parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self._pairs = list(zip(hooks, parameters, strict=True))
        self._count = count

    def _time_hooks(self, count: int, steps: int) -> Iterator[float]:
        """Yield the seconds of all hooks of a step. Sums are checked after each."""
        if self._count != count:
            self._prepare(count)
        total = self._worker.ranks * (self._worker.ranks + 1) // 2
        pairs, finish, clock = self._pairs, self._group.finish, time.perf_counter
        for _ in range(steps):
            for gradient in self._gradients:
                gradient.fill_(self._worker.rank + 1)
            self._worker.meet()
            start = clock()
            for hook, parameter in pairs:
                hook(parameter)
            submitted = clock() - start
            finish()
            self._check_gradients(total)
            yield submitted

    def _check_gradients(self, value: float) -> None:
        if any(parameter.grad is None or bool((parameter.grad != value).any()) for _, parameter in self._pairs):
            raise RuntimeError("a gradient is not the sum over the ranks")


class _FastPath:
    """Binding for gradients that need no treatment. See `Binding` in engine_ext/bindings/gradients.pyi."""

    def memory_of(self, parameter: Any) -> Any:
        return parameter.detach()

    def begin_pass(self) -> None:
        """Do nothing: the end of the reduction is called explicitly."""

    def replace(self, *_: Any) -> Any:
        raise RuntimeError("a gradient left the fast path")

    shares_memory = separate = replace


class AsyncCall:
    """Measurement of the seconds per call of `submit`: `allreduce_async_` or `allreduce_async`.

    If `alone`, the ranks submit one after another, while the others wait in the barrier; else all at once.
    """

    def __init__(self, worker: GroupWorker, submit: str, alone: bool = False) -> None:
        self._worker = worker
        self._submit = submit
        self._alone = alone

    def __call__(self, request: dict[str, Any]) -> list[float]:
        """Return the mean over the tensors, for each step. Waiting for the results is not timed."""
        import torch

        engine = importlib.import_module("engine")
        rank, ranks = self._worker.rank, self._worker.ranks
        count, total = int(request["tensors"]), ranks * (ranks + 1) // 2
        named = [(torch.zeros(ELEMENTS), f"call.{i}") for i in range(count)]
        submit, operation = getattr(engine, self._submit), engine.Sum
        means = []
        for _ in range(request["warmup"] + request["steps"]):
            for tensor, _name in named:
                tensor.fill_(rank + 1)
            handles = []
            self._worker.meet()
            for turn in range(ranks if self._alone else 1):
                if turn == rank or not self._alone:
                    start = time.perf_counter()
                    for tensor, name in named:
                        handles.append(submit(tensor, op=operation, name=name))
                    means.append((time.perf_counter() - start) / count)
                if self._alone:
                    self._worker.meet()
            if not all(bool((engine.synchronize(handle) == total).all()) for handle in handles):
                raise RuntimeError("a tensor is not the sum over the ranks")
        return means[request["warmup"] :]


def measure_idle(request: dict[str, Any]) -> float:
    """Return the cores that this process uses while its caller sleeps: CPU seconds of all its threads per second."""
    start, used = time.perf_counter(), time.process_time()
    time.sleep(request["seconds"])
    return (time.process_time() - used) / (time.perf_counter() - start)
