"""All queries of all panels, for code that sends them to a Prometheus: tests and the preview. Needs no SDK."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from grafana import autotune, engine, overview, ranks
from grafana.common import Panel, Query

DASHBOARDS = (overview.DASHBOARD, ranks.DASHBOARD, engine.DASHBOARD, autotune.DASHBOARD)


@dataclass(frozen=True)
class Asked:
    """Query of a panel, to be sent to Prometheus."""

    dashboard: str
    title: str
    unit: str
    panel: Panel
    query: Query

    def make_expression(self, run: str, rank: str = ".*", interval: str = "1m") -> str:
        """Return the expression to send to Prometheus.

        `rank` is a regular expression that matches the ranks. `interval` replaces `$__rate_interval`, and is at least
        four times the scrape interval.
        """
        expr = self.query.expr.replace("$run", run).replace("$rank", rank)
        return expr.replace("$__rate_interval", interval)

    def format_label(self) -> str:
        return f"{self.dashboard} / {self.title} / {self.query.legend or self.query.expr}"


def list_panel_queries() -> Iterator[Asked]:
    """Yield every query of every panel of every dashboard."""
    for dashboard in DASHBOARDS:
        for panel in dashboard.panels:
            for query in panel.queries:
                yield Asked(dashboard.title, panel.title, panel.unit, panel, query)


def shorten_durations(rules: str, factor: float) -> str:
    """Divide every duration in a file of rules by `factor`, to no less than a second, for tests that cannot wait."""

    def shorten_one(match: re.Match[str]) -> str:
        seconds = int(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]
        return f"{max(1, round(seconds / factor))}s"

    return re.sub(r"(?<![\w.])(\d+)([smh])(?![\w])", shorten_one, rules)
