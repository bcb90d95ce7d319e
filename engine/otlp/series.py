"""Conversion of Prometheus families to metrics of OpenTelemetry's SDK, with the same names, labels and values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

if TYPE_CHECKING:
    from prometheus_client import Metric as Family
    from prometheus_client.samples import Sample

CUMULATIVE = AggregationTemporality.CUMULATIVE


def convert_families(
    families: Iterable[Family], resource: Resource, scope: InstrumentationScope, began: int, now: int
) -> MetricsData:
    """Convert families, read at `now`; they have been counted since `began`, both unix times in nanoseconds.

    A summary becomes two sums, as the SDK has no summaries: those series have the names that they have in Prometheus.
    """
    metrics = [metric for family in families for metric in _convert_family(family, began, now)]
    return MetricsData([ResourceMetrics(resource, [ScopeMetrics(scope, metrics, "")], "")])


def _convert_family(family: Family, began: int, now: int) -> Iterable[Metric]:
    if family.type == "histogram":
        points = [_make_histogram(labels, of_it, began, now) for labels, of_it in _group_samples(family.samples)]
        yield Metric(family.name, family.documentation, "", Histogram(points, CUMULATIVE))
        return
    by_name: dict[str, list[Sample]] = {}
    for sample in family.samples:
        by_name.setdefault(sample.name, []).append(sample)
    for name, samples in by_name.items():
        grows = family.type in ("counter", "summary")
        numbers = [NumberDataPoint(each.labels, began if grows else 0, now, float(each.value)) for each in samples]
        data = Sum(numbers, CUMULATIVE, is_monotonic=True) if grows else Gauge(numbers)
        yield Metric(name, family.documentation, "", data)


def _group_samples(samples: Iterable[Sample]) -> Iterable[tuple[dict[str, str], list[Sample]]]:
    """Group the samples of a histogram by their labels without `le`."""
    found: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for sample in samples:
        labels = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
        found.setdefault(labels, []).append(sample)
    return [(dict(labels), of_it) for labels, of_it in found.items()]


def _make_histogram(labels: Mapping[str, str], samples: Iterable[Sample], began: int, now: int) -> HistogramDataPoint:
    """Make a point from cumulative buckets; its buckets are not cumulative, and the last one has no bound."""
    bounds, counts, seen, total = [], [], 0, 0.0
    for sample in samples:
        if sample.name.endswith("_bucket"):
            text = sample.labels["le"]
            bound = float(text)
            counts.append(int(sample.value) - seen)
            seen = int(sample.value)
            if math.isfinite(bound):
                bounds.append(bound)
        elif sample.name.endswith("_sum"):
            total = sample.value
    # The smallest and the largest value are not counted; the encoder leaves out None.
    return HistogramDataPoint(labels, began, now, seen, total, counts, bounds, None, None)  # type: ignore[arg-type]
