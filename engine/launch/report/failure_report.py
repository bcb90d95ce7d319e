"""The report on a failed job: a summary of the other ranks, then the first cause as the last lines on the screen."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...errors import BY_CAUSE, MismatchError
from ...exit_report.report import ABSENT, ExitReport
from ...host import stacks
from ...text import readable
from ...text.bounded_reader import parse_natural
from ..process.output import TAIL_BYTES
from ..process.rank_end import RankEnd, describe_code
from .failure_cause import FailureCause, claim_of, find_failure_cause, traceback_span

QUOTE = "  | "
TAIL_LINES = 20
TRACEBACK_LINES = 200
LINE_CHARACTERS = 2000
# Text that the engine's errors put around a reason: the blamed rank, and the rank that noticed it. The report has both.
_FRAME = re.compile(
    rf"^rank \d+ (?:{'|'.join(kind.did for kind in BY_CAUSE.values())}): | \(rank \d+ noticed it first\)$"
)
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_SENT = re.compile(r"\b(?:rank ([0-9]{1,9})|ranks [\d, .-]+) sent ")


def read_tail(path: Path) -> list[str]:
    """Read the end of a rank's stderr, as lines of `tail_lines`; empty without a file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            data = file.read()
    except OSError:
        return []
    return tail_lines(data, size > TAIL_BYTES)


def tail_lines(data: bytes, cut: bool) -> list[str]:
    """Split the end of a rank's stderr into lines, without colours, overwritten text and blank lines at the end.

    If the beginning was `cut` off, the first line is incomplete, and is dropped.
    """
    lines = data.decode(errors="backslashreplace").split("\n")
    lines = [_COLOUR.sub("", line.rstrip("\r").rpartition("\r")[2])[:LINE_CHARACTERS] for line in lines]
    if cut:
        del lines[0]
    while lines and not lines[-1].strip():
        lines.pop()
    return lines


def find_first_failure(ends: Sequence[RankEnd], clocks: Mapping[int, float] | None = None) -> FailureCause | None:
    """Find the first failure of a job from the ends and exit reports of all ranks; None if none failed by itself.

    `clocks` has the seconds by which the launcher's clock is ahead of each rank's host; 0 for ranks that are missing.
    """
    ahead = {} if clocks is None else clocks
    claims = []
    for end in ends:
        claim = claim_of(end)
        if claim is not None:
            by_host = end.report.failure is not None  # its time is from the clock of the rank's host
            claims.append(replace(claim, time=claim.time + ahead.get(end.rank, 0.0)) if by_host else claim)
    return find_failure_cause(ends, claims)


def flight_records(directory: Path) -> list[int]:
    """Return the ranks that have left a flight record in the job's directory."""
    found = (parse_natural(path.parent.name.removeprefix("rank.")) for path in directory.glob("rank.*/flight.json"))
    return sorted(rank for rank in found if rank is not None)


def failure_lines(
    cause: FailureCause,
    ends: Sequence[RankEnd],
    directory: Path,
    started: float,
    hosts: Mapping[int, str] | None = None,
) -> list[str]:
    """Return the report on a failed job; the first cause comes last.

    `ends` are those of all ranks. `started` is the start of the ranks, by the present setting of CLOCK_REALTIME.
    `hosts` has the host of each rank; None: all ranks are on this host.
    """
    by_rank = {end.rank: end for end in ends}
    end = by_rank[cause.culprit]
    lines = [f"other ranks: {text}" for text in _summarize_others(cause, ends)]
    lines += _locate_culprit(cause, end, directory / f"rank.{end.rank}" / stacks.NAME)
    if cause.claim is not None and cause.claim.cause == ABSENT:
        lines += [f"rank {cause.claim.source}: {line.strip()}" for line in cause.claim.message.split("\n")[1:]]
    path = directory / f"rank.{end.rank}" / "stderr"
    extract = last_words(read_tail(path))
    odd = odd_one_out(end.report)
    if odd is not None:
        lines.append(f"the ranks disagree: rank {odd} is the odd one out, and rank {end.rank} was the first to end")
    host = socket.gethostname() if hosts is None else hosts[end.rank]
    lines.append(f"first failure: rank {end.rank} on {host}: {_describe_cause(cause, end, started)}")
    if extract:
        lines[-1] += f"; the end of its stderr ({path}):"
        lines += [f"{QUOTE}{line}" for line in extract]
    else:
        lines[-1] += "; nothing of its stderr had come" if end.lost else "; it wrote nothing to stderr"
    return lines


def odd_one_out(report: ExitReport) -> int | None:
    """Find the one rank that disagrees with all others, from the report of a rank that failed with a mismatch.

    A mismatch has the message `ranks disagree on 'x': ranks 0, 1 sent .., rank 2 sent ..`. None: there is no mismatch,
    or no single rank disagrees with several others that agree.
    """
    raised = report.raised
    if raised is None or raised.type != MismatchError.__name__:
        return None
    sides = _SENT.findall(raised.message.partition("\n")[0])
    alone = [int(rank) for rank in sides if rank]
    return alone[0] if len(sides) == 2 and len(alone) == 1 else None


def _locate_culprit(cause: FailureCause, end: RankEnd, path: Path) -> list[str]:
    """Return a line on where the culprit stalled or crashed; empty if that is not known or does not apply."""
    stalled = cause.claim is not None and cause.claim.cause == "stalled"
    if not stalled and -end.code not in stacks.CRASHES:
        return []
    if place := stacks.find_position(path):
        return [f"rank {end.rank} {'stood' if stalled else 'crashed'} at {place} (all threads: {path})"]
    if stalled and end.by_launcher and stacks.has_stacks(path) is False:
        return [
            f"rank {end.rank} did not answer where it stands: it was stopped, the kernel holds it, or its program has "
            "a handler of its own for SIGRTMIN+9"
        ]
    return []


def _describe_cause(cause: FailureCause, end: RankEnd, started: float) -> str:
    """Return a text on what the culprit did, in one line."""
    after = f"{max(0.0, end.time - started):.1f} s after the start"
    claim = cause.claim
    said = "" if claim is None or claim.source == end.rank else _FRAME.sub("", claim.message).partition("\n")[0]
    word = f" (rank {claim.source}: {said})" if claim is not None and said else ""
    if end.lost:
        return f"lost with its host, whose agent {end.lost}, {after}"
    ending = "the launcher ended it" if end.by_launcher else f"{describe_code(end.code)},"
    if claim is not None and claim.cause == "lost" and (end.code >= 0 or end.by_launcher):
        return f"could not be reached by rank {claim.source}, and ran on; {ending} {after}{word}"
    if end.failed:
        hint = " (from outside; the kernel does this when memory runs out)" if end.code == -signal.SIGKILL else ""
        return f"{describe_code(end.code)}{hint}, {after}"
    if claim is not None and claim.cause == ABSENT:
        return f"did not come to engine.init; {ending} {after}{word}"
    if claim is not None and claim.cause == "stalled":
        return f"stood still; {ending} {after}{word}"
    if claim is not None and claim.cause == "left":
        return f"left while others needed it, {describe_code(end.code)}, {after}{word}"
    return f"{describe_code(end.code)}, {after}{word}"


def _summarize_others(cause: FailureCause, ends: Sequence[RankEnd]) -> list[str]:
    """Return a line for each group of other ranks that ended in the same way."""
    groups: dict[str, list[int]] = {}
    for end in ends:
        if end.rank == cause.culprit:
            continue
        text = "lost with its host" if end.lost else describe_code(end.code)
        if end.by_launcher:
            text = "ended by the launcher" + (f" ({text})" if end.code >= 0 else f", {text}")
        elif end.rank in cause.blames:
            blamed = cause.blames[end.rank]
            text += ", because another rank failed" if blamed is None else f", because of rank {blamed}"
        groups.setdefault(text, []).append(end.rank)
    return [f"{readable.format_ranks(ranks)}: {text}" for text, ranks in groups.items()]


def last_words(lines: list[str]) -> list[str]:
    """Return the last `TAIL_LINES` lines of a rank's stderr, preceded by its last traceback if that began earlier."""
    tail = max(0, len(lines) - TAIL_LINES)
    span = traceback_span(lines)
    if span is None or span[0] >= tail:
        return lines[tail:]
    start, stop = span
    shown = lines[start:stop]
    if len(shown) > TRACEBACK_LINES:
        half = TRACEBACK_LINES // 2
        shown = [*shown[:half], "...", *shown[-half:]]
    return [*shown, *lines[stop:]] if stop >= tail else [*shown, "...", *lines[tail:]]
