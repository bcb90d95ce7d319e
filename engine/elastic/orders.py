"""Orders of the state machine to workers. Each order that a worker must follow has a deadline."""

from __future__ import annotations

from collections.abc import Iterable

from . import events
from .events import Action
from .hosts import HostRegistry
from .limits import JobLimits
from .places import assign_ranks
from .roster import Roster, Worker, WorkerState


class WorkerOrders:
    """Issues orders, and updates the states of workers accordingly."""

    def __init__(self, limits: JobLimits, hosts: HostRegistry, roster: Roster) -> None:
        self._limits = limits
        self._hosts = hosts
        self._roster = roster
        self.now = 0.0  # time at which orders are given, in seconds
        self.given: list[Action] = []  # orders since the last `begin_round`

    def begin_round(self, now: float) -> None:
        """Set the time, and clear the list of orders."""
        self.now, self.given = now, []

    def issue_order(self, action: Action) -> None:
        """Issue an order that changes no worker's state."""
        self.given.append(action)

    def start(self, room: int) -> None:
        """Start at most `room` workers, in the slots that are free."""
        for slot in self._hosts.find_free_slots(self._roster.collect_taken_slots(), self.now)[:room]:
            worker = self._roster.add(slot, self.now + self._limits.start_timeout)
            self.issue_order(events.StartWorker(worker.number, slot))

    def kill(self, worker: Worker, why: str) -> None:
        """Kill a worker, whatever its state."""
        worker.state, worker.until = WorkerState.KILLED, self.now + self._limits.kill_wait
        self.issue_order(events.KillWorker(worker.number, why))

    def end(self, worker: Worker, why: str, good: bool) -> None:
        """Tell a worker at the gate that there is no place for it."""
        worker.state, worker.until = WorkerState.ENDING, self.now + self._limits.end_grace
        self.issue_order(events.EndWorker(worker.number, why, good))

    def end_leaving_workers(self, workers: Iterable[Worker]) -> None:
        """End those of these workers at the gate that shall leave."""
        for worker in workers:
            if why := self._roster.departure_reason(worker):
                self.end(worker, why, False)

    def assign_world(self, world: int, chosen: list[Worker]) -> None:
        """Give workers at the gate places in a world."""
        self._roster.members = {worker.number for worker in chosen}
        for worker in chosen:
            worker.state, worker.world, worker.joined = WorkerState.WORLD, world, False
        self.set_deadline(self._limits.meeting)
        slots = {worker.number: worker.slot for worker in chosen}
        self.issue_order(events.Assign(world, assign_ranks(world, slots, self._hosts.get_age)))

    def set_deadline(self, seconds: float) -> None:
        """Give the members that compute `seconds` to move on."""
        for worker in self._roster.list_computing():
            worker.until = self.now + seconds

    def cancel_world(self, world: int) -> None:
        """Cancel a world while its members meet."""
        if members := self._roster.list_computing():
            self.issue_order(events.Void(world, tuple(worker.number for worker in members)))

    def mark_lost(self, host: str, within: float | None) -> list[Worker]:
        """Mark the workers of a host as lost, and return them. They run at most until the lease expires."""
        lease = self._limits.lease if within is None else within
        lost = self._roster.list_workers_on(host)
        for worker in lost:
            worker.state, worker.until = WorkerState.LOST, self.now + lease
        return lost
