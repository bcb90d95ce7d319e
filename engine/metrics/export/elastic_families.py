"""Readers of the metrics of an elastic job as a whole, by metric name."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..elastic_job import ElasticJob

Reader = Callable[[ElasticJob], Iterable[tuple[tuple[str, ...], float]]]


def _one(value: Callable[[ElasticJob], float]) -> Reader:
    return lambda job: [((), value(job))]


def _resets(job: ElasticJob) -> Iterable[tuple[tuple[str, ...], float]]:
    """Return all causes from the start: `increase()` misses the first reset if its series begins at 1."""
    return (((cause,), float(count)) for cause, count in job.resets.items())


ELASTIC: dict[str, Reader] = {
    "engine_elastic_worlds_total": _one(lambda job: job.worlds),
    "engine_elastic_resets_total": _resets,
    "engine_elastic_reset_seconds_total": _one(lambda job: job.reset_seconds),
    "engine_elastic_resetting": _one(lambda job: job.resetting),
    "engine_elastic_size": _one(lambda job: job.size),
    "engine_elastic_min_size": _one(lambda job: job.min_size),
    "engine_elastic_max_size": _one(lambda job: job.max_size),
    "engine_elastic_cooling_hosts": _one(lambda job: job.cooling),
    "engine_elastic_slow_workers_total": _one(lambda job: job.slow_workers),
}
