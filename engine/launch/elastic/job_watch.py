"""Observation of an elastic job for its driver: slow workers, and the cost and causes of resets.

Slow workers are found by the counters in the pages that agents send (`engine.elastic.slow` decides). A sample is taken
only when each member has made a step since the last one. So neither long steps nor slightly outdated copies of pages
look like time without steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...elastic import events
from ...elastic.causes import Kind
from ...elastic.machine import Machine, Phase
from ...elastic.slow import Look, Reading, SlowWorker, find_slow_worker
from ...metrics import page
from ...metrics.elastic_job import KEPT, LONGEST, ElasticJob, Reset
from ..cli.elastic_options import Elastic
from ..driver import BEAT
from ..errors import LaunchError

SHORTEST = 2.5 * BEAT  # least seconds between two samples: copies of pages come with each heartbeat
LOOKS = 10  # most samples in the time for which a worker must have been slow


@dataclass
class _Span:
    """The time of one reset."""

    unix: float
    begun: float
    ended: float | None = None  # None while it is not over


class Watch:
    """Observer of an elastic job's machine, which it does not change.

    `pages` are descriptors of copies of the pages of counters, by slot number; empty if nothing is counted. `publish`
    is called with the public state of the job whenever it has changed. A `LaunchError` is raised if slow workers are to
    be found, and nothing is counted.
    """

    def __init__(self, elastic: Elastic, pages: Sequence[int], publish: Callable[[ElasticJob], None]) -> None:
        self._elastic = elastic
        self._publish = publish
        if elastic.slow is not None and not pages:
            raise LaunchError("--slow-limit: who is slow is found by counters: leave --no-metrics out")
        self._slow = None if elastic.slow is None else SlowWatch(*elastic.slow, pages)
        self._spans: list[_Span] = []
        self._slow_workers: set[int] = set()
        self._ran = self._worlds = 0  # the newest world that has run, and how many have
        self._told: ElasticJob | None = None

    def find_slow_worker(self, machine: Machine, numbers: Mapping[int, int], now: float) -> events.Slow | None:
        """Return an event for a slow worker, if `--slow-limit` is set and there is one; else None.

        `numbers` are the slot numbers of workers, and `now` is in seconds, on the driver's clock.
        """
        if self._slow is None:
            return None
        members = {each: numbers[each] for each in machine.roster.members if each in numbers}
        found = self._slow.take_sample(now, machine.world if machine.phase is Phase.RUNNING else 0, members)
        return None if found is None else events.Slow(found.worker, str(found))

    def record_state(self, machine: Machine, ranks: Mapping[int, int], size: int, now: float) -> None:
        """Record the state of the machine, and publish it if it has changed; to be called after each event.

        `ranks` are those of `ElasticJob`, `size` is that of the newest world, and `now` is in seconds, on the driver's
        clock.
        """
        running = machine.phase in (Phase.RUNNING, Phase.DRAINING, Phase.OVER)
        while len(self._spans) < len(machine.causes.resets):
            self._end_reset(now)
            self._spans.append(_Span(time.time(), now))
        if running:
            self._end_reset(now)
        if machine.phase is Phase.RUNNING and self._ran != machine.world:
            self._ran, self._worlds = machine.world, self._worlds + 1
        self._slow_workers.update(each.number for each in machine.roster if each.slow)
        told = self._collect_facts(machine, ranks, size, now)
        if told != self._told:
            self._told = told
            self._publish(told)

    def _end_reset(self, now: float) -> None:
        if self._spans and self._spans[-1].ended is None:
            self._spans[-1].ended = now

    def _collect_facts(self, machine: Machine, ranks: Mapping[int, int], size: int, now: float) -> ElasticJob:
        causes = machine.causes.resets
        counts = dict.fromkeys((kind.value for kind in Kind), 0)
        for cause in causes:
            counts[cause.kind.value] += 1
        seconds = [(now if span.ended is None else span.ended) - span.begun for span in self._spans]
        first = max(0, len(causes) - KEPT)
        recent = [
            Reset(number + 1, span.unix, cause.kind.value, cause.text[:LONGEST], lasted)
            for number, (span, cause, lasted) in enumerate(zip(self._spans, causes, seconds, strict=True))
        ]
        return ElasticJob(
            world=machine.world,
            worlds=self._worlds,
            size=size,
            min_size=self._elastic.min_size,
            max_size=self._elastic.max_size,
            resetting=bool(self._spans) and self._spans[-1].ended is None,
            resets=counts,
            reset_seconds=sum(seconds),
            cooling=len(machine.hosts.describe_blacklist(now)),
            slow_workers=len(self._slow_workers),
            ranks=dict(ranks),
            recent=tuple(recent[first:]),
        )


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
            reading = _read_page(self._pages[number]) if number < len(self._pages) else None
            if reading is not None:
                found[worker] = reading
        return found


def _read_page(descriptor: int) -> Reading | None:
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
