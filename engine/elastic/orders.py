"""What the machine has done to workers. Each order that a worker must follow has its deadline."""

from __future__ import annotations

from collections.abc import Iterable

from . import events
from .events import Action
from .hosts import Hosts
from .limits import Limits
from .places import assign
from .roster import At, Roster, Worker


class Orders:
    """Gives orders, and moves workers on the roster accordingly.

    Parameters
    ----------
    limits : Limits
    hosts : Hosts
    roster : Roster

    Attributes
    ----------
    now : float
        The time at which orders are given.
    given : list of Action
        Since it was last emptied.
    """

    def __init__(self, limits: Limits, hosts: Hosts, roster: Roster) -> None:
        self._limits = limits
        self._hosts = hosts
        self._roster = roster
        self.now = 0.0
        self.given: list[Action] = []

    def begin(self, now: float) -> None:
        """Start anew, with no orders given."""
        self.now, self.given = now, []

    def do(self, action: Action) -> None:
        """An order that moves nobody."""
        self.given.append(action)

    def start(self, room: int) -> None:
        """Start at most so many workers, in the slots that are free."""
        for slot in self._hosts.free(self._roster.taken(), self.now)[:room]:
            worker = self._roster.add(slot, self.now + self._limits.start_timeout)
            self.do(events.Start(worker.number, slot))

    def kill(self, worker: Worker, why: str) -> None:
        """Kill a worker, wherever it stands."""
        worker.at, worker.until = At.KILLED, self.now + self._limits.kill_wait
        self.do(events.Kill(worker.number, why))

    def end(self, worker: Worker, why: str, good: bool) -> None:
        """Tell a worker at the gate that there is no place for it."""
        worker.at, worker.until = At.ENDING, self.now + self._limits.end_grace
        self.do(events.End(worker.number, why, good))

    def dismiss(self, workers: Iterable[Worker]) -> None:
        """Tell those of some workers at the gate that shall leave that they may."""
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
        """Give members that compute so long to move on."""
        for worker in self._roster.computing():
            worker.until = self.now + seconds

    def void(self, world: int) -> None:
        """Call a world off while its members meet."""
        if members := self._roster.computing():
            self.do(events.Void(world, tuple(worker.number for worker in members)))

    def lose(self, host: str, within: float | None) -> list[Worker]:
        """The workers of a host whose agent is lost. They run until their lease is over, at the longest."""
        lease = self._limits.lease if within is None else within
        lost = self._roster.on(host)
        for worker in lost:
            worker.at, worker.until = At.LOST, self.now + lease
        return lost
