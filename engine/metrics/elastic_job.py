"""What the launcher of an elastic job tells of its worlds, in memory without a name that others read (`Board`, `read`).

Ranks' pages cannot tell it: between two worlds no rank runs, and what a reset was due to only the driver knows.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from dataclasses import asdict, dataclass, field
from typing import Any

from ..bounded_reader import MIB, ReadError, natural, number, parse_json, text, whole
from ..host import linux

NAME = "enginerun-elastic"  # name of the memory, in /proc/PID/fd
KEPT = 5  # resets of which the cause is told
LONGEST = 400  # characters of a cause
LARGEST = 16 * MIB  # bytes that are read of what a launcher tells
MOST = 1 << 31  # no number of workers, worlds and resets is larger
COUNTS = ("world", "worlds", "size", "min_size", "max_size", "cooling", "slow_workers")
TRIES = 5  # readings in a row that may meet a write


@dataclass(frozen=True)
class Reset:
    """One end of a world after which the job went on.

    Attributes
    ----------
    number : int
        Counts the job's resets.
    time : float
        Unix time.
    cause, text : str
        In a word, and in full.
    seconds : float
        Until the next world ran, or until now.
    """

    number: int
    time: float
    cause: str
    text: str
    seconds: float


@dataclass(frozen=True)
class ElasticJob:
    """An elastic job at one moment.

    Attributes
    ----------
    world : int
        The number of the newest world; 0: there was none.
    worlds : int
        How many have run.
    size : int
        Ranks of the newest world.
    min_size, max_size : int
    resetting : bool
        Whether a world is over and the next does not run yet.
    resets : dict of str to int
        By cause.
    reset_seconds : float
        Time in resets, also in one that is not over.
    cooling : int
        Hosts that are left alone for a while, or for good.
    slow_workers : int
        Workers that were let go because they held up the others.
    ranks : dict of int to int
        By the numbers of slots in which a worker runs, its rank in the newest world; -1: it has none.
    recent : tuple of Reset
        The last ones.
    """

    world: int
    worlds: int
    size: int
    min_size: int
    max_size: int
    resetting: bool
    resets: dict[str, int]
    reset_seconds: float = 0.0
    cooling: int = 0
    slow_workers: int = 0
    ranks: dict[int, int] = field(default_factory=dict)
    recent: tuple[Reset, ...] = ()


class Board:
    """The memory in which the launcher keeps it.

    Raises
    ------
    OSError
        The system makes no memory without a name.
    """

    def __init__(self) -> None:
        self.descriptor = linux.memfd_create(NAME)
        self._written = b""

    def write(self, job: ElasticJob) -> None:
        """Have readers find this from now on."""
        told = json.dumps(asdict(job)).encode()
        content = b"%08x %08x " % (len(told), zlib.crc32(told)) + told
        if content != self._written:
            os.pwrite(self.descriptor, content, 0)
            self._written = content

    def close(self) -> None:
        """Let it go; who holds it open goes on reading."""
        os.close(self.descriptor)


def read(descriptor: int) -> ElasticJob | None:
    """Read what a launcher has written.

    Parameters
    ----------
    descriptor : int

    Returns
    -------
    ElasticJob or None
        None if there is nothing yet, or what another version has written.
    """
    for _ in range(TRIES):
        content = os.pread(descriptor, min(os.fstat(descriptor).st_size, LARGEST), 0)
        if not content:
            return None
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            length, check, rest = int(content[:8], 16), int(content[9:17], 16), content[18:]
            if zlib.crc32(told := rest[:length]) == check:
                return _parsed(parse_json(told))
    return None


def _parsed(told: dict[str, Any]) -> ElasticJob:
    """The job, with each field of the kind that readers compute with."""
    counts = {name: whole(told, name, 0, MOST) for name in COUNTS}
    ranks = {natural(slot, MOST): whole(told["ranks"], slot, -1, MOST) for slot in told["ranks"]}
    resets = {str(cause): whole(told["resets"], cause, 0, MOST) for cause in told["resets"]}
    recent = tuple(
        Reset(
            whole(each, "number", 0, MOST),
            number(each, "time", 0, 1e11),
            text(each, "cause"),
            text(each, "text"),
            number(each, "seconds", 0, 1e11),
        )
        for each in told["recent"]
    )
    if None in ranks:
        raise ReadError("a slot is no number")
    return ElasticJob(
        **counts,
        resetting=bool(told["resetting"]),
        resets=resets,
        reset_seconds=number(told, "reset_seconds", 0, 1e11),
        ranks={slot: rank for slot, rank in ranks.items() if slot is not None},
        recent=recent,
    )
