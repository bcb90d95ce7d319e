"""One rank that reduces until the world ends: prints its process ID first, and the error at the end."""

from __future__ import annotations

import os

import numpy as np

import engine


def main() -> None:
    """Reduce for at most a minute."""
    engine.init()
    tensor = np.ones(20_000, np.float32)
    engine.allreduce(tensor, engine.Sum, "loop")
    print(os.getpid(), flush=True)
    try:
        for _ in range(10_000_000):
            engine.allreduce(tensor, engine.Sum, "loop")
    except engine.errors.CollectiveError as error:
        print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
