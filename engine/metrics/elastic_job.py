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

from ..host import linux

NAME = "enginerun-elastic"  # name of the memory, in /proc/PID/fd
KEPT = 5  # resets of which the cause is told
LONGEST = 400  # characters of a cause
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
        text = json.dumps(asdict(job)).encode()
        content = b"%08x %08x " % (len(text), zlib.crc32(text)) + text
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
        content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        if not content:
            return None
        with contextlib.suppress(ValueError, TypeError, KeyError):
            length, check, rest = int(content[:8], 16), int(content[9:17], 16), content[18:]
            if zlib.crc32(text := rest[:length]) == check:
                return _parsed(json.loads(text))
    return None


def _parsed(told: dict[str, Any]) -> ElasticJob:
    ranks = {int(number): rank for number, rank in told.pop("ranks").items()}
    recent = tuple(Reset(**each) for each in told.pop("recent"))
    return ElasticJob(**told, ranks=ranks, recent=recent)
