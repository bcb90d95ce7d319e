"""One rank of a job whose rank 2, which speaks for its host, is stopped when it has submitted something.

Prints the process's number when all have met, and what the rank is told at the end.
"""

from __future__ import annotations

import os
import signal

import numpy as np

import engine

from ..waiting import let_pass

STOPPED = 2
RELAYED = 1.0  # seconds in which what rank 2 has submitted is told to rank 0's host


def main() -> None:
    """Submit, be stopped or go on, and wait for the others."""
    engine.init()
    tensor = np.ones(1000, np.float32)
    engine.allreduce(tensor, engine.Sum, "known")
    print(os.getpid(), flush=True)
    try:
        if engine.rank() == STOPPED:
            handle = engine.allreduce_async(tensor, engine.Sum, "known")
            let_pass(RELAYED)
            os.kill(os.getpid(), signal.SIGSTOP)
            engine.synchronize(handle)
        else:
            let_pass(2 * RELAYED)
            engine.allreduce(tensor, engine.Sum, "known")
    except engine.errors.CollectiveError as error:
        print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
