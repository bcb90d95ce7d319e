"""Binding of ranks to processors, by the same rule for all measurements."""

from __future__ import annotations

import os
from collections.abc import Sequence


def list_processors() -> list[int]:
    """Return the processors this process may use, in order."""
    return sorted(os.sched_getaffinity(0))


def select_processors(rank: int, ranks: int, processors: Sequence[int]) -> list[int]:
    """Return a rank's processors: one of its own if there are enough, else all, as `enginerun` does.

    >>> [select_processors(r, 2, [0, 1, 2, 3]) for r in range(2)]
    [[0], [1]]
    >>> select_processors(3, 4, [0, 1])
    [0, 1]
    """
    return [processors[rank]] if ranks <= len(processors) else list(processors)


def bind_rank(rank: int, ranks: int, processors: Sequence[int]) -> None:
    """Bind the calling thread, and all threads that it starts from now on."""
    os.sched_setaffinity(0, select_processors(rank, ranks, processors))
