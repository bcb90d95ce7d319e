"""Readers of the metrics of an elastic job as a whole, by metric name."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..elastic_job import ElasticJob

Reader = Callable[[ElasticJob], Iterable[tuple[tuple[str, ...], float]]]


def _make_reader(value: Callable[[ElasticJob], float]) -> Reader:
    return lambda job: [((), value(job))]


def _read_resets(job: ElasticJob) -> Iterable[tuple[tuple[str, ...], float]]:
    """Return all causes from the start: `increase()` misses the first reset if its series begins at 1."""
    return (((cause,), float(count)) for cause, count in job.resets.items())


ELASTIC: dict[str, Reader] = {
    "engine_elastic_worlds_total": _make_reader(lambda job: job.worlds),
    "engine_elastic_resets_total": _read_resets,
    "engine_elastic_reset_seconds_total": _make_reader(lambda job: job.reset_seconds),
    "engine_elastic_resetting": _make_reader(lambda job: job.resetting),
    "engine_elastic_size": _make_reader(lambda job: job.size),
    "engine_elastic_min_size": _make_reader(lambda job: job.min_size),
    "engine_elastic_max_size": _make_reader(lambda job: job.max_size),
    "engine_elastic_cooling_hosts": _make_reader(lambda job: job.cooling),
    "engine_elastic_slow_workers_total": _make_reader(lambda job: job.slow_workers),
}
