"""The cause of a failed job: the rank that caused it, as a pure function of the ranks' ends and exit reports.

When a rank dies, the engine makes every other rank raise an error that names it, within milliseconds. So many ranks
fail nearly at once, and one is the cause. The evidence, best first:

1. *Failures*: the exit report of rank M names the rank that its engine blames for the world's failure, and the time.
2. *Exceptions*: the exit report says that a `RankDiedError` or the like has ended rank M, so M is not the cause.
3. *Time*: of the ranks that failed by themselves, the first.

The stderr of ranks is for people, and decides nothing.

A blamed rank may have ended with exit code 0 (it left while others needed it), or not by itself (it was stopped).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...exit_report.report import ABSENT
from ..process.rank_end import RankEnd

UNREACHED = ("died", "lost", ABSENT)  # causes that ranks report of each other if they are disconnected
_LINKS = ("During handling of the above exception", "The above exception was the direct cause")
_TRACEBACK = re.compile(r"^(?:  [+|] )?(?:Exception Group )?Traceback \(most recent call last\):")


@dataclass(frozen=True)
class Claim:
    """One rank's report on the rank that caused the failure."""

    source: int  # rank that reports
    culprit: int | None  # rank that it blames, maybe itself; None if it only reports that another rank is the cause
    cause: str  # `died`, `raised`, `left`, `stalled`, `lost`, `absent`; empty if it is not known
    message: str  # text of the report; if the cause is `absent`, with further lines of details
    time: float  # time of the report: seconds, CLOCK_REALTIME


@dataclass(frozen=True)
class FailureCause:
    """The first cause of a job's failure."""

    culprit: int  # rank that caused it
    claim: Claim | None  # earliest claim against the culprit, of another rank if there is one
    exit_code: int  # launcher's: the culprit's own if it failed by itself, else that of the first rank that did
    blames: dict[int, int | None]  # rank that each rank failing as a consequence blames; None if it is not known


def find_failure_cause(ends: Sequence[RankEnd], claims: Sequence[Claim]) -> FailureCause | None:
    """Find the first cause of a job's failure; None if no rank failed by itself.

    `ends` are those of all ranks. `claims` are of failures and exceptions; the times of the former are more exact.
    """
    failures = sorted((end for end in ends if end.failed), key=lambda end: end.time)
    if not failures:
        return None
    ranks = {end.rank for end in ends} | {None}
    claims = sorted((claim for claim in claims if claim.culprit in ranks), key=lambda claim: claim.time)
    blames: dict[int, int | None] = {}
    for claim in claims:
        if claim.culprit != claim.source:
            blames.setdefault(claim.source, claim.culprit)
    own = {end.rank: end for end in failures}
    # Rank 0's host decides on the claims of hosts. Only a host that has lost contact to it claims that rank 0 has gone.
    if blames.get(0) is not None and not (0 in own and own[0].code < 0):
        claims = [claim for claim in claims if claim.culprit != 0 or claim.cause not in UNREACHED]
    since = {end.rank: end.time for end in failures if end.rank not in blames}
    for claim in claims:
        if claim.culprit is not None:
            culprit = _follow_blames(claim.culprit, blames)
            since[culprit] = min(claim.time, since.get(culprit, claim.time))
    if not since:
        since = {end.rank: end.time for end in failures}

    def sort_key(rank: int) -> tuple[float, bool, int]:
        killed = rank in own and own[rank].code < 0
        return since[rank], not killed, rank

    culprit = min(since, key=sort_key)
    told = [claim for claim in claims if claim.culprit == culprit]
    return FailureCause(
        culprit=culprit,
        claim=min(told, key=lambda claim: claim.source == culprit, default=None),
        exit_code=own.get(culprit, failures[0]).exit_code,
        blames={rank: to for rank, to in blames.items() if rank != culprit},
    )


def _follow_blames(rank: int, blames: Mapping[int, int | None]) -> int:
    """Follow the blames from a rank to the last one; return the rank itself if they form a circle."""
    seen = {rank}
    last = rank
    while (blamed := blames.get(last)) is not None:
        if blamed in seen:
            return rank
        last = blamed
        seen.add(last)
    return last


def claim_of(end: RankEnd) -> Claim | None:
    """Return the claim that a rank's exit report contains.

    It is of the failure of its world, or else of its exception, if that is the consequence of another rank's failure;
    None if the report has neither.
    """
    failure, raised = end.report.failure, end.report.raised
    if failure is not None:
        return Claim(end.rank, failure.rank, failure.cause, failure.message, failure.time)
    if raised is None or not raised.consequence or not end.failed or raised.culprit == end.rank:
        return None
    return Claim(end.rank, raised.culprit, raised.cause, raised.message.removeprefix(f"rank {end.rank}: "), end.time)


def traceback_span(lines: Sequence[str]) -> tuple[int, int] | None:
    """Find the last Python traceback, including those to which it is chained ("During handling of the above ...").

    The result has the index of its first line, and of the line after the first line of the exception's text; None:
    there is no traceback.
    """
    starts = [index for index, line in enumerate(lines) if _TRACEBACK.match(line)]
    if not starts:
        return None
    start = last = starts.pop()
    while starts and any(line.startswith(_LINKS) for line in lines[max(starts[-1], start - 3) : start]):
        start = starts.pop()
    unindented = (index for index in range(last + 1, len(lines)) if lines[index] and not lines[index][0].isspace())
    return start, next(unindented, len(lines) - 1) + 1
