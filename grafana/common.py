"""Parts of dashboards, without Grafana's own terms: those are in build.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

RUN = 'run="$run"'
RANKS = 'run="$run", rank=~"$rank"'
BIG = 1e13  # bound of bytes per second and of other figures without a natural bound
LONG = 120.0  # seconds that no step, lag or wait of a healthy run reaches

Columns = Mapping[str, tuple[str, str]]  # columns of a table: Grafana's field name to heading and unit


@dataclass(frozen=True)
class Query:
    """Query of a panel, and the values of a healthy run."""

    expr: str  # PromQL expression with `$run`, `$rank` and `$__rate_interval`
    legend: str = ""  # Grafana's template of the series' name
    low: float = 0.0  # lower bound of all values of a healthy run
    high: float = math.inf  # upper bound
    # Whether a healthy run of four ranks with the tuner has such series; if not, only a run with a failure has
    expected: bool = True
    heatmap: bool = False  # whether the series are buckets of a histogram


@dataclass(frozen=True)
class Panel:
    """Panel of a dashboard."""

    kind: Literal["stat", "timeseries", "heatmap", "states", "table"]
    title: str
    about: str  # explanation for the reader
    unit: str  # Grafana's name of the unit
    queries: tuple[Query, ...]
    width: int = 8  # size in Grafana's grid, which is 24 wide
    height: int = 8
    # Values from which a colour applies; below the first one it is `base`
    thresholds: tuple[tuple[float, str], ...] = ()
    base: str = "green"
    words: Mapping[int, tuple[str, str]] = field(default_factory=dict)  # text and colour of values that are codes
    top: float | None = None  # end of the axis; None: automatic
    stacked: bool = False
    columns: Columns = field(default_factory=dict)  # columns of a table


@dataclass(frozen=True)
class Dashboard:
    """Dashboard: rows of panels, each with a heading."""

    uid: str
    title: str
    about: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    by_rank: bool = False  # whether it has the variable `rank`
    changes_marked: bool = True  # whether it has annotations at each change of the knobs

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for _, panels in self.rows for panel in panels)


def query_rate(name: str, where: str = RUN) -> str:
    """Return the rate of a counter, in units per second."""
    return f"rate({name}{{{where}}}[$__rate_interval])"


def query_mean(name: str, by: str, where: str = RUN) -> str:
    """Return the mean of a histogram or summary, with a gap if nothing was counted."""
    total, count = query_rate(f"{name}_sum", where), query_rate(f"{name}_count", where)
    return f"sum by ({by}) ({total}) / (sum by ({by}) ({count}) > 0)"


def query_quantile(q: float, name: str, by: str, where: str = RUN) -> str:
    """Return a quantile of a histogram, interpolated within its buckets."""
    return f"histogram_quantile({q:g}, sum by ({by}, le) ({query_rate(name + '_bucket', where)}))"
