"""What keeps metrics from being served."""

from __future__ import annotations


class MetricsError(Exception):
    """Metrics cannot be served as asked for: the text says what is wrong, and how to mend it."""
