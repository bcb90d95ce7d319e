"""Waiting for a state, in tests and in programs of ranks, and the few functions that let time pass."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Found = TypeVar("Found")

MARK = "RANKS_TEST"  # variable by which the processes of a test are found
SLOWNESS = float(os.environ.get("TESTS_SLOWNESS", "1"))
"""Factor for every deadline of a test: 1, or more where an emulator runs the tests (tools/release/trial.py)."""
PATIENCE = 60.0  # seconds for a state that comes soon, even after the import of a framework, or never


class NotWithin(AssertionError):
    """A state was not reached in time."""


def until(condition: Callable[[], Found], what: str, seconds: float = PATIENCE, pause: float = 0.002) -> Found:
    """Poll a condition until it holds, with a last poll after the deadline, however long this process was stopped.

    Returns the condition's true value, or raises `NotWithin`, which names the state `what`. `seconds` is the time on a
    machine; in an emulator it is `SLOWNESS` times as long. `pause` is the seconds between two polls; 0 only yields the
    processor.
    """
    seconds *= SLOWNESS
    end = time.monotonic() + seconds
    while True:
        over = time.monotonic() > end
        if found := condition():
            return found
        if over:
            raise NotWithin(f"not within {seconds} s: {what}")
        time.sleep(pause)


def be_late(seconds: float) -> None:
    """Be a late rank for this many seconds, doing something else; nothing is awaited."""
    time.sleep(seconds)


def linger(seconds: float = 600.0) -> None:
    """Sleep until another process ends this one, or a signal handler raises."""
    time.sleep(seconds)


def let_pass(seconds: float) -> None:
    """Let time pass that is itself under test: resources are used meanwhile, or must stay unchanged."""
    time.sleep(seconds)


def measured(measure: Callable[[], object], times: int = 3) -> None:
    """Measure, and repeat where the result is not as expected, because other programs use the machine, too.

    Only failed assertions of `measure` are repeated, up to `times` attempts; the last one's failure is raised. A failed
    job, or a state that is not reached, fails at once.
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
    """Wait for all ranks without the engine, by files in their working directory; `where` is unique in the job."""
    Path(f"{where}.{rank}").touch()
    until_files(*(f"{where}.{each}" for each in range(size)))


def marked(mark: str) -> list[int]:
    """Return the processes that were started with `MARK=mark`, or below such a process, except zombies."""
    found = []
    needle = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and needle in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found
