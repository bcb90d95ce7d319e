"""Files that a rank leaves behind after a failure: its failure report and its last schedule entries."""

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

from ..errors.formatting import format_whole_exception
from ..host import private_files
from ..text.bounded_reader import parse_natural

if TYPE_CHECKING:
    from ..native import core

PREFIX = "engine-records-"  # prefix of temporary directories, for ranks without a given directory
WORLD = "world."  # prefix of the directories of an elastic job's worlds
KEPT = 20  # number of newest worlds of an elastic job whose records are kept
RECORDS = ("failure.json", "flight.json", "traceback.txt")  # files that a `Recorder` writes


def newest_world(directory: Path) -> Path:
    """Return the directory of the last world: the newest `world.K` in `directory`, or `directory` itself."""
    return (worlds_in(directory) or [directory])[-1]


def worlds_in(directory: Path) -> list[Path]:
    """Return the directories of an elastic job's worlds in a directory, ordered by number."""
    numbered = ((parse_natural(path.name.removeprefix(WORLD)), path) for path in directory.glob(f"{WORLD}*"))
    found = [(number, path) for number, path in numbered if number is not None and not path.is_symlink()]
    return [path for _, path in sorted(found)]


def remove_records(world: Path) -> None:
    """Remove the records of a world and its empty directories. Other processes may do so at the same time."""
    for path in world.glob("rank.*/*"):
        if path.name.lstrip(".").startswith(RECORDS):
            path.unlink(missing_ok=True)
    for directory in (*world.glob("rank.*"), world):
        with contextlib.suppress(OSError):  # a timeline is there, or another process has removed it
            directory.rmdir()


@lru_cache(maxsize=1)
def _create_temporary_directory() -> Path:
    """Create a temporary directory, shared by all worlds of this process."""
    return Path(tempfile.mkdtemp(prefix=PREFIX))


def forget_temporary() -> None:
    """Remove the temporary directory of this process's worlds, if any; called when the job has outlived them."""
    if _create_temporary_directory.cache_info().currsize:
        shutil.rmtree(_create_temporary_directory(), ignore_errors=True)
        _create_temporary_directory.cache_clear()


class Recorder:
    """Writer of one rank's records. The directory is created at the first write.

    In an elastic job, `world` is the number of the world. The rank then writes to `world.K/rank.N`, as ranks of the
    next world may be other processes, and records of old worlds are removed.
    """

    def __init__(self, directory: Path | None, rank: int, world: int | None = None) -> None:
        self._directory = directory  # directory of the job; None: a new temporary one that only its owner can read
        self._name = f"rank.{rank}" if world is None else f"{WORLD}{world}/rank.{rank}"
        self._again = world is not None  # whether the process has other recorders, in its other worlds

    @property
    def kept(self) -> bool:
        """True if the user chose the directory, and so knows where to look."""
        return self._directory is not None

    def write(self, name: str, content: dict[str, Any]) -> Path:
        """Write one JSON file, with the guarantees of `write_text`."""
        return self.write_text(name, json.dumps(content, indent=1, default=str))

    def write_text(self, name: str, text: str) -> Path:
        """Write one file atomically, readable by its owner only, and return its path."""
        if self._directory is None:
            self._directory = _create_temporary_directory() if self._again else Path(tempfile.mkdtemp(prefix=PREFIX))
        home = self._directory / self._name
        private_files.make_directory(home)
        if self._again:
            for old in worlds_in(self._directory)[-2 * KEPT : -KEPT]:  # older ones are gone, except for timelines
                remove_records(old)
        path = home / name
        private_files.replace(path, text.encode(errors="backslashreplace"))
        return path


def read_clocks(engine: core.Engine) -> dict[str, float | None]:
    """Return the current time by three clocks, in seconds.

    `time` is unix time and `monotonic` is CLOCK_MONOTONIC, both of this host. `common` is CLOCK_MONOTONIC of rank 0's
    host, by which records of different hosts can be compared; None until the hosts' clocks have been compared.
    """
    clock, seconds = engine.clock(), monotonic()
    return {"time": time(), "monotonic": seconds, "common": None if clock is None else seconds + clock[0] / 1e9}


def make_record(engine: core.Engine, sets: dict[int, core.Engine], reason: str) -> dict[str, Any]:
    """Return the content of a flight record.

    `sets` has this rank's process sets by number. `reason` is the occasion: `abort`, `stall` or `signal`.
    """
    failure = engine.failure
    return {
        "rank": engine.rank,
        "size": engine.size,
        "pid": os.getpid(),
        "reason": reason,
        **read_clocks(engine),
        "failure": None if failure is None else format_whole_exception(failure),
        **_collect_state(engine),
        "process_sets": [
            {"id": number, "group": each.group_name, "members": list(each.numbers), **_collect_state(each)}
            for number, each in sets.items()
        ],
    }


def _collect_state(engine: core.Engine) -> dict[str, Any]:
    return {
        "knobs": engine.knobs(),
        "counters": engine.counters(),
        "pending": engine.pending(),
        "unfinished": engine.unfinished(),
        "ranks": engine.ranks(),
        "history": engine.history(),
    }
