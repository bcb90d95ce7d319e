"""Process sets: subsets of the world's ranks that communicate among themselves.

A process set has an engine of its own, with a schedule, a coordinator (its first rank) and memory in the file of the
world. So sets never wait for each other, even if they share ranks. Tensors on GPUs are the exception: a rank's device
executes those of all sets in one order. A failure of the world ends its sets, and vice versa.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from operator import index
from typing import Any

from ..errors import EngineError, NotInitializedError, RendezvousError
from ..gpu.device import Device
from ..host.patience import Patience
from ..native import core
from ..net.rendezvous.set_connections import Connections, SetConnector
from ..net.unix_sockets import close_all
from ..text import readable

IDLE = 2.0  # seconds for threads to leave a set that has no operation in flight

_call_numbers = itertools.count(1)

WAITING = (
    "this is an elastic job, in which nothing communicates before the function that elastic.run wraps is called: move "
    "this call into that function. A program that has none needs one (engine.elastic.run, docs/elastic.md), or has to "
    "be started without --min-np, --max-np and --host-discovery-script"
)


def uninitialized() -> str:
    """Return the error text for callers in a process in which no engine runs."""
    text = "call engine.init() first; it has not been called, or engine.shutdown() has"
    if multiprocessing.parent_process() is None:
        return text
    return (
        f"{text}. This process is a worker of multiprocessing: started with 'spawn' or 'forkserver' (Python 3.14's "
        "default) it imports the script, and engine.init() does nothing in it. Move engine.init() and all that "
        'communicates under if __name__ == "__main__":'
    )


def _distinct(ranks: Iterable[int]) -> tuple[int, ...]:
    numbers = sorted(index(rank) for rank in ranks)  # `int` would truncate floats and parse texts.
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"a process set has each rank once, not {numbers}")
    return tuple(numbers)


def _check_ranks(ranks: tuple[int, ...], size: int, others: Mapping[tuple[int, ...], ProcessSet]) -> None:
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
            _check_ranks(each._ranks, size, others)
            others[each._ranks] = each


class Numbers:
    """Counters of objects of which every rank of a process set creates the same number, one counter for each kind."""

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
        self._call_number = next(_call_numbers)
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
            self._ranks = _distinct(ranks_or_comm)

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

    def _leave(self) -> None:
        self.process_set_id = self._world = self._engine = self._planned = None

    def _begin_numbers(self) -> None:
        """Reset the counters in a new world of an elastic job, to their values before the first world."""
        self._reserved = self._reserved or self.numbers
        self.numbers = Numbers(self._reserved.counts)

    def _await(self, rank: int, ranks: tuple[int, ...]) -> None:
        """Note that this process waits for a world in which it will have that rank, and the set those ranks."""
        self._planned, self._ranks = rank, ranks

    def _lose(self, why: str) -> None:
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
            raise NotInitializedError(uninitialized() if self._planned is None else WAITING)
        return self._world


global_process_set = _GlobalProcessSet()


class Registry:
    """Registry of the process sets of one world. Adding and removing a set is collective over the world.

    Parameters
    ----------
    world : core.Engine
        Engine of the world, from its start to its end.
    timeout : float
        Seconds to wait for operations in flight when a set is removed.
    device : Device
        Opener of this rank's GPU, with which each set of this rank is registered.
    links : SetConnector, optional
        Connector of a set's ranks; None with one host.
    """

    def __init__(self, world: core.Engine, timeout: float, device: Device, links: SetConnector | None = None) -> None:
        self._world = world
        self._timeout = timeout
        self._device = device
        self._links = links
        self._sets: dict[int, ProcessSet] = {}
        self._next = 1
        self._memberships: Counter[int] = Counter()
        global_process_set._enter(0, world, world.numbers, world)

    @property
    def added(self) -> list[ProcessSet]:
        """Sets that were added, in the order of their addition, without the global one."""
        return list(self._sets.values())

    @property
    def engines(self) -> dict[int, core.Engine]:
        """Engines of the sets that this rank is in, by the set's number."""
        return {number: each._engine for number, each in list(self._sets.items()) if each._engine is not None}

    def numbered(self, number: int) -> ProcessSet:
        """Return the set with that `process_set_id`; 0 is the global one."""
        if number == 0:
            return global_process_set
        if number not in self._sets:
            raise NotInitializedError(f"there is no process set with the number {number}; it may have been removed")
        return self._sets[number]

    def called(self, number: int) -> ProcessSet:
        """Return the set with that `call_number`."""
        found = [each for each in (global_process_set, *self._sets.values()) if each.call_number == number]
        if not found:
            raise NotInitializedError(
                f"there is no process set that compiled programs call {number}: it was removed, or engine.shutdown() "
                "has ended it. Compile the program again for one that is there"
            )
        return found[0]

    @property
    def crowd(self) -> int:
        """Largest number of engines on one rank, including that of the world; equal on all ranks."""
        return 1 + max(self._memberships.values(), default=0)

    def add(self, chosen: ProcessSet | Iterable[int], moved: bool = False) -> ProcessSet:
        """Form a set and return it; a set is created if only ranks are given.

        `moved`: the set comes from an earlier world of an elastic job, and may have all ranks of this one.
        """
        process_set = chosen if isinstance(chosen, ProcessSet) else ProcessSet(chosen)
        if process_set.process_set_id is not None:
            raise ValueError(f"{process_set} was added already")
        ranks = process_set._ranks
        communicator = process_set._communicator
        if communicator is not None:
            ranks = _distinct(communicator.allgather(self._world.rank))
        self._agree("add", ranks, process_set)
        others = (*(() if moved else (global_process_set,)), *self._sets.values())
        _check_ranks(ranks, self._world.size, {each._ranks: each for each in others})
        engine = self._form(process_set, ranks)
        if engine is not None:
            self._device.admit(engine, self._next)
        process_set._enter(self._next, self._world, ranks, engine)
        self._sets[self._next] = process_set
        self._memberships.update(ranks)
        self._next += 1
        return process_set

    def remove(self, process_set: ProcessSet) -> bool:
        """Remove a set; return False if it was not registered."""
        if process_set is global_process_set or process_set._world is not self._world:
            return False
        assert process_set.process_set_id is not None
        self._agree("remove", process_set._ranks, process_set)
        self._expect_idle(process_set)
        if process_set._engine is not None:
            process_set._engine.close(self._timeout)
        self._world.barrier("engine.process_set.removed", True).wait()
        if process_set._engine is not None:
            self._device.release(process_set._engine)
            process_set._engine.reclaim()
        del self._sets[process_set.process_set_id]
        self._memberships.subtract(process_set._ranks)
        process_set._leave()
        return True

    def close(self, seconds: float | None = None) -> bool:
        """End all sets before the world ends, and return whether a set was ever added. Not collective.

        Operations in flight have `seconds`, in all sets together; by default the time-out of the registry.
        """
        seconds = self._timeout if seconds is None else seconds
        found = self._next > 1
        patience = Patience(seconds)
        while any(map(self._pending, self._sets.values())) and patience.left():
            time.sleep(0.001)
        for process_set in self._sets.values():
            if process_set._engine is not None:
                process_set._engine.close(0.0 if self._pending(process_set) else min(seconds, IDLE))
            process_set._leave()
        self._sets.clear()
        global_process_set._leave()
        return found

    def _form(self, process_set: ProcessSet, ranks: tuple[int, ...]) -> core.Engine | None:
        """Create this rank's engine in a set. If a rank fails, no rank has the set, and numbers stay equal."""
        formed, failure = None, ""
        lanes, trunks = self._connect(ranks)  # The engine owns them from now on, even if it cannot start.
        try:
            formed = self._world.form(ranks, process_set._call_number, lanes, trunks)
        except (OSError, MemoryError) as error:
            failure = readable.whole_exception(error)
        told = self._first_told("formed", failure)
        if told is not None:
            if formed is not None:
                formed.close(0.0)
            raise EngineError(
                f"a process set of the ranks {list(ranks)} cannot be formed: on rank {told[0]}: {told[1]}"
            )
        return formed

    def _connect(self, ranks: tuple[int, ...]) -> Connections:
        """Open connections to ranks of a set on other hosts. If one fails, no rank has the set."""
        if self._links is None:
            return {}, {}
        connections: Connections = {}, {}
        failure = ""
        try:
            connections = self._links.open(
                ranks, lambda text: self._texts("addresses", text), lambda: self._world.failure is not None
            )
        except (OSError, RendezvousError) as error:
            failure = str(error)
        try:
            told = self._first_told("connected", failure)
            if told is not None:
                raise EngineError(
                    f"a process set of the ranks {list(ranks)} cannot be formed: rank {told[0]} has {told[1]}"
                )
        except BaseException:
            lanes, trunks = connections
            close_all([*chain(*lanes.values()), *trunks.values()])
            raise
        return connections

    def _first_told(self, subject: str, text: str) -> tuple[int, str] | None:
        """Return the first of all ranks' texts that is not empty, with its rank; None if all are empty. Collective."""
        for rank, told in enumerate(self._texts(subject, text.encode())):
            if told:
                return rank, told.decode("utf-8", "replace")
        return None

    def _texts(self, subject: str, text: bytes) -> list[bytes]:
        """Gather the texts of all ranks. Collective."""
        handle = self._world.allgather(array("b", text), f"engine.process_set.{subject}", True)
        handle.wait()
        data, counts = handle.gathered
        ends = list(itertools.accumulate(counts))
        return [bytes(data[end - count : end]) for end, count in zip(ends, counts, strict=True)]

    def _expect_idle(self, process_set: ProcessSet) -> None:
        """Wait for operations in flight in a set. On a time-out every rank raises EngineError, and the set remains."""
        patience = Patience(self._timeout)
        while (waiting := self._pending(process_set)) and patience.left():
            time.sleep(0.001)
        told = self._first_told("pending", waiting)
        if told is not None:
            raise EngineError(
                f"{process_set} cannot be removed: rank {told[0]} has waited {self._timeout:.0f} s for {told[1]!r} in "
                "it, which other ranks have not submitted"
            )

    def _pending(self, process_set: ProcessSet) -> str:
        """Return the name of an operation that is in flight in a set on this rank; empty: there is none."""
        pending = [] if process_set._engine is None else process_set._engine.pending()
        return str(pending[0]["name"]) if pending else ""

    def _agree(self, verb: str, ranks: tuple[int, ...], process_set: ProcessSet) -> None:
        """Check that all ranks mean the same set; else an error on all of them lists the sets. Collective."""
        said = array("q", (len(ranks), *ranks))
        handle = self._world.allgather(said, f"engine.process_set.{verb}", True)
        handle.wait()
        data, counts = handle.gathered
        everything = data.cast("B").cast("q").tolist()
        meant: dict[tuple[int, ...], list[int]] = {}
        for rank, count in enumerate(counts):
            if count == 0:
                raise EngineError(f"rank {rank} has joined: {verb} process sets before join(), or when all are back")
            meant.setdefault(tuple(everything[1:count]), []).append(rank)
            del everything[:count]
        if len(meant) > 1:
            told = ", ".join(f"{readable.ranks(who)}: {list(what)}" for what, who in meant.items())
            raise EngineError(
                f"the ranks disagree on the process set to {verb} ({told}). Every rank of the world gives the same "
                f"sets in the same order, also those that are not in them"
            )
