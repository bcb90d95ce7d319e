"""Observation of an elastic job for its driver: slow workers, and the cost and causes of resets."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...elastic import events
from ...elastic.causes import Kind
from ...elastic.machine import Machine, Phase
from ...metrics.elastic_job import KEPT, LONGEST, ElasticJob, Reset
from ..cli.elastic_options import Elastic
from ..errors import LaunchError
from .slow_watch import SlowWatch


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
