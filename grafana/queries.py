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
    """Query of a panel, to be sent to Prometheus.

    Attributes
    ----------
    dashboard, title, unit : str
        Dashboard, title and unit of the panel.
    query : Query
        Query with its legend, its valid range, and whether a healthy run of four ranks with the tuner must have it.
    """

    dashboard: str
    title: str
    unit: str
    panel: Panel
    query: Query

    def make_expression(self, run: str, rank: str = ".*", interval: str = "1m") -> str:
        """Return the expression to send to Prometheus.

        Parameters
        ----------
        run : str
            Name of the run.
        rank : str
            Regular expression that matches the ranks.
        interval : str
            Replacement of `$__rate_interval`: at least four times the scrape interval.
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
    """Shorten every duration in a file of rules, for tests that cannot wait.

    Parameters
    ----------
    rules : str
        Text of a file of rules.
    factor : float
        Divisor of the durations; no duration becomes shorter than a second.
    """

    def shorten_one(match: re.Match[str]) -> str:
        seconds = int(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]
        return f"{max(1, round(seconds / factor))}s"

    return re.sub(r"(?<![\w.])(\d+)([smh])(?![\w])", shorten_one, rules)
