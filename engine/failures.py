"""Tell the other ranks of calls that failed on this rank alone, before they had submitted anything.

A tensor of the wrong kind, a root that is no rank, a compressor that raises: the rank that makes such a call gets the
exception. The others have brought the operation, or will. So the rank announces its failure in the place of the
operation, under the operation's name or number: every rank raises an error that names the rank, the line and the
exception, and unnamed operations stay in step.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

from . import readable
from .errors import DuplicateNameError, ForkedError, NotInitializedError, UnsupportedTensorError, WorldError
from .native import core
from .process_sets import ProcessSet

# Errors that are not told: the end of the world, which every rank learns of, and a name that is in flight.
_OTHERWISE = DuplicateNameError, ForkedError, NotInitializedError, WorldError
ROOT = "root_rank is a whole number, that of a rank"
SPLITS = "splits holds whole numbers, one for each rank"


def announce(among: ProcessSet | core.Engine, kind: str, name: str | None, error: Exception) -> None:
    """Tell the other ranks of a process set that a call of this rank has failed with `error` and submitted nothing.

    Parameters
    ----------
    among : ProcessSet or core.Engine
    kind : str
        Kind of the operation that was called: `allreduce`, `broadcast`, `allgather`, `alltoall` or `reducescatter`.
    name : str or None
        Name that it was called with, if any.
    error : Exception
        The exception, which the caller raises.
    """
    engine = among if isinstance(among, core.Engine) else getattr(among, "_engine", None)
    if engine is not None and not isinstance(error, _OTHERWISE):
        engine.fail(kind, name, readable.whole_exception(error))


def whole_numbers(values: Iterable[Any], what: str, among: ProcessSet, kind: str, name: str | None) -> tuple[int, ...]:
    """Take whole numbers that a collective is called with, for a framework that would cast others.

    Parameters
    ----------
    values : iterable
        Integers of Python or of any framework.
    what : str
        What they are, for the error, such as `splits holds whole numbers, one for each rank`.
    among, kind, name
        As of `announce`.

    Raises
    ------
    UnsupportedTensorError
        One is something else, such as a float; the other ranks are told.
    """
    try:
        return tuple(index(value) for value in values)
    except TypeError as error:
        refusal = UnsupportedTensorError(f"{what}: {error}")
        announce(among, kind, name, refusal)
        raise refusal from None
