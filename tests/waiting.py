"""Waiting for a state, in tests and in the programs of ranks; and the few ways in which they let time pass."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Found = TypeVar("Found")

MARK = "RANKS_TEST"  # the variable by which the processes of a test are found
PATIENCE = 60.0  # seconds for a state that comes at once, unless a framework is imported first, or never


class NotWithin(AssertionError):
    """A state did not come in time."""


def until(condition: Callable[[], Found], what: str, seconds: float = PATIENCE, pause: float = 0.002) -> Found:
    """Look until something is so; for the last time when the time is over, however long this process stood still.

    Parameters
    ----------
    condition : callable
        Looks; what is awaited is a true value.
    what : str
        Names the state, for the failure.
    seconds : float
    pause : float
        Seconds from one look to the next. 0 leaves the processor to others, no longer.

    Returns
    -------
    object
        What `condition` returned at last.

    Raises
    ------
    NotWithin
    """
    end = time.monotonic() + seconds
    while True:
        over = time.monotonic() > end
        if found := condition():
            return found
        if over:
            raise NotWithin(f"not within {seconds} s: {what}")
        time.sleep(pause)


def be_late(seconds: float) -> None:
    """Do something else for so long, as a rank that is late: nothing is waited for."""
    time.sleep(seconds)


def linger(seconds: float = 600.0) -> None:
    """Stay until somebody ends this process, or a signal's handler raises."""
    time.sleep(seconds)


def let_pass(seconds: float) -> None:
    """Let time pass that is looked at itself: what is used meanwhile, and what stays as it is."""
    time.sleep(seconds)


def measured(measure: Callable[[], object], times: int = 3) -> None:
    """Measure, and once more where what was measured is not as it should be: others use the machine, too.

    Parameters
    ----------
    measure : callable
        Measures, and asserts. Only that is repeated: a job that fails, or a state that does not come, does so at once.
    times : int
        After so many the last failure counts.
    """
    for left in reversed(range(times)):
        try:
            measure()
            return
        except AssertionError as error:
            if type(error) is not AssertionError or not left:
                raise


def until_files(*paths: Path | str, seconds: float = PATIENCE) -> None:
    """Wait for files that other processes make."""
    until(lambda: all(os.path.exists(path) for path in paths), f"files {tuple(map(str, paths))}", seconds)


def meet(where: str, rank: int, size: int) -> None:
    """Return when all ranks have come here, without the engine: by files in their working directory.

    Parameters
    ----------
    where : str
        Has no other meeting in the job.
    rank, size : int
    """
    Path(f"{where}.{rank}").touch()
    until_files(*(f"{where}.{each}" for each in range(size)))


def marked(mark: str) -> list[int]:
    """The processes that were started with `MARK=mark`, or below one that was; zombies excepted."""
    found = []
    needle = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and needle in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found
