"""Files that a rank leaves behind when something goes wrong: its failure and its last schedule entries."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from .. import readable
from ..bounded_reader import natural
from ..host import private_files

if TYPE_CHECKING:
    from ..native import core

PREFIX = "engine-records-"  # prefix of the names of temporary directories of ranks to which nobody has given one
WORLD = "world."  # prefix of the names of directories in which the ranks of a world have written, in an elastic job
KEPT = 20  # worlds of an elastic job, the newest, of which records are kept
RECORDS = ("failure.json", "flight.json", "traceback.txt")  # names of what a `Recorder` writes


def newest_world(directory: Path) -> Path:
    """Where the ranks of the last world have written: `directory` itself, or the newest `world.K` in it."""
    return (worlds_in(directory) or [directory])[-1]


def worlds_in(directory: Path) -> list[Path]:
    """The directories of an elastic job's worlds in a directory, by their numbers."""
    numbered = ((natural(path.name.removeprefix(WORLD)), path) for path in directory.glob(f"{WORLD}*"))
    found = [(number, path) for number, path in numbered if number is not None and not path.is_symlink()]
    return [path for _, path in sorted(found)]


def forget(world: Path) -> None:
    """Remove the records in the directory of a world, and what is empty then. Others may do so at the same time."""
    for path in world.glob("rank.*/*"):
        if path.name.lstrip(".").startswith(RECORDS):
            path.unlink(missing_ok=True)
    for directory in (*world.glob("rank.*"), world):
        with contextlib.suppress(OSError):  # a timeline is there, or another has removed it
            directory.rmdir()


@lru_cache(maxsize=1)
def _temporary() -> Path:
    """A temporary directory for all worlds of this process."""
    return Path(tempfile.mkdtemp(prefix=PREFIX))


def forget_temporary() -> None:
    """Remove the temporary directory for the worlds of this process, if there is one: the job has outlived them."""
    if _temporary.cache_info().currsize:
        shutil.rmtree(_temporary(), ignore_errors=True)
        _temporary.cache_clear()


class Recorder:
    """Where one rank writes. The directory is made when there is something to write.

    Parameters
    ----------
    directory : Path or None
        Of the job; the rank writes to `rank.N` in it. None: a new temporary directory, readable by its owner only.
    rank : int
    world : int, optional
        The number of a world in an elastic job: then it writes to `world.K/rank.N`, since the ranks of the next world
        may be other processes; and what was written of old worlds is removed.
    """

    def __init__(self, directory: Path | None, rank: int, world: int | None = None) -> None:
        self._directory = directory
        self._name = f"rank.{rank}" if world is None else f"{WORLD}{world}/rank.{rank}"
        self._again = world is not None  # whether the process has other recorders, in its other worlds

    @property
    def kept(self) -> bool:
        """Whether somebody has chosen the directory, and so knows where to look."""
        return self._directory is not None

    def write(self, name: str, content: dict[str, Any]) -> Path:
        """Write one JSON file, as `write_text` does."""
        return self.write_text(name, json.dumps(content, indent=1, default=str))

    def write_text(self, name: str, text: str) -> Path:
        """Write one file, readable by its owner only; whoever reads it sees all of it or the one before.

        Returns
        -------
        Path
            Where it is.
        """
        if self._directory is None:
            self._directory = _temporary() if self._again else Path(tempfile.mkdtemp(prefix=PREFIX))
        home = self._directory / self._name
        private_files.make_directory(home)
        if self._again:
            for old in worlds_in(self._directory)[-2 * KEPT : -KEPT]:  # those before are gone, but for timelines
                forget(old)
        path = home / name
        private_files.replace(path, text.encode(errors="backslashreplace"))
        return path


def now(engine: core.Engine) -> dict[str, float | None]:
    """What time it is, by three clocks, in seconds.

    `time` is unix time and `monotonic` CLOCK_MONOTONIC, both of this host, and `common` the CLOCK_MONOTONIC of rank 0's
    host, by which the records of all hosts can be compared; None as long as the hosts' clocks have not been.
    """
    clock, seconds = engine.clock(), monotonic()
    return {"time": time(), "monotonic": seconds, "common": None if clock is None else seconds + clock[0] / 1e9}


def snapshot(engine: core.Engine, sets: dict[int, core.Engine], reason: str) -> dict[str, Any]:
    """The content of a flight record.

    Parameters
    ----------
    engine : core.Engine
        The world's engine.
    sets : dict of int to core.Engine
        Engines of the process sets that this rank is in, by number.
    reason : str
        Occasion of the record: `abort`, `stall` or `signal`.
    """
    failure = engine.failure
    return {
        "rank": engine.rank,
        "size": engine.size,
        "pid": os.getpid(),
        "reason": reason,
        **now(engine),
        "failure": None if failure is None else readable.whole_exception(failure),
        **_told(engine),
        "process_sets": [{"id": number, "members": list(each.numbers), **_told(each)} for number, each in sets.items()],
    }


def _told(engine: core.Engine) -> dict[str, Any]:
    return {
        "knobs": engine.knobs(),
        "counters": engine.counters(),
        "pending": engine.pending(),
        "ranks": engine.ranks(),
        "history": engine.history(),
    }
