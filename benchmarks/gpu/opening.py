"""Part `opening`: time until the engine can use the GPU (load, JIT, OPEN), in a world of one rank.

`python -m benchmarks.gpu.opening FILE` opens it once, in a new process, and writes the duration of each step.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu import driver, ranks
from benchmarks.gpu.part import Task

STEPS = {
    "library": "libcuda.so.1 loaded",
    "cuInit": "cuInit",
    "context": "primary context and stream",
    "jit": "kernels compiled and loaded (cuModuleLoadDataEx)",
    "identity": "OPEN: NCCL loaded, GPU identified",
    "preparation": "OPEN: kernels loaded and launched once, slab, events; the context is there",
    "communicator": "OPEN: communicator of NCCL",
    "first": "first allreduce of 4 KiB, after OPEN",
}
CACHES = {
    "without the driver's cache": {"CUDA_CACHE_DISABLE": "1"},
    "with an empty cache": {"CUDA_CACHE_DISABLE": "0"},
    "with what the run before has cached": {"CUDA_CACHE_DISABLE": "0"},
}


def measure_part(task: Task) -> dict[str, Any]:
    """Open the GPU in successive processes: `times` in seconds, by state of the cache and by step; `problems`."""
    found: dict[str, Any] = {"times": {}, "problems": []}
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, variables) in enumerate(CACHES.items()):
            if number and task.left < 10:
                break
            file = Path(scratch, f"{number}.json")
            with ranks.Ranks("benchmarks.gpu.opening", 1, [str(file)], variables | {"CUDA_CACHE_PATH": scratch}) as job:
                job.end(task.left)
            times = json.loads(file.read_text(encoding="utf-8"))
            found["problems"] += times.pop("problems")
            found["times"][name] = times
            task.tell(found)
    return found


def main() -> None:
    """Open the GPU once."""
    times: dict[str, Any] = {}
    clock = _StepClock(times)
    library = driver.load_library()
    clock("library")
    library.cuInit(0)
    clock("cuInit")
    device = driver.CudaDriver()
    clock("context")
    device.load_kernels()
    device.wait_for_device()
    clock("jit")
    import engine
    from engine.config import config
    from engine.gpu.plane import Plane
    from engine.session import runtime

    engine.init()
    plane = Plane.open(
        runtime.current_engine(), 0, config.load(config.read_environment()), runtime.current_device().keep_half
    )
    times |= plane.seconds
    plane.close()
    array = driver.Array(device, np.ones(1024, np.float32))
    ranks.allreduce(array, array, "first", postscale=2.0).wait()  # opens it again, like the first tensor of a job
    clock.begin_step()
    ranks.allreduce(array, array, "second", postscale=2.0).wait()
    right = bool((array.to_numpy() == 4).all())
    clock("first")
    engine.shutdown()
    times["problems"] = device.read_reports() + ([] if right else ["the first allreduce was wrong"])
    Path(sys.argv[1]).write_text(json.dumps(times), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # skips the unloading of libraries, which is not measured


class _StepClock:
    """Stopwatch that records the duration of each step."""

    def __init__(self, times: dict[str, Any]) -> None:
        self.times = times
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a step."""
        self.last = time.perf_counter()

    def __call__(self, name: str) -> None:
        """End a step."""
        now = time.perf_counter()
        self.times[name], self.last = now - self.last, now


if __name__ == "__main__":
    main()
