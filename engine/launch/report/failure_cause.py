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
    """One rank's report on the rank that caused the failure.

    Attributes
    ----------
    source : int
        Rank that reports.
    culprit : int or None
        Rank that it blames, maybe itself; None if it only reports that another rank is the cause.
    cause : str
        `died`, `raised`, `left`, `stalled`, `lost`, `absent`; empty if it is not known.
    message : str
        Text of the report; if the cause is `absent`, with further lines of details.
    time : float
        Time of the report: seconds, CLOCK_REALTIME.
    """

    source: int
    culprit: int | None
    cause: str
    message: str
    time: float


@dataclass(frozen=True)
class FailureCause:
    """The first cause of a job's failure.

    Attributes
    ----------
    culprit : int
        Rank that caused it.
    claim : Claim or None
        Earliest claim against the culprit, of another rank if there is one.
    exit_code : int
        Exit code of the launcher: the culprit's own if it failed by itself, else that of the first rank that did.
    blames : dict of int to int or None
        Rank that each rank failing as a consequence blames; None if it is not known.
    """

    culprit: int
    claim: Claim | None
    exit_code: int
    blames: dict[int, int | None]


def find_failure_cause(ends: Sequence[RankEnd], claims: Sequence[Claim]) -> FailureCause | None:
    """Find the first cause of a job's failure.

    Parameters
    ----------
    ends : sequence of RankEnd
        Ends of all ranks.
    claims : sequence of Claim
        Claims of failures and exceptions; the times of the former are more exact.

    Returns
    -------
    FailureCause or None
        None if no rank failed by itself.
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

    Parameters
    ----------
    end : RankEnd
        End of the rank.

    Returns
    -------
    Claim or None
        Claim of the failure of its world, or else of its exception, if that is the consequence of another rank's
        failure; None if the report has neither.
    """
    failure, raised = end.report.failure, end.report.raised
    if failure is not None:
        return Claim(end.rank, failure.rank, failure.cause, failure.message, failure.time)
    if raised is None or not raised.consequence or not end.failed or raised.culprit == end.rank:
        return None
    return Claim(end.rank, raised.culprit, raised.cause, raised.message.removeprefix(f"rank {end.rank}: "), end.time)


def traceback_span(lines: Sequence[str]) -> tuple[int, int] | None:
    """Find the last Python traceback, including those to which it is chained ("During handling of the above ...").

    Returns
    -------
    tuple of int, or None
        Index of its first line, and of the line after the first line of the exception's text.
    """
    starts = [index for index, line in enumerate(lines) if _TRACEBACK.match(line)]
    if not starts:
        return None
    start = last = starts.pop()
    while starts and any(line.startswith(_LINKS) for line in lines[max(starts[-1], start - 3) : start]):
        start = starts.pop()
    unindented = (index for index in range(last + 1, len(lines)) if lines[index] and not lines[index][0].isspace())
    return start, next(unindented, len(lines) - 1) + 1
