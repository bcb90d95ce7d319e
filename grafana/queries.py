"""Every query of every panel, for those who ask a Prometheus: tests, and the preview. Needs no SDK."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from grafana import autotune, engine, overview, ranks
from grafana.common import Panel, Query

DASHBOARDS = (overview.DASHBOARD, ranks.DASHBOARD, engine.DASHBOARD, autotune.DASHBOARD)


@dataclass(frozen=True)
class Asked:
    """A query of a panel.

    Attributes
    ----------
    dashboard, title, unit : str
        Of the panel.
    query : Query
        With its legend, its sane range, and whether a healthy run of four ranks with the tuner must have it.
    """

    dashboard: str
    title: str
    unit: str
    panel: Panel
    query: Query

    def expr(self, run: str, rank: str = ".*", interval: str = "1m") -> str:
        """What to send to Prometheus.

        Parameters
        ----------
        run : str
            The run's name.
        rank : str
            Regular expression of the ranks.
        interval : str
            Instead of `$__rate_interval`: at least four times the interval of scrapes.
        """
        expr = self.query.expr.replace("$run", run).replace("$rank", rank)
        return expr.replace("$__rate_interval", interval)

    def label(self) -> str:
        return f"{self.dashboard} / {self.title} / {self.query.legend or self.query.expr}"


def panel_queries() -> Iterator[Asked]:
    """Every query of every panel of every dashboard."""
    for dashboard in DASHBOARDS:
        for panel in dashboard.panels:
            for query in panel.queries:
                yield Asked(dashboard.title, panel.title, panel.unit, panel, query)


def hurried(rules: str, factor: float) -> str:
    """Rules of which every duration is shorter, for tests that cannot wait.

    Parameters
    ----------
    rules : str
        The text of a file of rules.
    factor : float
        2 halves them; none becomes shorter than a second.
    """

    def shorten(match: re.Match[str]) -> str:
        seconds = int(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]
        return f"{max(1, round(seconds / factor))}s"

    return re.sub(r"(?<![\w.])(\d+)([smh])(?![\w])", shorten, rules)
