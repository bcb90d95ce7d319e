"""Reports of an elastic job: why a world is made, the last output of a failed worker, how the job ended."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from ...elastic.causes import Cause
from ...elastic.places import WorldPlace
from ...exit_report.report import NOTHING, ExitReport
from ...host import processes
from ...text.readable import replace_unprintable
from ..process.output import Display
from ..process.supervisor import Outcome
from .failure_cause import traceback_span
from .failure_report import QUOTE, TAIL_LINES, last_words, tail_lines

# Exceptions that a worker raises because of a message to it, and not because of its own failure.
_TOLD = ("CalledOff", "ElasticTimeoutError", "HostsUpdatedInterrupt", "JobOver", "RendezvousError")
_PACKAGE = Path(__file__).parents[2]
_LINE = re.compile(r'^\s+File "(?P<file>.+)", line (?P<line>[0-9]{1,9})')
_NO_PROGRAM = re.compile(r"^\S+: (can't open file .+|No module named [\w.]+)$")  # Python's message about its arguments


@dataclass(frozen=True)
class Result(Outcome):
    """The outcome of an elastic job."""

    good: bool = False  # whether the training is complete
    code: int = 1  # exit code of the launcher
    lines: tuple[str, ...] = ()  # lines of the report to the user

    @property
    def failed(self) -> bool:
        """True if the training is not complete."""
        return not self.good


@dataclass
class Last:
    """The end of a worker that failed."""

    code: int  # same as in `RankEnd.code`
    path: Path  # file of the stderr of its slot
    words: list[str]  # last lines of its stderr
    report: ExitReport = NOTHING

    @property
    def not_run(self) -> bool:
        """True if there was no program to run, so that another try would fail in the same way."""
        return self.code in (126, 127) or (
            self.code in (1, 2) and bool(self.words) and _NO_PROGRAM.match(self.words[-1]) is not None
        )

    @property
    def exception(self) -> str:
        """Type and place of the exception with which it ended, if that was its own failure; else empty."""
        raised = self.report.raised
        if raised is None or raised.consequence or raised.type in _TOLD or not raised.file:
            return ""
        return f"{replace_unprintable(raised.type)} in {replace_unprintable(raised.file)}, line {raised.line}"

    def quote_lines(self) -> list[str]:
        """Return the lines that the report quotes: the exception and the program's innermost frame, or the last lines.

        The rest of a traceback was shown when the worker wrote it.
        """
        span = traceback_span(self.words)
        if span is None:
            return last_words(self.words)
        start, stop = span
        lines, more = self.words[start:stop], self.words[stop:]
        place = _find_frame(lines)
        frame = [] if place is None else [lines[place], *takewhile(_is_code, lines[place + 1 : -1])]
        return [*frame, lines[-1], *takewhile(lambda line: line[:1].isspace(), more[:TAIL_LINES])]


def _find_frame(lines: Sequence[str]) -> int | None:
    """Return the index of a traceback's innermost frame outside of the engine, or of its innermost frame, or None."""
    found = [(number, place["file"]) for number, line in enumerate(lines) if (place := _LINE.match(line))]
    own = [number for number, file in found if not _is_engines(file)]
    return own[-1] if own else found[-1][0] if found else None


def _is_engines(file: str) -> bool:
    """Return whether a file belongs to the engine, wherever that is installed on the worker's host."""
    _, within, name = file.rpartition("/engine/")
    return file.startswith("engine_ext/") or (bool(within) and (_PACKAGE / name).is_file())


def _is_code(line: str) -> bool:
    """Return whether a line of a traceback shows code, and is not the line that names file and line."""
    return line[:1].isspace() and _LINE.match(line) is None


def last_of(code: int, report: ExitReport, stderr: Display, since: int) -> Last:
    """Return the end of a worker whose output begins at byte `since` of its slot's stderr."""
    return Last(code, stderr.path, tail_lines(*stderr.read_tail(since)), report)


def describe_end(code: int, came: bool) -> str:
    """Return a clause on how a worker ended, without a subject, such as `was killed by SIGKILL`."""
    never = "" if came else ", and never came to elastic.run"
    return (f"ended with exit code {code}" if code >= 0 else f"was killed by {processes.signal_name(-code)}") + never


def describe_cause(cause: Cause, places: Mapping[int, WorldPlace]) -> str:
    """Return a text on why a world has ended, which names the worker that caused it by its rank, if it had one."""
    place = None if cause.worker is None else places.get(cause.worker)
    if cause.worker is None or place is None:
        return cause.text
    before, _, what = cause.text.partition(f"worker {cause.worker} in {place.slot}: ")
    who = f"rank {place.rank} (worker {cause.worker} on {place.slot.host})"
    if not before and what:
        return f"{who} {what}"
    return f"of {who}: {cause.text}"


def describe_resets(causes: Sequence[Cause]) -> list[str]:
    """Return the lines on how often worlds have ended, and why; those in the middle of a long list are left out."""
    if not causes:
        return []
    lines = [f"the job had {len(causes)} reset{'s' * (len(causes) > 1)}"]
    lines += [f"  reset {number}: {cause.text}" for number, cause in enumerate(causes, 1)]
    if len(lines) > 12:
        lines[6:-5] = [f"  ... {len(lines) - 11} more"]
    return lines


def first_failure(cause: Cause | None, why: str, last: Last | None) -> list[str]:
    """Return the last lines of the report on a failed job: why it ends, then the first cause."""
    ends = why.split("\n")
    if cause is None:
        return [*ends[1:], f"first failure: {ends[0]}"]
    lines = [line for line in ends if line != cause.text]
    if last is None or not last.words:
        silent = "" if last is None else "; it wrote nothing to stderr"
        return [*lines, f"first failure: {cause.text}{silent}"]
    # A process killed by SIGKILL could not react: its output is from before.
    which = "before that it had written to" if last.code == -signal.SIGKILL else "from its"
    lines.append(f"first failure: {cause.text}; {which} stderr ({last.path}):")
    return lines + [f"{QUOTE}{line}" for line in last.quote_lines()]
