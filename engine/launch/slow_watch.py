"""Looks for a slow worker of an elastic job, in the pages of counters that agents send (`engine.elastic.slow` decides).

A look is taken only when each member has made a step since the last one, so that neither steps that are longer than
the time between looks, nor copies of pages that are a moment old, are taken for time without steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..elastic.slow import Look, Reading, SlowWorker, find
from ..metrics import page
from .fleet import BEAT

SHORTEST = 2.5 * BEAT  # seconds between two looks: copies of pages come once a beat
LOOKS = 10  # in the time for which a worker must have been slow


class SlowWatch:
    """Finds the worker that the others wait for.

    Parameters
    ----------
    limit : float
        Seconds a step.
    seconds : float
        For how long a worker must have been slow; at least two looks are taken in any case.
    pages : sequence of int
        By the number of a slot, descriptors of the copies of pages.
    """

    def __init__(self, limit: float, seconds: float, pages: Sequence[int]) -> None:
        self._limit = limit
        self._every = max(SHORTEST, seconds / LOOKS)
        self._seconds = max(seconds, 2 * self._every)
        self._pages = pages
        self._world = 0
        self._next = 0.0
        self._looks: list[Look] = []

    def look(self, now: float, world: int, numbers: Mapping[int, int]) -> SlowWorker | None:
        """Look, if it is time to.

        Parameters
        ----------
        now : float
            Seconds.
        world : int
            The number of the world that trains; 0: none does.
        numbers : mapping of int to int
            The slot's number of each member.

        Returns
        -------
        SlowWorker or None
            It is told once in a world.
        """
        if world != self._world:
            self._world, self._next, self._looks = world, now + self._every, []
        if not world or len(numbers) < 2 or now < self._next:
            return None
        taken = Look(now, world, self._readings(numbers))
        if len(taken.readings) < len(numbers) or not self._advanced(taken):
            return None
        self._next = now + self._every
        self._looks = [each for each in self._looks if now - each.time <= 2 * self._seconds] + [taken]
        found = find(self._looks, self._limit, self._seconds)
        if found is not None:
            self._next = float("inf")
        return found

    def _advanced(self, taken: Look) -> bool:
        """Whether each member has made a step since the last look."""
        if not self._looks:
            return True
        before = self._looks[-1].readings
        return all(reading.steps > before[worker].steps for worker, reading in taken.readings.items())

    def _readings(self, numbers: Mapping[int, int]) -> dict[int, Reading]:
        """Of each member whose page can be read."""
        found = {}
        for worker, number in numbers.items():
            reading = _read(self._pages[number]) if number < len(self._pages) else None
            if reading is not None:
                found[worker] = reading
        return found


def _read(descriptor: int) -> Reading | None:
    try:
        snapshot = page.read(descriptor)
    except page.PageError:
        return None
    if snapshot is None or snapshot.state != "running":
        return None
    return Reading(
        snapshot["steps"],
        snapshot["lag_ns"] / 1e9,
        sum(snapshot.fields["crossing_ns"]) / 1e9,
        None if snapshot.on_gpu else snapshot["blocked_ns"] / 1e9,
    )
