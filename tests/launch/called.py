"""Functions for tests of `engine.run`: ranks import them."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
import threading
from pathlib import Path
from typing import Any

from ..waiting import linger


def rank() -> int:
    return int(os.environ["ENGINE_RANK"])


def place(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return rank(), int(os.environ["ENGINE_SIZE"]), args, kwargs, os.getcwd()


def total(value: float) -> float:
    import numpy as np

    import engine

    engine.init()
    return float(engine.allreduce(np.full(3, value * engine.rank()), engine.Sum)[0])


def ages_and_clears(temporary: str) -> bool:
    """Return whether the directories of call and job survive another job's removal of old directories."""
    from engine.launch.process import leftovers

    homes = [path for path in Path(temporary).iterdir() if path.name.startswith(leftovers.PREFIX)]
    for home in homes:
        for path in (*home.rglob("*"), home):
            os.utime(path, (0, 0))
    leftovers.clear_old(Path(temporary))
    return len(homes) == 2 and all(home.is_dir() for home in homes)


def mode_of_the_call() -> int:
    """Mode bits of the file that holds the call."""
    from engine.launch.hosts.remote_files import ENCLOSED

    return stat.S_IMODE(os.lstat(Path(os.environ["ENGINE_OUTPUT_DIR"], ENCLOSED)).st_mode)


def sees(path: str) -> bool:
    return os.path.exists(path)


def process() -> int:
    return os.getpid()


def raises_everywhere() -> None:
    raise ValueError("nobody does")


def trains_and_is_killed_once(home: str) -> tuple[int, int, int]:
    """Rank, size and steps of a training whose rank 0 is killed after its third commit."""
    import engine
    from engine.elastic import ObjectState, run

    engine.init()
    killed = Path(home, "killed")

    @run
    def train(state: ObjectState) -> tuple[int, int, int]:
        while state.step < 6:
            state.step += 1
            state.commit()
            if state.step == 3 and engine.rank() == 0 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return engine.rank(), engine.size(), state.step

    return train(ObjectState(step=0))


def raises_on(culprit: int) -> None:
    if rank() == culprit:
        raise ValueError(f"rank {culprit} does not like it")


def killed_on(culprit: int) -> None:
    if rank() == culprit:
        os.kill(os.getpid(), signal.SIGKILL)


def exits_on(culprit: int) -> int:
    if rank() == culprit:
        sys.exit(0)
    return rank()


def large_on(who: int, size: int) -> str:
    return "x" * size if rank() == who else ""


def pythons() -> tuple[str, str | None]:
    """Running Python interpreter, and the one found on PATH as `python`."""
    return sys.executable, shutil.which("python")


def unpicklable() -> Any:
    return threading.Lock()


def sleeps(directory: str) -> None:
    Path(directory, f"ready.{rank()}").touch()
    linger()
