"""Metrics of a run: pages of counters, Prometheus, `enginerun top`, the summary at the end."""
