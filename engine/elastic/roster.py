"""The workers of a job: where each stands, and which of them form the next world."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from .builds import Build
from .causes import Kind
from .hosts import Hosts
from .limits import Limits
from .places import Slot


class At(Enum):
    """Where a worker stands. A worker whose process has ended is on no roster."""

    STARTING = "starting"
    """Started, and not at the gate yet."""
    GATE = "at the gate"
    """Waits for a place. It runs no line of the program."""
    WORLD = "in the world"
    """Was given a place in the newest world, and has not come back."""
    DONE = "done"
    """Its function has returned. What its program does now is nobody's concern, but how it ends."""
    ENDING = "ending"
    """Was told that there is no place for it."""
    KILLED = "killed"
    """Its agent was told to kill it, and has not said yet that it has ended."""
    LOST = "lost"
    """Its agent is lost; it may run until the lease is over."""


@dataclass
class Worker:
    """A worker, with a number that no other ever has."""

    number: int
    slot: Slot
    at: At = At.STARTING
    until: float | None = None
    """When it must have moved on; None: it may stand there for any time."""
    world: int = 0
    """The last world that it was given a place in; 0: none."""
    joined: bool = False
    """Whether it has met the others of that world."""
    commit: int | None = None
    """The newest commit that it held when it came to the gate."""
    build: Build = field(default_factory=dict)
    """What it must have in common with the others, as it has said at the gate."""
    trained: bool = False
    """Whether it was in a world that has committed."""
    leaving: str = ""
    """Why it shall leave by itself, whatever its host does; empty: it may stay."""
    slow: bool = False
    """Whether that is because it holds up the others."""
    charged: int = -1
    """The world in which its slot was last charged with a failure of it."""

    def __str__(self) -> str:
        return f"worker {self.number} in {self.slot}"


class Roster:
    """All workers that may run, and those of them that are members of the newest world.

    Parameters
    ----------
    limits : Limits
    hosts : Hosts
    """

    def __init__(self, limits: Limits, hosts: Hosts) -> None:
        self._limits = limits
        self._hosts = hosts
        self._workers: dict[int, Worker] = {}
        self._started = 0
        self.members: set[int] = set()
        """Numbers of those that were given places in the newest world; of some the process may have ended."""

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def __len__(self) -> int:
        return len(self._workers)

    def add(self, slot: Slot, until: float) -> Worker:
        """A new worker, which starts."""
        worker = Worker(self._started, slot, until=until)
        self._workers[worker.number] = worker
        self._started += 1
        return worker

    def get(self, number: int | None) -> Worker | None:
        """A worker, if it may run."""
        return None if number is None else self._workers.get(number)

    def remove(self, number: int) -> Worker | None:
        """Strike off a worker that runs no more."""
        return self._workers.pop(number, None)

    def at(self, *states: At) -> list[Worker]:
        """Those that stand there, in the order of their numbers."""
        return [worker for worker in self._workers.values() if worker.at in states]

    def computing(self) -> list[Worker]:
        """The members that have not come back from the newest world."""
        return [worker for worker in self.at(At.WORLD) if worker.number in self.members]

    def is_member(self, worker: Worker) -> bool:
        """Whether a worker was given a place in the newest world."""
        return worker.number in self.members

    def departing(self, worker: Worker) -> str:
        """Why a worker shall leave; empty if it may stay."""
        return worker.leaving or self._hosts.departing(worker.slot)

    @staticmethod
    def kind(departing: Iterable[Worker]) -> Kind:
        """Why a world ends from which those workers shall leave; nobody: it grows."""
        kinds = [Kind.SLOW if each.slow else Kind.LEFT if each.leaving else Kind.HOSTS for each in departing]
        return min(kinds, key=[Kind.HOSTS, Kind.LEFT, Kind.SLOW].index, default=Kind.NEWCOMERS)

    def staying(self) -> int:
        """How many are, or may become, members and may stay."""
        return sum(not self.departing(worker) for worker in self.at(At.STARTING, At.GATE, At.WORLD))

    def taken(self) -> set[Slot]:
        """Slots in which a worker may run."""
        return {worker.slot for worker in self._workers.values()}

    def unfenced(self) -> list[Worker]:
        """Those that were in a world, shall be in none any more, and may still run: they could write."""
        return [worker for worker in self.at(At.ENDING, At.KILLED, At.LOST) if worker.world > 0]

    def on(self, host: str) -> list[Worker]:
        """Those of a host, but for those that are lost already."""
        return [worker for worker in self if worker.slot.host == host and worker.at is not At.LOST]

    def by_worth(self) -> list[Worker]:
        """All workers; those that hold a commit come last."""
        return sorted(self, key=lambda worker: (worker.commit is not None, worker.number))

    def keeps_newest(self, workers: Iterable[Worker]) -> bool:
        """Whether one of those holds the newest commit that anybody at the gate holds."""
        newest = max(map(_commit_of, self.at(At.GATE)), default=-1)
        return any(_commit_of(worker) == newest for worker in workers)

    def choose(self, need: int) -> list[Worker]:
        """Who forms the next world, of those at the gate; nobody, if fewer than `need` can.

        The largest allowed size, and those with newer commits first, then older workers. Of those that shall leave one
        is chosen if nobody else holds the newest commit that there is: it brings it to the others, and leaves then. If
        there is nobody else, they go on until others come.
        """
        gate = self.at(At.GATE)
        candidates = [worker for worker in gate if not self.departing(worker)] or gate
        if not self.keeps_newest(candidates):
            candidates = candidates + [worker for worker in gate if self.keeps_newest([worker])][:1]
        size = self._limits.largest(len(candidates))
        if size < need and any(map(self.departing, candidates)):  # others are too few to be given what these have
            candidates, size = gate, self._limits.largest(len(gate))
        if size < max(need, 1):
            return []
        return sorted(candidates, key=lambda worker: (-_commit_of(worker), worker.number))[:size]


def _commit_of(worker: Worker) -> int:
    return -1 if worker.commit is None else worker.commit
