"""What the ranks of the tests of Spark do."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

import engine

from ..waiting import linger


def place(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Give this rank's place and what it was called with, after all have met."""
    engine.init()
    total = engine.allreduce(np.ones(3), op=engine.Sum)
    found = engine.rank(), engine.size(), engine.local_rank(), engine.local_size(), float(total[0])
    print(f"rank {engine.rank()} was here")
    engine.shutdown()
    return (*found, args, kwargs, os.environ.get("ENGINE_TEST_WORD"))


def raises_on(rank: int) -> None:
    """Raise on one rank while the others wait for it."""
    engine.init()
    if engine.rank() == rank:
        raise ValueError(f"rank {rank} does not like it")
    engine.allreduce(np.ones(3))


def alone_and_raises_on(rank: int) -> None:
    """Raise on one rank while the others do something that has nothing to do with it."""
    if os.environ["ENGINE_RANK"] == str(rank):
        raise ValueError(f"rank {rank} does not like it")
    linger()


def tells_and_waits(directory: str, child: bool = False) -> None:
    """Say who this rank and its task are, and stay."""
    import subprocess

    engine.init()
    engine.barrier()
    started = subprocess.Popen(["sleep", "600"], start_new_session=True).pid if child else 0
    draft = Path(directory, f"rank.{engine.rank()}.new")
    draft.write_text(f"{os.getpid()} {os.getppid()} {started}")
    draft.rename(Path(directory, f"rank.{engine.rank()}.there"))
    engine.barrier()
    linger()


def exits(code: int) -> None:
    """End without a word."""
    sys.exit(code)


def killed_on(rank: int) -> None:
    """Be killed, on one rank."""
    engine.init()
    if engine.rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    engine.allreduce(np.ones(3))
