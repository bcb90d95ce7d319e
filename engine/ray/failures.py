"""Choice of the error that caused the others, from the errors of all ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from .. import errors
from ..errors.formatting import exception_text
from ..launch.errors import JobError
from ..text import readable
from .actor import Standing

GRACE = 5.0  # seconds that Ray has to report the end of a rank that others blame
SETTLE = 1.0  # seconds that the other ranks have to fail in turn


def collect_results(refs: Sequence[ray.ObjectRef[Any]], standings: Sequence[Standing]) -> list[Any]:
    """Wait for all ranks, and return their results by rank; `standings` are for messages.

    Raises the exception of the rank that failed first, as Ray raises it: a `RayTaskError` that also has the exception's
    class. A note names the rank and its location. If that rank's process ended, or cannot be reached, it raises
    JobError with `rank`.
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
            except RayError as error:
                failed[numbers[ref]] = error
        if failed:
            known = find_culprit(failed) in failed
            limit = time.monotonic() + (SETTLE if known else GRACE)
            end = limit if end is None else min(end, limit)
            if not done:
                break
    if failed:
        raise _make_first_error(failed, standings).with_traceback(
            None
        )  # drop the frames of Ray, which would hide the text
    return [values[rank] for rank in range(len(refs))]


def find_culprit(failed: dict[int, BaseException]) -> int:
    """Return the rank that failed first: one with an error of its own, or else the one that the others blame.

    If there are several, prefer one whose error does not come from the engine: a missing rank or a mismatched tensor is
    a consequence of a failure elsewhere.
    """
    own = [rank for rank, error in sorted(failed.items()) if find_blamed_rank(error) in (None, rank)]
    outside = [rank for rank in own if engine_error(failed[rank]) is None]
    return (outside or own or [rank for rank in map(find_blamed_rank, failed.values()) if rank is not None])[0]


def find_blamed_rank(error: BaseException) -> int | None:
    """Return the rank that an error names as the cause; None if it is an error of the rank's own."""
    found = engine_error(error)
    return found.rank if isinstance(found, errors.WorldError) else None


def engine_error(error: BaseException) -> errors.EngineError | None:
    """Return the engine's exception in an error that Ray raises; None if there is none."""
    return errors.of(error.cause if isinstance(error, RayTaskError) and error.cause is not None else error)


def _make_first_error(failed: dict[int, BaseException], standings: Sequence[Standing]) -> BaseException:
    rank = find_culprit(failed)
    others = [other for other in sorted(failed) if other != rank]
    followed = [other for other in others if engine_error(failed[other]) is not None]
    because = f"; {readable.format_ranks(followed)} failed because of it" if followed else ""
    if besides := [other for other in others if other not in followed]:
        because += f"; {readable.format_ranks(besides)} failed, too"
    where = f"rank {rank} of {len(standings)} failed first, on {standings[rank]}"
    error = failed.get(rank)
    if isinstance(error, RayActorError) and not isinstance(error, RayTaskError):
        return JobError(f"{where}{because}. Its process ended: {exception_text(error)}", rank)
    if error is not None:  # An exception of the user, or one of Ray's own classes, which Ray does not wrap.
        error.add_note(readable.plain_lines(f"{where}{because}"))
        return error
    told = next(iter(failed.values()))
    return JobError(
        f"{where}{because}. Ray has not told of it for {GRACE:g} s, but they say: {exception_text(told)}", rank
    )
