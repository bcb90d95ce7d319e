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
    """Query of a panel, and the values of a healthy run.

    Attributes
    ----------
    expr : str
        PromQL expression with `$run`, `$rank` and `$__rate_interval`.
    legend : str
        Grafana's template of the series' name.
    low, high : float
        Bounds of all values of a healthy run.
    expected : bool
        Whether a healthy run of four ranks with the tuner has such series; if not, only a run with a failure has.
    heatmap : bool
        Whether the series are buckets of a histogram.
    """

    expr: str
    legend: str = ""
    low: float = 0.0
    high: float = math.inf
    expected: bool = True
    heatmap: bool = False


@dataclass(frozen=True)
class Panel:
    """Panel of a dashboard.

    Attributes
    ----------
    kind : str
    title, about : str
        Heading, and the explanation for the reader.
    unit : str
        Grafana's name of the unit.
    queries : tuple of Query
    width, height : int
        Size in Grafana's grid, which is 24 wide.
    thresholds : tuple of (float, str)
        Values from which a colour applies; below the first one it is `base`.
    base : str
    words : mapping of int to (str, str)
        Text and colour of values that are codes.
    top : float or None
        End of the axis; None: automatic.
    stacked : bool
    columns : mapping
        Columns of a table.
    """

    kind: Literal["stat", "timeseries", "heatmap", "states", "table"]
    title: str
    about: str
    unit: str
    queries: tuple[Query, ...]
    width: int = 8
    height: int = 8
    thresholds: tuple[tuple[float, str], ...] = ()
    base: str = "green"
    words: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    top: float | None = None
    stacked: bool = False
    columns: Columns = field(default_factory=dict)


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
