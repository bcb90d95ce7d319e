"""One rank of a job that is harmed at a random moment; prints when it has started, and the error at its end.

MOMENT is its activity until then: `start` (it meets the others), `idle` (nothing), `busy` (sums of 100 MiB), or
`forming` (process sets).
"""

from __future__ import annotations

import json
import os
import time

import numpy as np

import engine

from .. import waiting

LARGE = 25 << 20  # float32: 100 MiB
LONGEST = 120.0  # seconds that a rank runs if nothing happens
PAUSE = 0.02


def main() -> None:
    """Print the process ID, a line once the rank has started, and the error at its end."""
    print(os.getpid(), flush=True)
    try:
        engine.init()
        engine.allreduce(np.ones(10, np.float32), engine.Sum, "there")
        print("there", flush=True)
        {"start": idle, "idle": idle, "busy": busy, "forming": form}[os.environ["MOMENT"]](time.monotonic() + LONGEST)
    except engine.errors.EngineError as error:
        told = {"kind": type(error).__name__, "culprit": getattr(error, "rank", None), "text": str(error)}
        print(json.dumps({**told, "at": time.time()}), flush=True)


def idle(until: float) -> None:
    """Submit nothing until the world has ended."""
    left = until - time.monotonic()
    raise waiting.until(lambda: engine.session.runtime.current_engine().failure, "the world has ended", left, PAUSE)


def busy(until: float) -> None:
    """Sum large tensors."""
    tensor = np.ones(LARGE, np.float32)
    while time.monotonic() < until:
        engine.allreduce_(tensor, engine.Max, "large")


def form(until: float) -> None:
    """Form process sets across hosts, use each once, and remove it."""
    size = engine.size()
    while time.monotonic() < until:
        for ranks in ([0, size - 1], list(range(1, size)), [0, 2, 3]):
            made = engine.add_process_set(ranks)
            if engine.rank() in ranks:
                engine.allreduce(np.ones(1000, np.float32), engine.Sum, "in a set", process_set=made)
            engine.remove_process_set(made)


if __name__ == "__main__":
    main()
