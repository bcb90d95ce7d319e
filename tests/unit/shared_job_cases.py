"""Functions that the ranks of test_shared_jobs.py run."""

from __future__ import annotations

import os
import signal

import numpy as np

import engine

from ..on_ranks import Parts
from ..waiting import linger


def passes(rank: int, size: int) -> None:
    assert engine.allreduce(np.ones(1), engine.Sum)[0] == size > rank


def fails_on_rank_1(rank: int) -> None:
    assert rank != 1, "this is rank 1"


def fails_in_parts(parts: Parts) -> None:
    for number in range(3):
        with parts.part(f"part {number}"):
            assert number == 1, f"it is {number}"


def kills_rank_1(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    engine.barrier()


def never_ends(rank: int) -> None:
    if rank == 1:
        linger()


def ends_the_world(rank: int) -> None:
    if rank == 1:
        engine.abort("this is rank 1")
    engine.barrier()
