"""Process sets: subsets of the world's ranks that communicate among themselves.

A process set has an engine of its own, with a schedule, a coordinator (its first rank) and memory in the file of the
world. So sets never wait for each other, even if they share ranks. Tensors on GPUs are the exception: a rank's device
executes those of all sets in one order. A failure of the world ends its sets, and vice versa.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections import Counter
from collections.abc import Iterable, Mapping
from operator import index
from typing import Any, Protocol

from ..errors import EngineError, NotInitializedError
from ..native import core
from ..text import readable

_call_numbers = itertools.count(1)
_RANK_LIMIT = 1 << 31  # beyond the ranks of every world

WAITING = (
    "this is an elastic job, in which nothing communicates before the function that elastic.run wraps is called: move "
    "this call into that function. A program that has none needs one (engine.elastic.run, docs/how-to/elastic.md), or "
    "has to be started without --min-np, --max-np and --host-discovery-script"
)


def next_call_number() -> int:
    """Return a number by which native calls find an engine, used for no other engine of this process."""
    return next(_call_numbers)


def explain_uninitialized() -> str:
    """Return the error text for callers in a process in which no engine runs."""
    text = "call engine.init() first; it has not been called, or engine.shutdown() has"
    if multiprocessing.parent_process() is None:
        return text
    return (
        f"{text}. This process is a worker of multiprocessing: started with 'spawn' or 'forkserver' (Python 3.14's "
        "default) it imports the script, and engine.init() does nothing in it. Move engine.init() and all that "
        'communicates under if __name__ == "__main__":'
    )


def parse_ranks(ranks: Any) -> tuple[int, ...]:
    """Return the ranks of a process set in ascending order.

    Any integers will do, also those of NumPy. Raises ValueError for anything else, or a rank twice.
    """
    try:
        if isinstance(ranks, str | bytes | Mapping):
            raise TypeError
        numbers = sorted(map(_parse_rank, ranks))
    except TypeError:
        raise ValueError(
            f"a process set is given as a list of ranks, such as [0, 1], and not as {readable.quote_value(ranks)}"
        ) from None
    if twice := sorted(number for number, count in Counter(numbers).items() if count > 1):
        raise ValueError(
            f"a process set has each rank once, and not {readable.format_ranks(twice)} several times, as in {numbers}"
        )
    return tuple(numbers)


def _parse_rank(rank: Any) -> int:
    """Return a rank as an int. `int` alone would truncate floats and parse texts."""
    try:
        if isinstance(rank, bool):
            raise TypeError
        number = index(rank)
    except TypeError:
        raise ValueError(
            f"{readable.quote_value(rank)} is no rank of a process set: ranks are whole numbers from 0 to size() - 1"
        ) from None
    if not 0 <= number < _RANK_LIMIT:
        raise ValueError(f"{number} is no rank of a process set: ranks count from 0 to size() - 1")
    return number


def check_ranks(ranks: tuple[int, ...], size: int, others: Mapping[tuple[int, ...], ProcessSet]) -> None:
    """Raise ValueError unless a set may have these ranks. `others` are the existing sets, by their ranks."""
    if not ranks or not (ranks[0] >= 0 and ranks[-1] < size):
        raise ValueError(f"a process set has at least one of the ranks 0 to {size - 1}, not {list(ranks)}")
    if ranks in others:
        raise ValueError(f"there is a process set with the ranks {list(ranks)} already: {others[ranks]!r}")


def check_sets(sets: Iterable[ProcessSet], size: int) -> None:
    """Raise ValueError for sets that are impossible in a world of this size.

    Each rank calls this by itself, before the rendezvous. Sets of communicators are checked when their ranks are known.
    """
    others: dict[tuple[int, ...], ProcessSet] = {tuple(range(size)): global_process_set}
    for each in sets:
        if each._communicator is None:
            check_ranks(each._ranks, size, others)
            others[each._ranks] = each


class Numbers:
    """Counters of objects of which every rank of a process set creates the same number, one counter for each kind.

    All frameworks in a process share them, so that two operations never get the same name. They are reset in each world
    of an elastic job, since new ranks have not seen the earlier worlds.
    """

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self.counts = Counter(counts or {})

    def next(self, kind: str) -> int:
        """Return the number of a new object of that kind; the first is 0, unless some were counted before."""
        self.counts[kind] += 1
        return self.counts[kind] - 1


class ProcessSet:
    """Subset of the world's ranks.

    Its ranks can use it once it was passed to `init` or `add_process_set`.

    Parameters
    ----------
    ranks_or_comm : iterable of int, or mpi4py communicator
        Ranks of the world, in any order. With a communicator, the ranks of its processes; collective among them.

    Attributes
    ----------
    ranks : list of int
        Ranks in ascending order; known from the start, or with a communicator once the engine runs. A new list each
        time.
    process_set_id : int or None
        Number of the set, equal on all ranks; 0 for the global set, None before it was added and after it was removed.
    numbers : Numbers
        Counters of objects of which all ranks of the set create the same number; a new object in each world of an
        elastic job.
    """

    def __init__(self, ranks_or_comm: Any) -> None:
        self.process_set_id: int | None = None
        self._call_number = next_call_number()
        self._communicator: Any = None
        self._ranks: tuple[int, ...] = ()
        self._world: core.Engine | None = None
        self._engine: core.Engine | None = None
        self._planned: int | None = None  # this process's rank in the world that it waits for
        self._lost = ""  # reason why a set of an earlier world is not in this one
        self.numbers = Numbers()
        self._reserved: Numbers | None = None  # counters at the start of the first world of an elastic job
        if hasattr(ranks_or_comm, "allgather") and hasattr(ranks_or_comm, "Get_rank"):
            self._communicator = ranks_or_comm
        else:
            self._ranks = parse_ranks(ranks_or_comm)

    @property
    def ranks(self) -> list[int]:
        """Ranks of the set in ascending order: a list as in Horovod, since scripts compare it with one."""
        return list(self._ranks)

    def included(self) -> bool:
        """Return whether this process is in the set."""
        if self._planned is not None:
            return self._planned in self._ranks
        self._check()
        return self._engine is not None

    def rank(self) -> int | None:
        """Return this process's rank within the set; None if it is not in it."""
        if self._planned is not None:
            return self._ranks.index(self._planned) if self._planned in self._ranks else None
        self._check()
        return None if self._engine is None else self._engine.rank

    def size(self) -> int:
        """Return the number of ranks in the set."""
        if self._planned is None:
            self._check()
        return len(self._ranks)

    @property
    def call_number(self) -> int:
        """Number by which programs of compiled frameworks name the set; 0 is the global set, even before `init`.

        It is never reused in this process. So a program that was compiled for a removed set is refused, and never runs
        in another set. The number may differ by rank.
        """
        self._check()
        return self._call_number

    @property
    def engine(self) -> core.Engine:
        """Native engine of the set.

        Raises
        ------
        NotInitializedError
            The set was not added, or the engine has been shut down since.
        EngineError
            This rank is not in the set.
        """
        engine = self._engine
        if engine is None:
            world = self._check()
            raise EngineError(
                f"rank {world.rank} is not in {self}: only its ranks call its operations; ask included() first"
            )
        return engine

    def __repr__(self) -> str:
        return f"ProcessSet({list(self._ranks)})"

    def __deepcopy__(self, memo: Any) -> ProcessSet:
        # A copy of a layer has the same ranks.
        return self

    def __reduce__(self) -> Any:
        # An unpickled set counts as not added.
        return ProcessSet, (self._ranks,)

    def _check(self) -> core.Engine:
        if self._world is None:
            if self._planned is not None:
                raise NotInitializedError(WAITING)
            raise NotInitializedError(
                self._lost
                or f"{self} is not there: give it to engine.init(process_sets=...) or engine.add_process_set(), on "
                "every rank"
            )
        return self._world

    def _enter(self, number: int, world: core.Engine, ranks: tuple[int, ...], engine: core.Engine | None) -> None:
        self.process_set_id, self._world, self._ranks, self._engine = number, world, ranks, engine
        self._planned, self._lost = None, ""

    def _leave_world(self) -> None:
        self.process_set_id = self._world = self._engine = self._planned = None

    def _begin_numbers(self) -> None:
        """Reset the counters in a new world of an elastic job, to their values before the first world."""
        self._reserved = self._reserved or self.numbers
        self.numbers = Numbers(self._reserved.counts)

    def _await_world(self, rank: int, ranks: tuple[int, ...]) -> None:
        """Note that this process waits for a world in which it will have that rank, and the set those ranks."""
        self._planned, self._ranks = rank, ranks

    def _record_loss(self, why: str) -> None:
        """Note the reason why the current world does not have the set."""
        self._planned, self._lost = None, why


class _GlobalProcessSet(ProcessSet):
    """Process set of all ranks."""

    def __init__(self) -> None:
        super().__init__(())

    def __repr__(self) -> str:
        return "global_process_set"

    def __reduce__(self) -> str:
        return "global_process_set"

    @property
    def call_number(self) -> int:
        return 0

    def _check(self) -> core.Engine:
        if self._world is None:
            raise NotInitializedError(explain_uninitialized() if self._planned is None else WAITING)
        return self._world


global_process_set = _GlobalProcessSet()


class ProcessSetEngines(Protocol):
    """Engines of a world's process sets, for services that observe them."""

    @property
    def engines(self) -> dict[int, core.Engine]:
        """Engines of the sets that this rank is in, by the set's number."""

    @property
    def largest_membership(self) -> int:
        """Largest number of engines on one rank, including that of the world; groups are counted by their members."""
