"""Who failed first: of the errors of all ranks the one that the others have followed from."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from .. import errors, readable
from ..launch.errors import JobError
from .actor import Standing

GRACE = 5.0  # seconds in which Ray tells of the rank that others have named
SETTLE = 1.0  # seconds in which the others, which follow, come to their end


def results(refs: Sequence[ray.ObjectRef[Any]], standings: Sequence[Standing]) -> list[Any]:
    """Wait for all ranks; what they return, by rank.

    Parameters
    ----------
    refs : sequence of ObjectRef
        By rank.
    standings : sequence of Standing
        Where they run.

    Raises
    ------
    Exception
        What the first rank to fail has raised, as Ray gives it: a `RayTaskError` that is an exception of the class, too.
        A note says which rank that was, and where.
    JobError
        Its process ended, or cannot be reached; `rank` tells which.
    """
    failed: dict[int, BaseException] = {}
    values: dict[int, Any] = {}
    pending = list(refs)
    numbers = {ref: rank for rank, ref in enumerate(refs)}
    end = None
    while pending:
        done, pending = ray.wait(pending, timeout=None if end is None else max(0.0, end - time.monotonic()))
        for ref in done:
            try:
                values[numbers[ref]] = ray.get(ref)
            except (RayTaskError, RayActorError) as error:
                failed[numbers[ref]] = error
        if failed:
            known = culprit(failed) in failed
            limit = time.monotonic() + (SETTLE if known else GRACE)
            end = limit if end is None else min(end, limit)
            if not done:
                break
    if failed:
        raise _first(failed, standings).with_traceback(None)  # whose frames are Ray's, and would bury the text
    return [values[rank] for rank in range(len(refs))]


def culprit(failed: dict[int, BaseException]) -> int:
    """The rank that failed first: one with an error of its own, else the one that the others name."""
    for rank, error in sorted(failed.items()):
        if blamed(error) in (None, rank):
            return rank
    return next(rank for rank in map(blamed, failed.values()) if rank is not None)


def blamed(error: BaseException) -> int | None:
    """The rank that an error names as the cause; None if it is an error of the rank's own."""
    cause = error.cause if isinstance(error, RayTaskError) and error.cause is not None else error
    found = errors.of(cause)
    return found.rank if isinstance(found, errors.WorldError) else None


def _first(failed: dict[int, BaseException], standings: Sequence[Standing]) -> BaseException:
    rank = culprit(failed)
    followed = [other for other in sorted(failed) if other != rank]
    because = f"; {readable.ranks(followed)} failed because of it" if followed else ""
    where = f"rank {rank} of {len(standings)} failed first, on {standings[rank]}"
    error = failed.get(rank)
    if isinstance(error, RayTaskError):
        error.add_note(f"{where}{because}")
        return error
    if error is not None:
        return JobError(f"{where}{because}. Its process ended: {error}", rank)
    told = next(iter(failed.values()))
    return JobError(f"{where}{because}. Ray has said nothing of it for {GRACE:g} s; {readable.ranks(followed)} said: {told}")
