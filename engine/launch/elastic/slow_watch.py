"""Sampling of workers' counters, to find a slow worker of an elastic job (`engine.elastic.slow` decides).

The counters come from the pages that agents send. A sample is taken only when each member has made a step since the
last one. So neither long steps nor slightly outdated copies of pages look like time without steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...elastic.slow import Look, Reading, SlowWorker, find_slow_worker
from ...metrics import page
from ..driver import BEAT

SHORTEST = 2.5 * BEAT  # least seconds between two samples: copies of pages come with each heartbeat
LOOKS = 10  # most samples in the time for which a worker must have been slow


class SlowWatch:
    """Detector of the worker that the others wait for.

    It must be slow for `seconds`, at least the time of two samples; the others wait for it `limit` seconds of each
    step. `pages` are descriptors of the copies of pages, by slot number.
    """

    def __init__(self, limit: float, seconds: float, pages: Sequence[int]) -> None:
        self._limit = limit
        self._every = max(SHORTEST, seconds / LOOKS)
        self._seconds = max(seconds, 2 * self._every)
        self._pages = pages
        self._world = 0
        self._next = 0.0
        self._looks: list[Look] = []

    def take_sample(self, now: float, world: int, numbers: Mapping[int, int]) -> SlowWorker | None:
        """Take a sample, if one is due, and return a slow worker, if there is one; at most one in each world.

        `now` is in seconds. `world` is the number of the world that trains (0: none does), and `numbers` are the slot
        numbers of its members.
        """
        if world != self._world:
            self._world, self._next, self._looks = world, now + self._every, []
        if not world or len(numbers) < 2 or now < self._next:
            return None
        taken = Look(now, world, self._read_counters(numbers))
        if len(taken.readings) < len(numbers) or not self._has_advanced(taken):
            return None
        self._next = now + self._every
        self._looks = [each for each in self._looks if now - each.time <= 2 * self._seconds] + [taken]
        found = find_slow_worker(self._looks, self._limit, self._seconds)
        if found is not None:
            self._next = float("inf")
        return found

    def _has_advanced(self, taken: Look) -> bool:
        """Return whether each member has made a step since the last sample."""
        if not self._looks:
            return True
        before = self._looks[-1].readings
        return all(reading.steps > before[worker].steps for worker, reading in taken.readings.items())

    def _read_counters(self, numbers: Mapping[int, int]) -> dict[int, Reading]:
        """Read the counters of each member whose page can be read."""
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
