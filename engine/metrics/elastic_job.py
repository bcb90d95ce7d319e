"""State of an elastic job that its launcher publishes in anonymous shared memory (`Board`, `read`).

Ranks' pages cannot hold it: between two worlds no rank runs, and only the driver knows the cause of a reset.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from dataclasses import asdict, dataclass, field
from typing import Any

from ..host import linux
from ..text.bounded_reader import MIB, ReadError, get_number, get_text, get_whole, parse_json, parse_natural

NAME = "enginerun-elastic"  # name of the memory, in /proc/PID/fd
KEPT = 5  # resets that are published with their causes
LONGEST = 400  # maximum characters of a cause
LARGEST = 16 * MIB  # maximum bytes that are read of a launcher's state
MOST = 1 << 31  # upper bound of the numbers of workers, worlds and resets
COUNTS = ("world", "worlds", "size", "min_size", "max_size", "cooling", "slow_workers")
TRIES = 5  # maximum number of readings, as one may coincide with a write


@dataclass(frozen=True)
class Reset:
    """The end of a world after which the job went on."""

    number: int  # sequence number within the job
    time: float  # unix time
    cause: str  # one word
    text: str  # the cause in full
    seconds: float  # time until the next world ran, or until now


@dataclass(frozen=True)
class ElasticJob:
    """An elastic job at one moment."""

    world: int  # number of the newest world; 0 before the first
    worlds: int  # number of worlds that have run
    size: int  # ranks of the newest world
    min_size: int
    max_size: int
    resetting: bool  # whether the last world has ended and the next does not run yet
    resets: dict[str, int]  # number of resets by cause
    reset_seconds: float = 0.0  # time spent in resets, including the current one
    cooling: int = 0  # hosts excluded from new workers, temporarily or permanently
    slow_workers: int = 0  # workers removed because they slowed the others
    # Ranks in the newest world, by slot in which a worker runs; -1: no rank
    ranks: dict[int, int] = field(default_factory=dict)
    recent: tuple[Reset, ...] = ()  # most recent resets, oldest first


class Board:
    """Shared memory in which the launcher publishes the state of an elastic job.

    Raises OSError if the system cannot create anonymous memory.
    """

    def __init__(self) -> None:
        self.descriptor = linux.memfd_create(NAME)
        self._written = b""

    def write(self, job: ElasticJob) -> None:
        """Publish a state, which readers see from now on."""
        told = json.dumps(asdict(job)).encode()
        content = b"%08x %08x " % (len(told), zlib.crc32(told)) + told
        if content != self._written:
            os.pwrite(self.descriptor, content, 0)
            self._written = content

    def close(self) -> None:
        """Close this descriptor; processes that hold the memory open can still read it."""
        os.close(self.descriptor)


def read(descriptor: int) -> ElasticJob | None:
    """Read what a launcher has written; None if nothing is written yet, or another version wrote it."""
    for _ in range(TRIES):
        content = os.pread(descriptor, min(os.fstat(descriptor).st_size, LARGEST), 0)
        if not content:
            return None
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            length, check, rest = int(content[:8], 16), int(content[9:17], 16), content[18:]
            if zlib.crc32(told := rest[:length]) == check:
                return _parse_state(parse_json(told))
    return None


def _parse_state(told: dict[str, Any]) -> ElasticJob:
    """Parse the published state and check each field's type and range."""
    counts = {name: get_whole(told, name, 0, MOST) for name in COUNTS}
    ranks = {parse_natural(slot, MOST): get_whole(told["ranks"], slot, -1, MOST) for slot in told["ranks"]}
    resets = {str(cause): get_whole(told["resets"], cause, 0, MOST) for cause in told["resets"]}
    recent = tuple(
        Reset(
            get_whole(each, "number", 0, MOST),
            get_number(each, "time", 0, 1e11),
            get_text(each, "cause"),
            get_text(each, "text"),
            get_number(each, "seconds", 0, 1e11),
        )
        for each in told["recent"]
    )
    if None in ranks:
        raise ReadError("a slot is no number")
    return ElasticJob(
        **counts,
        resetting=bool(told["resetting"]),
        resets=resets,
        reset_seconds=get_number(told, "reset_seconds", 0, 1e11),
        ranks={slot: rank for slot, rank in ranks.items() if slot is not None},
        recent=recent,
    )
