"""The exception of metrics that cannot be published."""

from __future__ import annotations


class MetricsError(Exception):
    """Metrics, or their dashboards, cannot be had as asked for: the text says what is wrong, and how to mend it."""
