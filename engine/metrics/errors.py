"""The exception of metrics that cannot be published."""

from __future__ import annotations


class MetricsError(Exception):
    """Error of metrics or dashboards that cannot be provided as requested; the text gives the cause and the remedy."""
