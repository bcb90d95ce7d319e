"""The verdict on a failed job: the rank to blame, as a pure function of how the ranks ended and what they reported.

When a rank dies, the engine makes every other rank raise an error that names it, within milliseconds. So many ranks
fail nearly at once, and one is the cause. What is known, best first:

1. *Failures*: the exit report of rank M says whom its engine blames for the world's failure, and when it learned of it.
2. *Exceptions*: the exit report says that a `RankDiedError` or its like has ended rank M: it is a consequence.
3. *Time*: of the ranks that failed by themselves, the first.

What ranks write to stderr is for people, and decides nothing.

A blamed rank may have ended well (it left while others needed it) or not at all (it was stopped).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..exit_report.report import NOTHING, ExitReport
from ..host.processes import signal_name

UNREACHED = ("died", "lost", "absent")  # what ranks say of each other that are cut off
_LINKS = ("During handling of the above exception", "The above exception was the direct cause")
_TRACEBACK = re.compile(r"^(?:  [+|] )?(?:Exception Group )?Traceback \(most recent call last\):")


@dataclass(frozen=True)
class End:
    """How a rank's process ended.

    Attributes
    ----------
    rank : int
    code : int
        Exit code; minus the signal's number if one killed it.
    time : float
        Seconds, CLOCK_REALTIME.
    by_launcher : bool
        Whether the launcher had sent it a signal by then.
    lost : str
        Why nobody could see its end: how the agent of its host was lost. Empty: its end was seen.
    report : ExitReport
        What it reported before.
    """

    rank: int
    code: int
    time: float
    by_launcher: bool = False
    lost: str = ""
    report: ExitReport = NOTHING

    @property
    def failed(self) -> bool:
        """Whether it failed, and nobody asked it to end."""
        return self.code != 0 and not self.by_launcher

    @property
    def exit_code(self) -> int:
        """The exit code as a shell gives it: 128 + the signal's number for a killed process."""
        return 128 - self.code if self.code < 0 else self.code


@dataclass(frozen=True)
class Claim:
    """One rank's word on who is to blame.

    Attributes
    ----------
    source : int
        The rank that says so.
    culprit : int or None
        The rank that it blames, maybe itself; None if it only says that it is not to blame.
    cause : str
        `died`, `raised`, `left`, `stalled`, `lost`, `absent`; empty if it does not say.
    message : str
        Of an absence with the lines that say more.
    time : float
        Seconds, CLOCK_REALTIME.
    """

    source: int
    culprit: int | None
    cause: str
    message: str
    time: float


@dataclass(frozen=True)
class Verdict:
    """The first cause.

    Attributes
    ----------
    culprit : int
        The rank to blame.
    claim : Claim or None
        The earliest word against it: of another rank, if there is one.
    exit_code : int
        What the launcher exits with: the culprit's own code if it failed by itself, else that of the first who did.
    blames : dict of int to int or None
        Whom each consequence blames, as far as it says.
    """

    culprit: int
    claim: Claim | None
    exit_code: int
    blames: dict[int, int | None]


def judge(ends: Sequence[End], claims: Sequence[Claim]) -> Verdict | None:
    """Find the first cause.

    Parameters
    ----------
    ends : sequence of End
        Every rank's.
    claims : sequence of Claim
        Failures and exceptions; those of failures have the better time.

    Returns
    -------
    Verdict or None
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
    # Rank 0's host judges what hosts claim; only one that has lost it says, of its own, that rank 0 is gone.
    if blames.get(0) is not None and not (0 in own and own[0].code < 0):
        claims = [claim for claim in claims if claim.culprit != 0 or claim.cause not in UNREACHED]
    since = {end.rank: end.time for end in failures if end.rank not in blames}
    for claim in claims:
        if claim.culprit is not None:
            culprit = _root(claim.culprit, blames)
            since[culprit] = min(claim.time, since.get(culprit, claim.time))
    if not since:
        since = {end.rank: end.time for end in failures}

    def order(rank: int) -> tuple[float, bool, int]:
        killed = rank in own and own[rank].code < 0
        return since[rank], not killed, rank

    culprit = min(since, key=order)
    told = [claim for claim in claims if claim.culprit == culprit]
    return Verdict(
        culprit=culprit,
        claim=min(told, key=lambda claim: claim.source == culprit, default=None),
        exit_code=own.get(culprit, failures[0]).exit_code,
        blames={rank: to for rank, to in blames.items() if rank != culprit},
    )


def _root(rank: int, blames: Mapping[int, int | None]) -> int:
    """Follow blame to its end; where ranks blame each other in a circle, stay with the first."""
    seen = {rank}
    last = rank
    while (blamed := blames.get(last)) is not None:
        if blamed in seen:
            return rank
        last = blamed
        seen.add(last)
    return last


def claim_of(end: End) -> Claim | None:
    """Take a rank's word on another rank from its exit report.

    Parameters
    ----------
    end : End
        How it ended.

    Returns
    -------
    Claim or None
        What it knew of the failure of its world; else what its exception says, if that follows from another rank's
        deed; None if it says neither.
    """
    failure, raised = end.report.failure, end.report.raised
    if failure is not None:
        return Claim(end.rank, failure.rank, failure.cause, failure.message, failure.time)
    if raised is None or not raised.consequence or not end.failed or raised.culprit == end.rank:
        return None
    return Claim(end.rank, raised.culprit, raised.cause, raised.message.removeprefix(f"rank {end.rank}: "), end.time)


def traceback_span(lines: Sequence[str]) -> tuple[int, int] | None:
    """Find the last Python traceback, with those it is chained to ("During handling of the above exception ...").

    Parameters
    ----------
    lines : sequence of str

    Returns
    -------
    tuple of int, or None
        Index of its first line, and of the line after the exception's first.
    """
    starts = [index for index, line in enumerate(lines) if _TRACEBACK.match(line)]
    if not starts:
        return None
    start = last = starts.pop()
    while starts and any(line.startswith(_LINKS) for line in lines[max(starts[-1], start - 3) : start]):
        start = starts.pop()
    unindented = (index for index in range(last + 1, len(lines)) if lines[index] and not lines[index][0].isspace())
    return start, next(unindented, len(lines) - 1) + 1


def describe(code: int) -> str:
    """Say how a process ended.

    Parameters
    ----------
    code : int
        As in `End.code`.

    Returns
    -------
    str
        `exit code 3`, `killed by SIGKILL`.
    """
    return f"exit code {code}" if code >= 0 else f"killed by {signal_name(-code)}"
