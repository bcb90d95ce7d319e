"""Rank of a job whose steps compute nothing: it sleeps instead, and reduces gradients or averages parameters.

Started by `benchmarks.scaling.measured`.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import time
from typing import Any

import numpy as np

from benchmarks.common.worker import GroupWorker


class SleepingRank:
    """Handlers of the requests to a rank."""

    def __init__(self, worker: GroupWorker) -> None:
        self._worker = worker
        self._engine = importlib.import_module("engine")
        self._native = importlib.import_module("engine.session.runtime")

    def take_local_steps(self, request: dict[str, Any]) -> list[float]:
        """Take local steps, after as many as two synchronisations take; return the mean seconds of each period.

        `bytes` describes the parameters, `seconds` is the computing time of a step, and `options` are those of
        OuterOptimizer. `periods` of them are measured.
        """
        torch, hvd = importlib.import_module("torch"), importlib.import_module("engine.torch")
        parameters = [torch.ones(max(1, nbytes // 4)) for nbytes in request["bytes"]]
        options = request["options"] | {"compression": getattr(self._engine.Compression, request["compression"])}
        optimizer = hvd.OuterOptimizer(torch.optim.SGD(parameters, lr=1.0), **options)
        every = request["options"]["every"]
        for _ in range(2 * every):
            optimizer.step()
        self._worker.meet()
        seconds = []
        for _ in range(request["periods"]):
            begun = time.perf_counter()
            for _ in range(every):
                _sleep_until(time.perf_counter() + request["seconds"])
                optimizer.step()
            seconds.append((time.perf_counter() - begun) / every)
        return seconds

    def take_steps(self, request: dict[str, Any]) -> list[float]:
        """Take steps, and return the seconds of each except the first.

        `moments` and `bytes` describe the gradients, with times since the step's begin; `seconds` is its computing
        time.
        """
        compression = getattr(self._engine.Compression, request["compression"])
        arrays = [np.ones(max(1, nbytes // 4), np.float32) for nbytes in request["bytes"]]
        named = [
            (at, array, f"gradient.{k}") for k, (at, array) in enumerate(zip(request["moments"], arrays, strict=True))
        ]
        if request["timeline"]:
            self._engine.start_timeline(request["timeline"])
        self._worker.meet()
        marks = []
        for _ in range(request["steps"] + 1):
            marks.append(time.perf_counter())
            self._step(named, request["seconds"], compression)
        marks.append(time.perf_counter())
        if request["timeline"]:
            self._engine.stop_timeline()
        return [after - before for before, after in itertools.pairwise(marks)][1:]

    def _step(self, named: list[tuple[float, np.ndarray[Any, Any], str]], seconds: float, compression: Any) -> None:
        self._native.current_engine().mark_step()
        begun = time.perf_counter()
        handles = []
        for at, array, name in named:
            _sleep_until(begun + at)
            handles.append(self._engine.allreduce_async_(array, self._engine.Sum, name, compression=compression))
        _sleep_until(begun + seconds)
        for handle in handles:
            handle.wait()


def _sleep_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)


def main() -> None:
    """Join the other ranks and answer requests."""
    worker = GroupWorker(argparse.ArgumentParser())
    engine = importlib.import_module("engine")
    try:
        engine.init()
        rank = SleepingRank(worker)
    except BaseException:
        worker.report_failure()
        raise
    worker.serve({"steps": rank.take_steps, "local steps": rank.take_local_steps})
    engine.shutdown()


if __name__ == "__main__":
    main()
