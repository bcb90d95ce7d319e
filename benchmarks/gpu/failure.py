"""Part `failure`: successive worlds in one process, and the death of a rank that the other one survives.

`python -m benchmarks.gpu.failure again|lost DIRECTORY HERE TURNS SECONDS` is a rank. With `lost`, rank 1 kills itself
between its allreduces. Rank 0 records when it learns of that, when its device is idle, and when it continues alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu import ranks
from benchmarks.gpu.driver import Array, CudaDriver
from benchmarks.gpu.part import Skipped, Task

COUNT = 1 << 18
BEFORE = 20  # allreduces of both ranks before one of them dies
LEAST = 4  # minimum number of worlds
SETTLED = 1  # worlds after which a driver has allocated everything that it keeps
ALLOWED = 1 << 20
"""Bytes of device memory by which worlds may differ, as another process may have allocated memory."""
MODULE = "benchmarks.gpu.failure"


def measure_part(task: Task) -> dict[str, Any]:
    """Measure both cases.

    Returns `again`: for each world of one rank, seconds of `init`, `first` (an allreduce, which opens the GPU) and
    `shutdown`, and `used`, bytes of device memory afterwards. `growth` is bytes from the second world to the last.
    `lost` is seconds from the death of rank 1 until rank 0 `heard` of it, its device was at `rest`, and it had reduced
    `alone`; or `skipped`.
    """
    found: dict[str, Any] = {"problems": []}
    try:
        with _run_job(task, "again", 1, {}, task.pick_amount(LEAST, 12), 0.6) as told:
            used = [each["used"] for each in told["worlds"]][SETTLED:]
            found |= {"again": told["worlds"], "growth": used[-1] - used[0]}
            found["problems"] += told["problems"]
        if found["growth"] > ALLOWED:
            found["problems"].append(f"the device's memory that is in use has grown by {found['growth']} bytes")
    except ranks.RankProcessError as error:  # the other case is tried nevertheless
        found["problems"].append(str(error))
    task.tell(found)
    found["lost"] = {}
    try:
        where, variables = ranks.find_placement(task.here)
        with _run_job(task, "lost", 2, variables, 1, 0.9, killed=(1,)) as told:
            found["lost"] = {"where": where, **told["seconds"], "said": told["said"]}
            found["problems"] += told["problems"]
    except Skipped as error:
        found["lost"] = {"skipped": str(error)}
    return found


@contextlib.contextmanager
def _run_job(
    task: Task, what: str, size: int, variables: dict[str, str], turns: int, share: float, killed: tuple[int, ...] = ()
) -> Any:
    """Run a job and yield the results of rank 0."""
    with tempfile.TemporaryDirectory() as scratch:
        (known := Path(scratch, "here.json")).write_text(json.dumps(task.here), encoding="utf-8")
        seconds = share * task.left
        arguments = [what, scratch, str(known), str(turns), str(0.7 * seconds)]
        with ranks.Ranks(MODULE, size, arguments, variables) as job:
            job.end(seconds, killed)
        yield json.loads(Path(scratch, "0.json").read_text(encoding="utf-8"))


# ---- a rank ----------------------------------------------------------------------------------------------------------


def run_worlds(device: CudaDriver, turns: int, seconds: float) -> dict[str, Any]:
    """Run successive worlds."""
    import engine

    worlds, problems, end = [], [], time.monotonic() + seconds
    for turn in range(turns):
        if turn >= LEAST and time.monotonic() > end:
            break
        times, begun = {}, time.perf_counter()
        engine.init()
        times["init"], begun = time.perf_counter() - begun, time.perf_counter()
        array = Array(device, np.ones(COUNT, np.float32))
        ranks.allreduce(array, array, "first", postscale=2.0).wait()
        right = bool((array.to_numpy() == 2).all())
        times["first"] = time.perf_counter() - begun
        array.free_memory()
        begun = time.perf_counter()
        engine.shutdown()
        times["shutdown"] = time.perf_counter() - begun
        device.wait_for_device()
        free, total = device.read_memory()
        worlds.append(times | {"used": total - free})
        if not right:
            problems.append(f"world {turn}: the allreduce was wrong")
    return {"worlds": worlds, "problems": problems}


def lose_rank(device: CudaDriver, where: Path) -> dict[str, Any]:
    """Reduce with both ranks until one dies."""
    import engine
    from engine.errors import WorldError

    rank = int(os.environ["RANK"])
    death, problems, seconds, said = where / "death", [], {}, ""
    engine.init()
    array = Array(device, np.ones(COUNT, np.float32))
    try:
        for turn in range(10**9):
            if rank == 1 and turn == BEFORE:
                death.write_text(str(time.monotonic()), encoding="utf-8")
                os.kill(os.getpid(), signal.SIGKILL)
            ranks.allreduce(array, array, "both", op="average").wait()
            device.synchronize()
    except WorldError as error:
        heard, said = time.monotonic(), str(error)
        if error.rank != 1:
            problems.append(f"it was not rank 1 that the survivor named: {error}")
        died = float(death.read_text(encoding="utf-8"))
        seconds["heard"] = heard - died
        engine.shutdown()
        device.wait_for_device()
        seconds["rest"] = time.monotonic() - died
        os.environ.update(ranks.make_variables(f"{os.environ['ENGINE_JOB']}-alone", 0, 1))
        engine.init()
        alone = Array(device, np.ones(COUNT, np.float32))
        ranks.allreduce(alone, alone, "alone", postscale=3.0).wait()
        if not (alone.to_numpy() == 3).all():
            problems.append("the survivor's own allreduce was wrong")
        seconds["alone"] = time.monotonic() - died
        engine.shutdown()
    return {"seconds": seconds, "said": said, "problems": problems}


def main() -> None:
    """Run as a rank."""
    what, where, known, turns, seconds = sys.argv[1:]
    here = json.loads(Path(known).read_text(encoding="utf-8"))
    rank = int(os.environ["RANK"])
    device = CudaDriver(ranks.get_ordinal(rank, here))
    told = run_worlds(device, int(turns), float(seconds)) if what == "again" else lose_rank(device, Path(where))
    told["problems"] += device.read_reports()
    Path(where, f"{rank}.json").write_text(json.dumps(told), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
