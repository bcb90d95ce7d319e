"""What keeps metrics from whoever is to see them."""

from __future__ import annotations


class MetricsError(Exception):
    """Metrics, or their dashboards, cannot be had as asked for: the text says what is wrong, and how to mend it."""
