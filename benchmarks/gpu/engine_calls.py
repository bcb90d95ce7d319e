"""Cost of an allreduce of a small array through the engine, in a world of one rank, from its call to its end.

`python -m benchmarks.gpu.engine_calls DIRECTORY HERE SAMPLES` is the rank.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu import ranks
from benchmarks.gpu.driver import Array, CudaDriver
from benchmarks.gpu.native_calls import make_row

COUNT, MANY = 1024, 100
CASES = {
    "allreduce of 4 KiB in place, no factor: nothing to compute": 1.0,
    "allreduce of 4 KiB in place, times 2: one kernel": 2.0,
}


def measure_small(samples: int, make: Callable[[], Any], synchronize: Callable[[], None]) -> list[dict[str, Any]]:
    """Return rows for one array at a time: until the call returns, `wait` returns, and the device is done."""
    rows = []
    for name, factor in CASES.items():
        seconds = np.empty((3, samples))
        array = make()
        for sample in range(-5, samples):  # the first ones open the GPU, and are not counted
            synchronize()
            marks = [time.perf_counter()]
            handle = ranks.allreduce(array, array, "small", postscale=factor, blocking=True)
            marks.append(time.perf_counter())
            handle.wait()
            marks.append(time.perf_counter())
            synchronize()
            marks.append(time.perf_counter())
            if sample >= 0:
                seconds[:, sample] = [mark - marks[0] for mark in marks[1:]]
        for each, what in zip(seconds, ("the call returns", "it is enqueued", "the device has passed"), strict=True):
            rows.append(make_row(f"{name}, until {what}", each))
    return rows


def measure_many(device: CudaDriver, samples: int) -> list[dict[str, Any]]:
    """Return rows for a hundred arrays that are submitted one after the other and then waited for."""
    arrays = [Array(device, np.ones(COUNT, np.float32)) for _ in range(MANY)]
    submitted, enqueued = np.empty(samples), np.empty(samples)
    for sample in range(-2, samples):
        device.synchronize()
        begun = time.perf_counter()
        handles = [ranks.allreduce(array, array, f"array {k}") for k, array in enumerate(arrays)]
        middle = time.perf_counter()
        for handle in handles:
            handle.wait()
        end = time.perf_counter()
        if sample >= 0:
            submitted[sample], enqueued[sample] = (middle - begun) / MANY, (end - begun) / MANY
    what = f"each of {MANY} allreduces of 4 KiB"
    return [make_row(f"{what}, the call", submitted), make_row(f"{what}, until all are enqueued", enqueued)]


def main() -> None:
    """Measure arrays of `driver.py`, and tensors of PyTorch if it has CUDA."""
    where, known, told_samples = sys.argv[1:]
    here, samples = json.loads(Path(known).read_text(encoding="utf-8")), int(told_samples)
    import engine

    device = CudaDriver()
    engine.init()
    rows = measure_small(samples, lambda: Array(device, np.ones(COUNT, np.float32)), device.synchronize)
    rows += measure_many(device, max(samples // 5, 3))
    if not here["why_no_torch"]:
        import torch

        torch.cuda.set_device(0)
        of_torch = measure_small(samples, lambda: torch.ones(COUNT, device="cuda"), torch.cuda.synchronize)
        rows += [each | {"name": f"torch: {each['name']}"} for each in of_torch]
    engine.shutdown()
    told = {"rows": rows, "problems": device.read_reports()}
    Path(where, "0.json").write_text(json.dumps(told), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
