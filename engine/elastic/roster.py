"""Registry of the workers of a job: the state of each, and the choice of members for the next world."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from ..config.builds import Build
from .causes import Kind
from .hosts import HostRegistry
from .limits import JobLimits
from .places import Slot


class WorkerState(Enum):
    """State of a worker. A worker whose process has ended is in no registry."""

    STARTING = "starting"
    """Started, but not yet at the gate."""
    GATE = "at the gate"
    """Waits for a place in a world; its program is blocked."""
    WORLD = "in the world"
    """Has a place in the newest world, and has not come back to the gate."""
    DONE = "done"
    """Its function has returned. Only its exit code matters from here on."""
    ENDING = "ending"
    """Was told to end, since there is no place for it."""
    KILLED = "killed"
    """Its agent was told to kill it, and has not yet reported its end."""
    LOST = "lost"
    """Its agent is lost; it may run until the lease expires."""


@dataclass
class Worker:
    """Worker process of a job. Its number is never reused."""

    number: int
    slot: Slot
    state: WorkerState = WorkerState.STARTING
    until: float | None = None
    """Deadline for leaving this state, in seconds of the driver's clock; None if there is none."""
    world: int = 0
    """Number of the last world that it was given a place in; 0: none."""
    joined: bool = False
    """Whether it has met the other members of that world."""
    commit: int | None = None
    """Number of the newest commit that it held when it came to the gate; None if it held none."""
    build: Build = field(default_factory=dict)
    """Values that must equal those of the other workers, as reported at the gate."""
    trained: bool = False
    """Whether it was in a world that has committed."""
    leaving: str = ""
    """Why this worker shall leave, apart from reasons of its host; empty if it may stay."""
    slow: bool = False
    """Whether it shall leave because it delays the others."""
    charged: int = -1
    """Number of the world in which its slot was last charged with a failure of it."""

    def __str__(self) -> str:
        return f"worker {self.number} in {self.slot}"


class Roster:
    """Registry of all workers that may run, and of those that are members of the newest world."""

    def __init__(self, limits: JobLimits, hosts: HostRegistry) -> None:
        self._limits = limits
        self._hosts = hosts
        self._workers: dict[int, Worker] = {}
        self._started = 0
        self.members: set[int] = set()
        """Numbers of the workers with places in the newest world, including those whose process has ended."""

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def __len__(self) -> int:
        return len(self._workers)

    def add(self, slot: Slot, until: float) -> Worker:
        """Add a worker that is being started, and return it."""
        worker = Worker(self._started, slot, until=until)
        self._workers[worker.number] = worker
        self._started += 1
        return worker

    def get(self, number: int | None) -> Worker | None:
        """Return the worker with a number; None if there is none that may run."""
        return None if number is None else self._workers.get(number)

    def remove(self, number: int) -> Worker | None:
        """Remove a worker that no longer runs, and return it."""
        return self._workers.pop(number, None)

    def list_workers(self, *states: WorkerState) -> list[Worker]:
        """Return the workers in any of these states, in the order of their numbers."""
        return [worker for worker in self._workers.values() if worker.state in states]

    def list_computing(self) -> list[Worker]:
        """Return the members that have not come back from the newest world."""
        return [worker for worker in self.list_workers(WorkerState.WORLD) if worker.number in self.members]

    def is_member(self, worker: Worker) -> bool:
        """Return whether a worker was given a place in the newest world."""
        return worker.number in self.members

    def departure_reason(self, worker: Worker) -> str:
        """Return why a worker shall leave; empty if it may stay."""
        return worker.leaving or self._hosts.departure_reason(worker.slot)

    @staticmethod
    def classify_departures(departing: Iterable[Worker]) -> Kind:
        """Return the kind of cause that ends a world which these workers shall leave; without any, the world grows."""
        kinds = [Kind.SLOW if each.slow else Kind.LEFT if each.leaving else Kind.HOSTS for each in departing]
        return min(kinds, key=[Kind.HOSTS, Kind.LEFT, Kind.SLOW].index, default=Kind.NEWCOMERS)

    def count_staying(self) -> int:
        """Return how many workers may stay that are members or may become members."""
        return sum(
            not self.departure_reason(worker)
            for worker in self.list_workers(WorkerState.STARTING, WorkerState.GATE, WorkerState.WORLD)
        )

    def collect_taken_slots(self) -> set[Slot]:
        """Return the slots in which a worker may run."""
        return {worker.slot for worker in self._workers.values()}

    def list_unfenced(self) -> list[Worker]:
        """Return the workers that were in a world, shall be in none any more, and may still run and write."""
        return [
            worker
            for worker in self.list_workers(WorkerState.ENDING, WorkerState.KILLED, WorkerState.LOST)
            if worker.world > 0
        ]

    def list_workers_on(self, host: str) -> list[Worker]:
        """Return the workers of a host, except those that are lost already."""
        return [worker for worker in self if worker.slot.host == host and worker.state is not WorkerState.LOST]

    def by_worth(self) -> list[Worker]:
        """Return all workers, those that hold a commit last."""
        return sorted(self, key=lambda worker: (worker.commit is not None, worker.number))

    def keeps_newest(self, workers: Iterable[Worker]) -> bool:
        """Return whether one of these workers holds the newest commit of all workers at the gate."""
        newest = max(map(_commit_of, self.list_workers(WorkerState.GATE)), default=-1)
        return any(_commit_of(worker) == newest for worker in workers)

    def choose_members(self, need: int) -> list[Worker]:
        """Choose the members of the next world from the workers at the gate; empty if fewer than `need` can form one.

        The world has the largest allowed size. Workers with newer commits come first, then older workers. A worker that
        shall leave is chosen only if nobody else holds the newest commit: it hands that commit to the others, and
        leaves then. If too few others are there, the workers that shall leave go on until others come.
        """
        gate = self.list_workers(WorkerState.GATE)
        candidates = [worker for worker in gate if not self.departure_reason(worker)] or gate
        if not self.keeps_newest(candidates):
            candidates = candidates + [worker for worker in gate if self.keeps_newest([worker])][:1]
        size = self._limits.find_largest_size(len(candidates))
        if size < need and any(map(self.departure_reason, candidates)):  # too few others to hand the commit to
            candidates, size = gate, self._limits.find_largest_size(len(gate))
        if size < max(need, 1):
            return []
        return sorted(candidates, key=lambda worker: (-_commit_of(worker), worker.number))[:size]


def _commit_of(worker: Worker) -> int:
    return -1 if worker.commit is None else worker.commit
