"""Hosts of a job: their slots, ages, back-off after failures, and blacklist.

A failure delays the next start in the worker's slot by 1, 2, 4 s and so on, up to about a minute. A commit that a
worker in the slot lives to see resets the delay. Three failures in a row in one slot without a commit between them, or
the loss of the agent, blacklist the host: nothing is started there until its cooldown is over. Workers that live there
go on. If a newcomer ends by itself before it was in a world, commits of others prove nothing about it: only a commit of
its own slot counts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from .limits import JobLimits
from .places import Slot

FAILURES = 3  # failures in a row after which the host is blacklisted
FIRST_APART = 10.0  # initial back-off, in seconds, of a host whose newcomers could not meet the others; it doubles
LONGEST_APART = 600.0  # its maximum, in seconds
SPARE = 16  # free slots of a host that are considered beyond those that the largest world needs
LONGEST_REST = 64.0  # maximum back-off of a slot after a failure, in seconds
FIRST_REST = 1.0  # its initial value, in seconds; it doubles with each failure in a row


@dataclass
class _Host:
    age: int
    slots: int = 0
    present: bool = True
    """Whether the last answer of the discovery included it."""
    leaving: bool = False
    """Whether it has announced that it goes; reset when it comes back after an answer without it."""
    out_until: float = -math.inf
    """Time at which its cooldown ends; infinite: never."""
    apart_until: float = -math.inf
    """Time until which none of its workers is started, since its newcomers could not meet the others."""
    apart: int = 0
    """Number of times in a row that its newcomers could not meet the others."""
    times: int = 0
    """Number of times that it was blacklisted."""
    failures: dict[int, int] = field(default_factory=dict)
    """Failures in a row, by slot; a commit of a worker in the slot ends the row."""
    counted: dict[int, int] = field(default_factory=dict)
    """The failures that count toward the blacklist, by slot."""
    unproven: set[int] = field(default_factory=set)
    """Slots whose last failure was a newcomer's own; commits of other slots do not forgive it."""
    rests: dict[int, float] = field(default_factory=dict)
    """Earliest time of the next start, by slot."""


class HostRegistry:
    """Registry of the hosts of a job."""

    def __init__(self, limits: JobLimits) -> None:
        self._limits = limits
        self._hosts: dict[str, _Host] = {}  # by age
        self._ages = 0

    def update(self, answer: Mapping[str, int]) -> None:
        """Update the hosts from an answer of the discovery: slots by host. The order of known hosts is ignored.

        A host that was absent counts as new, but its cooldown goes on: leaving and returning takes it off no blacklist.
        A number of slots below 0 is a ValueError.
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

    def get_age(self, name: str) -> int:
        """Return a number that is smaller for a host that was there earlier."""
        return self._hosts[name].age

    def departure_reason(self, slot: Slot) -> str:
        """Return why a worker in that slot shall leave; empty if it may stay."""
        host = self._hosts[slot.host]
        if host.leaving:
            return f"host {slot.host} leaves"
        if not host.present:
            return f"host {slot.host} is not among the hosts any more"
        if slot.number >= host.slots:
            return f"host {slot.host} has {host.slots} slots now"
        return ""

    def find_free_slots(self, taken: Collection[Slot], now: float) -> list[Slot]:
        """Return the slots in which a worker may be started now, those of older hosts first."""
        return [slot for slot, since in self._list_open_slots(taken) if since <= now]

    def next_free(self, taken: Collection[Slot], now: float) -> float | None:
        """Return the earliest future time at which a free slot may be started in; None if there is none."""
        times = [since for _, since in self._list_open_slots(taken) if now < since < math.inf]
        return min(times, default=None)

    def _list_open_slots(self, taken: Collection[Slot]) -> Iterable[tuple[Slot, float]]:
        """Yield slots without a worker, each with the earliest time of a start there."""
        for name, host in self._hosts.items():
            if host.present and not host.leaving:
                # A discovery script may report any number of slots; no world needs more than these.
                needed = self._limits.max_size + len(taken) + len(host.rests) + SPARE
                for number in range(min(host.slots, needed)):
                    if (slot := Slot(name, number)) not in taken:
                        yield slot, max(host.out_until, host.apart_until, host.rests.get(number, -math.inf))

    def record_failure(self, slot: Slot, now: float, *, unproven: bool = False) -> bool:
        """Record a worker's failure at a time in seconds, and return whether the host was blacklisted for that.

        `unproven` says that the worker has ended by itself before it was in any world.
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
        self.blacklist_host(slot.host, now)
        return True

    def reset_failures(self, slots: Iterable[Slot]) -> None:
        """Reset failure counts, since a world with workers in these slots has committed."""
        for slot in slots:
            host = self._hosts[slot.host]
            host.failures.pop(slot.number, None)
            host.unproven.discard(slot.number)
        for host in self._hosts.values():
            host.counted = {number: host.counted[number] for number in host.counted if number in host.unproven}

    def blacklist_host(self, name: str, now: float) -> None:
        """Blacklist a host: nothing is started there until its cooldown is over."""
        host = self._hosts[name]
        if host.out_until > now:
            return
        host.times += 1
        cooldown = self._limits.cooldown
        host.out_until = (
            now + min(cooldown[0] * 2.0 ** min(host.times - 1, 1000), cooldown[1]) if cooldown else math.inf
        )

    def record_failed_meeting(self, name: str, now: float) -> float:
        """Record that a host's newcomers could not meet the others; return its back-off in seconds."""
        host = self._hosts[name]
        host.apart += 1
        rest = min(FIRST_APART * 2.0 ** min(host.apart - 1, 60), LONGEST_APART)
        host.apart_until = now + rest
        return rest

    def record_meeting(self, names: Iterable[str]) -> None:
        """Record that workers of these hosts have met in one world, so that none counts as cut off."""
        for name in names:
            self._hosts[name].apart, self._hosts[name].apart_until = 0, -math.inf

    def exclude_slot(self, slot: Slot, *, whole: bool, now: float) -> None:
        """Exclude a slot whose worker was slow, or with `whole` its host, for as long as a host that fails."""
        if whole:
            self.blacklist_host(slot.host, now)
            return
        host, cooldown = self._hosts[slot.host], self._limits.cooldown
        host.rests[slot.number] = now + (cooldown[0] if cooldown else math.inf)

    def mark_leaving(self, name: str) -> None:
        """Record that a host has announced that it goes."""
        self._hosts[name].leaving = True

    def knows_host(self, name: str) -> bool:
        """Return whether an answer of the discovery ever included a host."""
        return name in self._hosts

    def describe_blacklist(self, now: float) -> list[str]:
        """Return a text for each blacklisted host: its name and for how long."""
        return [
            f"{name} ({'for good' if host.out_until == math.inf else f'for {host.out_until - now:.0f} s'})"
            for name, host in self._hosts.items()
            if host.present and host.out_until > now
        ]
