"""Functions that the ranks of the Spark tests run."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

import engine

from ..waiting import let_pass, linger, until


def place(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Return this rank's place and its arguments, after all ranks have met."""
    engine.init()
    total = engine.allreduce(np.ones(3), op=engine.Sum)
    found = engine.rank(), engine.size(), engine.local_rank(), engine.local_size(), float(total[0])
    print(f"rank {engine.rank()} was here")
    if kwargs.get("key") == 1:
        from engine.spark import log_to_driver

        log_to_driver("two\nlines")
    engine.shutdown()
    return (*found, args, kwargs, os.environ.get("ENGINE_TEST_WORD"))


def raises_on(rank: int) -> None:
    """Raise on one rank while the others wait for it."""
    engine.init()
    if engine.rank() == rank:
        raise ValueError(f"rank {rank} does not like it")
    engine.allreduce(np.ones(3))


def alone_and_raises_on(rank: int) -> None:
    """Raise on one rank while the others do unrelated work."""
    if os.environ["ENGINE_RANK"] == str(rank):
        raise ValueError(f"rank {rank} does not like it")
    linger()


def tells_and_waits(directory: str, child: bool = False) -> None:
    """Record the process IDs of this rank, its task and a child, and stay."""
    import subprocess

    engine.init()
    engine.barrier()
    started = subprocess.Popen(["sleep", "600"], start_new_session=True).pid if child else 0
    draft = Path(directory, f"rank.{engine.rank()}.new")
    draft.write_text(f"{os.getpid()} {os.getppid()} {started}")
    draft.rename(Path(directory, f"rank.{engine.rank()}.there"))
    engine.barrier()
    linger()


def waits_for(directory: str) -> int:
    """Record that this rank has started, and wait until `go` exists."""
    engine.init()
    Path(directory, f"there.{engine.rank()}").touch()
    until(Path(directory, "go").exists, "the ranks may end")
    return engine.rank()


def exits(code: int) -> None:
    """Exit without a message."""
    sys.exit(code)


def killed_on(rank: int) -> None:
    """Kill one rank."""
    engine.init()
    if engine.rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    engine.allreduce(np.ones(3))


def sums(home: str, steps: int, holds: bool) -> tuple[int, int, list[float]]:
    """Train elastically: append to a committed list the sum of each step's samples, which the ranks share.

    With `holds`, the ranks keep committing in the middle until `go` exists. In every world each rank records the IDs of
    its own process, its parent (its agent) and its grandparent (its task).
    """
    import engine.elastic
    from engine.elastic import ObjectState
    from engine.host import processes

    engine.init()
    release = Path(home, "go")

    @engine.elastic.run
    def body(state: Any) -> list[float]:
        rank, size = engine.rank(), engine.size()
        agent = os.getppid()
        above = processes.read_process(agent)
        assert above is not None
        draft = Path(home, f"new.{state.world}.{rank}")
        draft.write_text(f"{size} {os.getpid()} {agent} {above.parent}")
        draft.rename(Path(home, f"world.{state.world}.{rank}"))
        while len(state.sums) < steps:
            step = len(state.sums)
            waits = np.array([float(holds and step == steps // 2 and not release.exists())])
            if engine.allreduce(waits, op=engine.Max)[0] > 0:
                let_pass(0.05)
            else:
                own = float(sum(range(12 * step, 12 * step + 12)[rank::size]))
                state.sums.append(float(engine.allreduce(np.array([own]), op=engine.Sum)[0]))
            state.commit()
        return state.sums

    found = body(ObjectState(sums=[]))
    print(f"rank {engine.rank()} has all sums")
    return engine.rank(), engine.size(), found


def ends_badly(rank: int) -> None:
    """Raise on one rank, in each world."""
    import engine.elastic
    from engine.elastic import ObjectState

    engine.init()

    @engine.elastic.run
    def body(state: Any) -> None:
        if engine.rank() == rank:
            raise ValueError(f"rank {rank} does not like it")
        engine.barrier()

    body(ObjectState(step=0))
