"""One rank of a job in which a rank leaves early, or is killed while a forked worker lives; prints the error it gets.

MODE is `set` (rank 2, the leader of its host, returns while a process set of others works on), `zero` (rank 0
returns after some steps), `workers` (every rank has forked a data-loading worker that outlives it), `last` (ranks
return as soon as they have rank 0's tensors) or `fails` (rank 0 fails when it gets a signal). Prints the
process ID when all ranks have started, and the error that the rank gets at the end.
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

import engine

from ..waiting import linger, until

OTHERS = [1, 3, 4]
STEPS = 100
WORKER = 600.0  # lifetime of a forked worker in seconds
LAST = 1 << 19  # elements that rank 0 may have sent before others have read any


def main() -> None:
    """Run MODE until the world ends."""
    mode = os.environ["MODE"]
    engine.init()
    others = engine.add_process_set(OTHERS)
    if mode == "fails" and engine.rank() == 0:
        signal.signal(signal.SIGUSR2, lambda _number, _frame: engine.abort("as it was told"))
    engine.barrier()
    if mode == "workers" and os.fork() == 0:
        os.close(sys.stdout.fileno())
        linger(WORKER)
        os._exit(0)
    print(os.getpid(), flush=True)
    rank = engine.rank()
    try:
        if mode == "set" and rank == 2:
            print("left", flush=True)
            return
        if mode == "set" and rank == 0:
            raise until(lambda: engine.session.runtime.current_engine().failure, "the world has ended")
        if mode == "last":
            got = engine.broadcast(np.full(LAST, rank, np.float32), 0, "last")
            print("has it" if not got.any() else "has something else", flush=True)
            return
        for step in range(10_000_000):
            if mode == "set":
                engine.allreduce(np.ones(1000, np.float32), engine.Sum, "in a set", process_set=others)
            else:
                engine.allreduce(np.ones(20_000, np.float32), engine.Sum, "loop")
            if step == STEPS:
                print("works", flush=True)
                if mode == "zero" and rank == 0:
                    return
    except engine.errors.CollectiveError as error:
        print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
