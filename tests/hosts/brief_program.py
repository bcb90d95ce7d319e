"""One rank of many short worlds, one after the other. In each, rank 0 leaves right behind the first barrier.

WORLDS is how many. In every second one the others go on, and are told that rank 0 has left. What a rank is told that it
should not be is printed, a line for each world; `done` is the last line.
"""

from __future__ import annotations

import os

import numpy as np

import engine


def main() -> None:
    """Begin and end worlds."""
    print(os.getpid(), flush=True)
    for number in range(int(os.environ["WORLDS"])):
        step = "init"
        try:
            engine.init()
            step = "barrier"
            engine.barrier()
            step = "after"
            while number % 2 and engine.rank():
                engine.allreduce(np.ones(1000, np.float32), engine.Sum, "loop")
        except engine.errors.EngineError as error:
            if step != "after" or not isinstance(error, engine.errors.RankLeftError) or error.rank != 0:
                print(f"world {number}, {step}: {type(error).__name__}: {error}", flush=True)
        engine.shutdown()
    print("done", flush=True)


if __name__ == "__main__":
    main()
