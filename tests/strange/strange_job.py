"""Rank of a job on an unusual machine: checks collectives of NumPy arrays, and prints a word at the end.

`strange_job.py hold DIRECTORY` keeps reducing until the file `go` exists; `strange_job.py descriptors FILE`
prints what the descriptors 0 to 2 are.
"""

import os
import sys
from pathlib import Path

import numpy as np

import engine


def collectives() -> None:
    """Run collectives of more bytes than are sent at once, by every way of moving them that a training job uses."""
    rank, size = engine.rank(), engine.size()
    total = engine.allreduce(np.full(70_000, rank + 1, np.float32), engine.Sum)
    assert (total == size * (size + 1) / 2).all()
    assert engine.allgather(np.full(rank + 1, rank)).tolist() == [each for each in range(size) for _ in range(each + 1)]
    assert engine.broadcast(np.full(3, rank), size - 1).tolist() == [size - 1] * 3
    engine.barrier()


def main(what: str = "", where: str = "") -> None:
    engine.init()
    collectives()
    if what == "hold":
        Path(where, f"up.{engine.rank()}").write_text(str(os.getpid()))
        rounds = 0
        while not engine.allreduce(np.array([Path(where, "go").exists()], np.int32), engine.Max)[0]:
            rounds += 1
            Path(where, f"rounds.{engine.rank()}").write_text(str(rounds))
    if what == "descriptors":
        Path(where).write_text(" ".join(os.readlink(f"/proc/self/fd/{number}") for number in range(3)))
    if sys.stdout is not None:
        print(f"rank {engine.rank()} of {engine.size()} is done", flush=True)


main(*sys.argv[1:])
