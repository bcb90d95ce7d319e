"""The hosts of a job: their slots and age, which slots may be started on, and who is left alone for how long.

A failure costs the worker's slot 1, 2, 4 s before the next start, up to a minute, until a worker there has lived to see
a commit. Three in a row in one slot, without a commit between, or the loss of the agent, blacklist the host: nothing is
started there until its cooldown is over. Workers that live there go on: what failed was one of them. A newcomer that
ends by itself before it was in a world proves nothing by the commits of others: only one of its own slot counts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from .limits import Limits
from .places import Slot

FAILURES = 3  # in a row, after which the host is blacklisted
FIRST_APART = 10.0  # seconds before newcomers of a host that could not meet the others try again; then twice as long
LONGEST_APART = 600.0  # and the most
SPARE = 16  # free slots of a host that are looked at beyond those that the largest world needs
LONGEST_REST = 64.0  # seconds, the most that a slot rests after a failure
FIRST_REST = 1.0  # seconds before the next start in a slot after its first failure; then twice as long each time


@dataclass
class _Host:
    age: int
    slots: int = 0
    present: bool = True
    """Whether the last answer of the discovery had it."""
    leaving: bool = False
    """Whether it has said that it goes; until it was absent from an answer."""
    out_until: float = -math.inf
    """When its cooldown is over; infinite: never."""
    apart_until: float = -math.inf
    """When a worker of it may try again to meet the others, which it could not."""
    apart: int = 0
    """How often in a row it could not."""
    times: int = 0
    """How often it was blacklisted."""
    failures: dict[int, int] = field(default_factory=dict)
    """By slot, failures in a row; a commit of a worker in it ends the row."""
    counted: dict[int, int] = field(default_factory=dict)
    """By slot, those of them that count toward the blacklist."""
    unproven: set[int] = field(default_factory=set)
    """Slots whose last failure was a newcomer's own, which commits of other slots do not forgive."""
    rests: dict[int, float] = field(default_factory=dict)
    """By slot, when it may be started in again."""


class Hosts:
    """What is known of the hosts.

    Parameters
    ----------
    limits : Limits
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._hosts: dict[str, _Host] = {}  # by age
        self._ages = 0

    def found(self, answer: Mapping[str, int]) -> None:
        """Take in an answer of the discovery: the slots of each host. In which order old hosts stand means nothing.

        A host that was away is as new, but that its cooldown goes on: coming and going takes it off no blacklist.

        Raises
        ------
        ValueError
            A number of slots below 0.
        """
        for name, slots in answer.items():
            if slots < 0:
                raise ValueError(f"host {name!r} has {slots} slots")
        for name, slots in answer.items():
            host = self._hosts.get(name)
            if host is None:
                host = self._hosts[name] = _Host(self._next_age())
            elif not host.present:
                host.age, host.present, host.leaving = self._next_age(), True, False
            host.slots = slots
        for name, host in self._hosts.items():
            if name not in answer:
                host.present = False
        self._hosts = dict(sorted(self._hosts.items(), key=lambda item: item[1].age))

    def _next_age(self) -> int:
        self._ages += 1
        return self._ages

    def age(self, name: str) -> int:
        """A number that is smaller for a host that was there earlier."""
        return self._hosts[name].age

    def departing(self, slot: Slot) -> str:
        """Why a worker in that slot shall leave; empty if it may stay."""
        host = self._hosts[slot.host]
        if host.leaving:
            return f"host {slot.host} leaves"
        if not host.present:
            return f"host {slot.host} is not among the hosts any more"
        if slot.number >= host.slots:
            return f"host {slot.host} has {host.slots} slots now"
        return ""

    def free(self, taken: Collection[Slot], now: float) -> list[Slot]:
        """The slots in which a worker may be started now, those of older hosts first."""
        return [slot for slot, since in self._open(taken) if since <= now]

    def next_free(self, taken: Collection[Slot], now: float) -> float | None:
        """When the next slot that rests, or whose host does, may be started in; None if there is none."""
        times = [since for _, since in self._open(taken) if now < since < math.inf]
        return min(times, default=None)

    def _open(self, taken: Collection[Slot]) -> Iterable[tuple[Slot, float]]:
        """Slots without a worker, and from when on they may be started in."""
        for name, host in self._hosts.items():
            if host.present and not host.leaving:
                # However many slots a script tells: no world needs more than these.
                needed = self._limits.max_size + len(taken) + len(host.rests) + SPARE
                for number in range(min(host.slots, needed)):
                    if (slot := Slot(name, number)) not in taken:
                        yield slot, max(host.out_until, host.apart_until, host.rests.get(number, -math.inf))

    def failed(self, slot: Slot, now: float, *, unproven: bool = False) -> bool:
        """Note a worker's failure.

        Parameters
        ----------
        slot : Slot
        now : float
            Seconds.
        unproven : bool
            Whether the worker has ended by itself before it was in any world.

        Returns
        -------
        bool
            Whether the host was blacklisted for that.
        """
        host, number = self._hosts[slot.host], slot.number
        host.failures[number] = host.failures.get(number, 0) + 1
        host.counted[number] = host.counted.get(number, 0) + 1
        host.rests[number] = now + min(FIRST_REST * 2.0 ** min(host.failures[number] - 1, 60), LONGEST_REST)
        if unproven:
            host.unproven.add(number)
        else:
            host.unproven.discard(number)
        if host.counted[number] < FAILURES:
            return False
        del host.failures[number], host.counted[number]
        self.exclude(slot.host, now)
        return True

    def forgive(self, slots: Iterable[Slot]) -> None:
        """Count failures anew, since a world has committed that had workers in these slots."""
        for slot in slots:
            host = self._hosts[slot.host]
            host.failures.pop(slot.number, None)
            host.unproven.discard(slot.number)
        for host in self._hosts.values():
            host.counted = {number: host.counted[number] for number in host.counted if number in host.unproven}

    def exclude(self, name: str, now: float) -> None:
        """Blacklist a host: nothing is started there until its cooldown is over."""
        host = self._hosts[name]
        if host.out_until > now:
            return
        host.times += 1
        cooldown = self._limits.cooldown
        host.out_until = (
            now + min(cooldown[0] * 2.0 ** min(host.times - 1, 1000), cooldown[1]) if cooldown else math.inf
        )

    def part(self, name: str, now: float) -> float:
        """Note that a host's newcomers could not meet the others; for how many seconds none is started there."""
        host = self._hosts[name]
        host.apart += 1
        rest = min(FIRST_APART * 2.0 ** min(host.apart - 1, 60), LONGEST_APART)
        host.apart_until = now + rest
        return rest

    def met(self, names: Iterable[str]) -> None:
        """Note that workers of these hosts have met."""
        for name in names:
            self._hosts[name].apart, self._hosts[name].apart_until = 0, -math.inf

    def cool(self, slot: Slot, *, whole: bool, now: float) -> None:
        """Leave a slot alone in which a worker was slow, for as long as a host that fails; or its whole host."""
        if whole:
            self.exclude(slot.host, now)
            return
        host, cooldown = self._hosts[slot.host], self._limits.cooldown
        host.rests[slot.number] = now + (cooldown[0] if cooldown else math.inf)

    def leave(self, name: str) -> None:
        """Note that a host has said that it goes."""
        self._hosts[name].leaving = True

    def knows(self, name: str) -> bool:
        """Whether an answer of the discovery ever had a host."""
        return name in self._hosts

    def blacklisted(self, now: float) -> list[str]:
        """Of each host on the blacklist, its name and for how long."""
        return [
            f"{name} ({'for good' if host.out_until == math.inf else f'for {host.out_until - now:.0f} s'})"
            for name, host in self._hosts.items()
            if host.present and host.out_until > now
        ]
