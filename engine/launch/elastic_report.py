"""What an elastic job tells of its workers: why a world is made, what a worker's last words were, how the job ended."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from .. import readable
from ..elastic.causes import Cause
from ..elastic.places import Place
from ..exit_report.report import NOTHING, ExitReport
from ..host import processes
from .output import Display
from .report import QUOTE, TAIL_LINES, last_words, tail_lines
from .supervisor import Outcome
from .verdict import traceback_span

# Exceptions with which a worker ends because of something that it was told.
_TOLD = ("CalledOff", "ElasticTimeoutError", "HostsUpdatedInterrupt", "JobOver", "RendezvousError")
_PACKAGE = Path(__file__).parents[1]
_LINE = re.compile(r'^\s+File "(?P<file>.+)", line (?P<line>[0-9]{1,9})')
_NO_PROGRAM = re.compile(r"^\S+: (can't open file .+|No module named [\w.]+)$")  # as Python says it of its arguments


@dataclass(frozen=True)
class Result(Outcome):
    """How an elastic job ended.

    Attributes
    ----------
    good : bool
        Whether the training is complete.
    code : int
        The launcher's exit code.
    lines : tuple of str
        What the user is told.
    """

    good: bool = False
    code: int = 1
    lines: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether the training is not complete."""
        return not self.good


@dataclass
class Last:
    """The end of a worker that failed.

    Attributes
    ----------
    code : int
        As of `End.code`.
    path : Path
        Of the stderr of its slot.
    words : list of str
        The end of its stderr.
    report : ExitReport
    """

    code: int
    path: Path
    words: list[str]
    report: ExitReport = NOTHING

    @property
    def not_run(self) -> bool:
        """Whether there was no program to run, so that another try would come to the same."""
        return self.code in (126, 127) or (
            self.code in (1, 2) and bool(self.words) and _NO_PROGRAM.match(self.words[-1]) is not None
        )

    @property
    def exception(self) -> str:
        """Type and line of the exception of its own with which it ended; empty if there is none."""
        raised = self.report.raised
        if raised is None or raised.consequence or raised.type in _TOLD or not raised.file:
            return ""
        return f"{readable.plain(raised.type)} in {readable.plain(raised.file)}, line {raised.line}"

    def quoted(self) -> list[str]:
        """Of its last words what the report shows: the exception and the program's line, where there is one.

        All the rest of a traceback was on the screen when the worker wrote it.
        """
        span = traceback_span(self.words)
        if span is None:
            return last_words(self.words)
        start, stop = span
        lines, more = self.words[start:stop], self.words[stop:]
        place = _place(lines)
        frame = [] if place is None else [lines[place], *takewhile(_is_code, lines[place + 1 : -1])]
        return [*frame, lines[-1], *takewhile(lambda line: line[:1].isspace(), more[:TAIL_LINES])]


def _place(lines: Sequence[str]) -> int | None:
    """The line of a traceback that names the innermost place in the program, or of all if that is in the engine."""
    found = [(number, place["file"]) for number, line in enumerate(lines) if (place := _LINE.match(line))]
    own = [number for number, file in found if not _is_engines(file)]
    return own[-1] if own else found[-1][0] if found else None


def _is_engines(file: str) -> bool:
    """Whether a file is the engine's, wherever that is installed on the worker's host."""
    _, within, name = file.rpartition("/engine/")
    return file.startswith("engine_ext/") or (bool(within) and (_PACKAGE / name).is_file())


def _is_code(line: str) -> bool:
    """Whether a line of a traceback shows code, and names no place."""
    return line[:1].isspace() and _LINE.match(line) is None


def last_of(code: int, report: ExitReport, stderr: Display, since: int) -> Last:
    """Return the end of a worker, which has written from so many bytes of its slot's stderr on."""
    return Last(code, stderr.path, tail_lines(*stderr.tail(since)), report)


def how(code: int, came: bool) -> str:
    """Say how a worker ended, as the end of a sentence of which it is the subject."""
    never = "" if came else ", and never came to elastic.run"
    return (f"ended with exit code {code}" if code >= 0 else f"was killed by {processes.signal_name(-code)}") + never


def reason(cause: Cause, places: Mapping[int, Place]) -> str:
    """Say why a world has ended: the worker that is to blame by its rank in it, if it had one."""
    place = None if cause.worker is None else places.get(cause.worker)
    if cause.worker is None or place is None:
        return cause.text
    before, _, what = cause.text.partition(f"worker {cause.worker} in {place.slot}: ")
    who = f"rank {place.rank} (worker {cause.worker} on {place.slot.host})"
    if not before and what:
        return f"{who} {what}"
    return f"of {who}: {cause.text}"


def resets(causes: Sequence[Cause]) -> list[str]:
    """Say how often worlds have ended, and why; the same in a row once."""
    if not causes:
        return []
    lines = [f"the job had {len(causes)} reset{'s' * (len(causes) > 1)}"]
    lines += [f"  reset {number}: {cause.text}" for number, cause in enumerate(causes, 1)]
    if len(lines) > 12:
        lines[6:-5] = [f"  ... {len(lines) - 11} more"]
    return lines


def first_failure(cause: Cause | None, why: str, last: Last | None) -> list[str]:
    """The end of the report on a job that has failed: why it ends, then the first cause, last on the screen."""
    ends = why.split("\n")
    if cause is None:
        return [*ends[1:], f"first failure: {ends[0]}"]
    lines = [line for line in ends if line != cause.text]
    if last is None or not last.words:
        silent = "" if last is None else "; it wrote nothing to stderr"
        return [*lines, f"first failure: {cause.text}{silent}"]
    # Who kills a process asks it nothing: what it has written is what it did before.
    which = "before that it had written to" if last.code == -signal.SIGKILL else "from its"
    lines.append(f"first failure: {cause.text}; {which} stderr ({last.path}):")
    return lines + [f"{QUOTE}{line}" for line in last.quoted()]
