"""Programs of ranks for the tests of worker processes that ask for their rank."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import engine


def tell(connection: Connection) -> None:
    """Send what a worker process knows of its rank, or the error that says why it knows nothing."""
    try:
        told: Any = (engine.rank(), engine.size(), engine.local_rank(), engine.local_size(), engine.is_initialized())
    except engine.errors.EngineError as error:
        told = (type(error).__name__, str(error))
    connection.send(told)
    connection.close()


def workers() -> Any:
    """Return what workers of each start method know after `init`, and what one without a launcher knows."""
    vars(sys.modules["__main__"]).pop("__file__", None)  # the job's script would run again in a worker
    engine.init()
    found = {}
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        ours, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=tell, args=(theirs,))
        worker.start()
        theirs.close()
        found[method] = ours.recv()
        worker.join(30)
    found["total"] = float(engine.allreduce(np.ones(3), engine.Sum)[0])
    if engine.rank() == 0:
        launchers = ("ENGINE_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC")
        bare = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
        bare["PYTHONPATH"] = str(Path(__file__).parents[2])
        command = [sys.executable, "-c", "from tests.fault import worker_programs; worker_programs.alone()"]
        found["alone"] = subprocess.run(command, env=bare, text=True, capture_output=True, timeout=60)
    return found


def alone() -> None:
    """Print what a spawned worker of a process without a launcher knows."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    worker = context.Process(target=tell, args=(theirs,))
    worker.start()
    print(ours.recv())
    worker.join(30)
