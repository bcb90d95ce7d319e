"""The launcher's half of the exit report: it makes a rank's page, and reads the rank's report from it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import BY_CAUSE
from ..host import linux
from ..host.python_startup import EXIT_REPORTS, add_startup
from ..text.bounded_reader import ReadError, get_number, get_text, get_whole, parse_json
from .writer import LIMIT, OWNER, PAGE

NAME = "exit.json"  # file of the report in a rank's directory
ABSENT = "absent"  # cause of an exception: a rank did not come to the rendezvous
_CAUSES = (*BY_CAUSE, ABSENT)
_MOST_RANKS = 4096  # largest rank that a report may name
_TIMES = 1e11  # largest time that a report may name: seconds since 1970


@dataclass(frozen=True)
class Raised:
    """The exception that ended a rank's process."""

    type: str  # name of its class
    message: str = ""
    file: str = ""  # source file of the innermost frame outside of the engine; empty if there is none
    line: int = 0  # line in `file`; 0 if it is not known
    consequence: bool = False  # whether another rank caused it, according to an exception of the engine in its chain
    culprit: int | None = None  # number of that other rank; None if it is not known
    # Failure of that rank: `died`, `raised`, `left`, `stalled`, `lost`, `absent`; empty if it is not known
    cause: str = ""


@dataclass(frozen=True)
class Failure:
    """The failure of a rank's world, as that rank knows it."""

    rank: int  # the rank that caused it
    cause: str  # `died`, `raised`, `left`, `stalled`, `lost`; empty if the report names no such cause
    message: str
    time: float  # when the reporting rank learned of it: seconds, CLOCK_REALTIME of its host


@dataclass(frozen=True)
class ExitReport:
    """The report of a rank's process on its own end."""

    raised: Raised | None = None  # the exception that ended it; None if there was none, or if it could not be reported
    failure: Failure | None = None  # the failure of its world; None if it knew of none

    @classmethod
    def parse(cls, data: bytes) -> ExitReport:
        """Parse a report. A damaged or truncated one gives an empty report."""
        try:
            found = parse_json(data[: LIMIT + 1])
            raised, failure = found.get("raised"), found.get("failure")
            return cls(
                None if raised is None else _parse_raised(raised), None if failure is None else _parse_failure(failure)
            )
        except (AttributeError, ReadError):
            return cls()

    @property
    def empty(self) -> bool:
        """True if it holds neither an exception nor a failure."""
        return self.raised is None and self.failure is None

    @property
    def stalled_rank(self) -> int | None:
        """The rank that it blames for a stall; None if it blames none."""
        return self.failure.rank if self.failure is not None and self.failure.cause == "stalled" else None

    def to_bytes(self) -> bytes:
        """Serialize it for `parse`."""
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None}).encode()


NOTHING = ExitReport()


def make_page() -> int:
    """Make the page of a rank and return its descriptor; -1 if it cannot be made, and the rank can report nothing."""
    try:
        return linux.memfd_create("exit-report")
    except OSError:
        return -1


def make_environment(page: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of an environment that makes processes report into a page of this process.

    If the page is -1, it names none. Otherwise it has the startup hook of exit reports first in PYTHONPATH.
    """
    others = {name: value for name, value in environ.items() if name not in (PAGE, OWNER)}  # not an outer job
    if page < 0:
        return others
    return add_startup(others, EXIT_REPORTS) | {PAGE: f"{os.fstat(page).st_ino} /proc/{os.getpid()}/fd/{page}"}


def take_page(page: int) -> ExitReport:
    """Read and close the page of a rank whose process has ended."""
    if page < 0:
        return NOTHING
    try:
        return ExitReport.parse(os.pread(page, LIMIT + 1, 0))
    finally:
        os.close(page)


def _parse_raised(told: Any) -> Raised:
    """Return the exception that a process's report tells of; raise as `get_text` does if it is malformed."""
    culprit, cause = told.get("culprit"), told.get("cause")
    return Raised(
        type=get_text(told, "type"),
        message=get_text(told, "message"),
        file=get_text(told, "file"),
        line=get_whole(told, "line"),
        consequence=told.get("consequence") is True,
        culprit=None if culprit is None else get_whole(told, "culprit", 0, _MOST_RANKS),
        cause=cause if cause in _CAUSES else "",
    )


def _parse_failure(told: Any) -> Failure:
    cause = get_text(told, "cause")
    blamed, time = get_whole(told, "rank", -1, _MOST_RANKS), get_number(told, "time", -_TIMES, _TIMES)
    return Failure(blamed, cause if cause in BY_CAUSE else "", get_text(told, "message"), time)
