"""Orders of the state machine to workers. Each order that a worker must follow has a deadline."""

from __future__ import annotations

from collections.abc import Iterable

from . import events
from .events import Action
from .hosts import Hosts
from .limits import Limits
from .places import assign
from .roster import At, Roster, Worker


class Orders:
    """Issues orders, and updates the states of workers accordingly.

    Parameters
    ----------
    limits : Limits
    hosts : Hosts
    roster : Roster

    Attributes
    ----------
    now : float
        Time at which orders are given, in seconds.
    given : list of Action
        Orders since the last `begin`.
    """

    def __init__(self, limits: Limits, hosts: Hosts, roster: Roster) -> None:
        self._limits = limits
        self._hosts = hosts
        self._roster = roster
        self.now = 0.0
        self.given: list[Action] = []

    def begin(self, now: float) -> None:
        """Set the time, and clear the list of orders."""
        self.now, self.given = now, []

    def do(self, action: Action) -> None:
        """Issue an order that changes no worker's state."""
        self.given.append(action)

    def start(self, room: int) -> None:
        """Start at most `room` workers, in the slots that are free."""
        for slot in self._hosts.free(self._roster.taken(), self.now)[:room]:
            worker = self._roster.add(slot, self.now + self._limits.start_timeout)
            self.do(events.Start(worker.number, slot))

    def kill(self, worker: Worker, why: str) -> None:
        """Kill a worker, whatever its state."""
        worker.at, worker.until = At.KILLED, self.now + self._limits.kill_wait
        self.do(events.Kill(worker.number, why))

    def end(self, worker: Worker, why: str, good: bool) -> None:
        """Tell a worker at the gate that there is no place for it."""
        worker.at, worker.until = At.ENDING, self.now + self._limits.end_grace
        self.do(events.End(worker.number, why, good))

    def dismiss(self, workers: Iterable[Worker]) -> None:
        """End those of these workers at the gate that shall leave."""
        for worker in workers:
            if why := self._roster.departing(worker):
                self.end(worker, why, False)

    def gather(self, world: int, chosen: list[Worker]) -> None:
        """Give workers at the gate places in a world."""
        self._roster.members = {worker.number for worker in chosen}
        for worker in chosen:
            worker.at, worker.world, worker.joined = At.WORLD, world, False
        self.expect(self._limits.meeting)
        slots = {worker.number: worker.slot for worker in chosen}
        self.do(events.Assign(world, assign(world, slots, self._hosts.age)))

    def expect(self, seconds: float) -> None:
        """Give the members that compute `seconds` to move on."""
        for worker in self._roster.computing():
            worker.until = self.now + seconds

    def void(self, world: int) -> None:
        """Cancel a world while its members meet."""
        if members := self._roster.computing():
            self.do(events.Void(world, tuple(worker.number for worker in members)))

    def lose(self, host: str, within: float | None) -> list[Worker]:
        """Mark the workers of a host as lost, and return them. They run at most until the lease expires."""
        lease = self._limits.lease if within is None else within
        lost = self._roster.on(host)
        for worker in lost:
            worker.at, worker.until = At.LOST, self.now + lease
        return lost
