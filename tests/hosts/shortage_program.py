"""Program of ranks whose system has no memory for some of their socket calls."""

from __future__ import annotations

import os
from importlib import import_module

import numpy as np

import engine

STEPS = 40
LARGE = 1 << 20  # float32: more than a connection holds


def sum_on_hosts(hosts: int) -> list[float]:
    """Meet as ranks of several hosts would, form a process set, and sum; return the results."""
    os.environ["PRETENDED_HOSTS"] = str(hosts)
    import_module("tests.pretended_hosts")
    engine.init()
    rank, size = engine.rank(), engine.size()
    made = engine.add_process_set([0, size - 1])
    sums = []
    for step in range(STEPS):
        sums.append(float(engine.allreduce(np.full(10, rank + step, np.float32), engine.Sum, f"small.{step}")[9]))
        if step % 10 == 0:
            sums.append(float(engine.allreduce(np.full(LARGE, rank + 1, np.float32), engine.Sum, "large")[-1]))
    if rank in (0, size - 1):
        sums.append(float(engine.allreduce(np.ones(3, np.float32), engine.Sum, process_set=made)[0]))
    engine.shutdown()
    return sums
