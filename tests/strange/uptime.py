"""A machine that has just booted: a job in a time namespace, in which the monotonic clock and the uptime start anew.

`run` is the program of its ranks, so this module does not import pytest.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

import engine

from ..waiting import be_late, until

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.py"
LATE = 0.25  # delay of rank 1 in seconds: longer than a wait before it looks for the culprit


def namespace(uptime: int) -> list[str]:
    """Command that runs another one on a machine that seems to have booted `uptime` seconds ago."""
    offsets = {"monotonic": 0, "boottime": 0}  # relative to the first namespace
    for line in Path("/proc/self/timens_offsets").read_text().splitlines():
        name, seconds, _ = line.split()
        offsets[name] = int(seconds)
    clocks = {"monotonic": time.CLOCK_MONOTONIC, "boottime": time.CLOCK_BOOTTIME}
    wanted = [f"--{name}={offsets[name] + uptime - int(time.clock_gettime(clock))}" for name, clock in clocks.items()]
    return ["unshare", "--time", "--fork", "--kill-child", *wanted, "--"]


def refusal() -> str:
    """Reason why no time namespace is available, or an empty string."""
    try:
        tried = subprocess.run([*namespace(1), "true"], capture_output=True, text=True, timeout=10)
    except OSError as error:
        return f"no time namespace here: {error}"
    return f"no time namespace here: {tried.stderr.strip()}" if tried.returncode else ""


def reduce_with_a_late_rank(name: str | None, mark: str) -> float:
    """Run an allreduce that rank 1 submits only after rank 0 has waited for a while; return the sum."""
    rank = engine.rank()
    if rank == 1:
        until(Path(mark).exists, "rank 0 has waited")
    else:

        def look() -> None:
            native = engine.session.runtime.current_engine()
            until(lambda: any(entry["seconds"] > LATE for entry in native.pending()), "an operation that waits")
            Path(mark).touch()

        threading.Thread(target=look, daemon=True).start()
    handle = engine.allreduce_async(np.full(100, rank + 1.0, np.float32), name=name, op=engine.Sum)
    return float(engine.synchronize(handle)[0])


def train_until_tuned(trials: int) -> int:
    """Run steps of a torch optimizer until the tuner has tried that many settings; return the number of steps."""
    import torch

    parameter = torch.nn.Parameter(torch.zeros(4096))
    optimizer = engine.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.5))
    steps, flag, end = 0, np.zeros(1, np.float32), time.monotonic() + 55.0
    while not flag[0]:
        be_late(0.005)  # computes elsewhere, so that the tuner's low-priority process gets a processor
        optimizer.zero_grad()
        parameter.sum().backward()
        optimizer.step()
        steps += 1
        if engine.rank() == 0:
            tuning = engine.session.runtime.owner.session.tuning  # type: ignore[union-attr]
            flag[0] = tuning is None or tuning._trials > trials or time.monotonic() > end
        flag = engine.allreduce(flag, name="over", op=engine.Max)
    assert torch.equal(parameter.detach(), torch.full((4096,), -0.5 * steps))
    return steps


def look_from_outside() -> dict[str, str]:
    """Output of `enginerun top`, and of a scrape of the endpoint, for this job."""
    launcher = os.getppid()
    command = [sys.executable, "-m", "engine.launch", "top", str(launcher), "--once", "--interval", "0.2"]
    top = subprocess.run(command, capture_output=True, text=True, timeout=90, env={**os.environ, "COLUMNS": "120"})
    until(lambda: list(Path("sd").glob("*.json")), "a file that says where the metrics are")
    [found] = [json.loads(path.read_text()) for path in Path("sd").glob("*.json")]
    with urllib.request.urlopen(f"http://{found[0]['targets'][0]}/metrics", timeout=10) as answer:
        return {"top": top.stdout + top.stderr, "metrics": answer.read().decode()}


def run() -> dict[str, Any]:
    """Use each part of the engine that reads a clock, once."""
    began = time.clock_gettime(time.CLOCK_BOOTTIME)
    engine.init()
    found: dict[str, Any] = {"began": began, "monotonic": time.monotonic() - time.clock_gettime(time.CLOCK_BOOTTIME)}
    found["sums"] = [reduce_with_a_late_rank(name, f"late.{name}") for name in ("named", None)]
    found["steps"] = train_until_tuned(1)
    sys.argv = ["digits.py", "--steps", "20"]
    sys.path.insert(0, str(EXAMPLE.parent))
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    engine.allreduce(np.ones(3, np.float32), name="last")
    found["counters"] = engine.counters()
    if engine.rank() == 0:
        found.update(look_from_outside())
    engine.barrier()
    found["ended"] = time.monotonic()
    return found
