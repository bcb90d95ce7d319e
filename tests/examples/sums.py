"""Program of tests that start ranks by a cluster's means: each rank prints its place and two sums over all ranks."""

from __future__ import annotations

PROGRAM = """
import os
import numpy as np
import engine
engine.init()
total = engine.allreduce(np.array([1.0, engine.rank()]), op=engine.Sum)
place = f"rank {engine.rank()} of {engine.size()}, {engine.local_rank()} on its host"
line = f"{place}: {total.tolist()}, {os.environ.get('OMP_NUM_THREADS')} threads"
os.write(1, f"{line}\\n".encode())
"""


def expect_sums(output: str, hosts: int, each: int, threads: int) -> None:
    """Require that all ranks of a job have printed their place and the right sums."""
    size = hosts * each
    sums = [float(size), size * (size - 1) / 2]
    printed = [line for line in output.splitlines() if line.startswith("rank ")]
    assert sorted(printed) == sorted(
        f"rank {rank} of {size}, {rank % each} on its host: {sums}, {threads} threads" for rank in range(size)
    ), output
