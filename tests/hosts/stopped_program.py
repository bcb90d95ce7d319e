"""One rank of a job that waits for another for ever.

MODE is `stopped` (rank 2, the leader of its host, is stopped after submitting something) or `late` (rank 3 submits
nothing, though its process runs). Prints the process ID when all ranks have met, and the error that the rank gets at
the end.
"""

from __future__ import annotations

import os
import signal

import numpy as np

import engine

from ..waiting import let_pass, until

STOPPED, LATE = 2, 3
RELAYED = 1.0  # seconds within which rank 2's submission reaches rank 0's host


def main() -> None:
    """Submit, be stopped or go on, and wait for the others."""
    mode = os.environ["MODE"]
    engine.init()
    tensor = np.ones(1000, np.float32)
    engine.allreduce(tensor, engine.Sum, "known")
    print(os.getpid(), flush=True)
    try:
        if mode == "stopped" and engine.rank() == STOPPED:
            handle = engine.allreduce_async(tensor, engine.Sum, "known")
            let_pass(RELAYED)
            os.kill(os.getpid(), signal.SIGSTOP)
            engine.synchronize(handle)
        elif mode == "late" and engine.rank() == LATE:
            raise until(lambda: engine.session.runtime.current_engine().failure, "the world has ended")
        else:
            let_pass(2 * RELAYED)
            engine.allreduce(tensor, engine.Sum, "known")
    except engine.errors.CollectiveError as error:
        print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
