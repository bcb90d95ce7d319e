"""Announcement of calls that failed on this rank alone, before they had submitted anything, to the other ranks.

Examples are a tensor of the wrong kind, a root that is not a rank, and a compressor that raises. The caller gets the
exception, but the other ranks have submitted the operation, or will. So this rank announces its failure in place of the
operation, under the operation's name or number. Every rank then raises an error that names the rank, the line and the
exception, and unnamed operations stay matched.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

from ..errors import DuplicateNameError, ForkedError, NotInitializedError, UnsupportedTensorError, WorldError
from ..errors.formatting import format_whole_exception
from ..native import core
from .process_sets import ProcessSet

# Errors that are not announced: the end of the world, which every rank learns of, and a name that is in flight.
_OTHERWISE = DuplicateNameError, ForkedError, NotInitializedError, WorldError
ROOT = "root_rank is a whole number, that of a rank"
SPLITS = "splits holds whole numbers, one for each rank"


def announce_failure(among: ProcessSet | core.Engine, kind: str, name: str | None, error: Exception) -> None:
    """Announce to the other ranks of a process set that a call of this rank failed before it submitted anything.

    `kind` is `allreduce`, `broadcast`, `allgather`, `alltoall` or `reducescatter`; `error` is what the caller raises.
    """
    engine = among if isinstance(among, core.Engine) else getattr(among, "_engine", None)
    if engine is not None and not isinstance(error, _OTHERWISE):
        engine.fail(kind, name, format_whole_exception(error))


def whole_numbers(values: Iterable[Any], what: str, among: ProcessSet, kind: str, name: str | None) -> tuple[int, ...]:
    """Convert integer arguments of a collective, for a framework that would cast other numbers silently.

    `what` begins the error text, such as `splits holds whole numbers, one for each rank`; the last three are those of
    `announce_failure`. A value that is not an integer, such as a float, raises UnsupportedTensorError, which is
    announced to the other ranks.
    """
    try:
        return tuple(index(value) for value in values)
    except TypeError as error:
        refusal = UnsupportedTensorError(f"{what}: {error}")
        announce_failure(among, kind, name, refusal)
        raise refusal from None
