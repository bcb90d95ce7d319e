"""What dashboards are made of, without Grafana's own words: those are in build.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

RUN = 'run="$run"'
RANKS = 'run="$run", rank=~"$rank"'
BIG = 1e13  # bytes a second, and other figures that have no natural bound
LONG = 120.0  # seconds that no step, lag or wait of a healthy run takes

Columns = Mapping[str, tuple[str, str]]  # of a table: the field's name in Grafana to its heading and unit


@dataclass(frozen=True)
class Query:
    """One query of a panel, and what a healthy run answers.

    Attributes
    ----------
    expr : str
        PromQL, with `$run`, `$rank` and `$__rate_interval`.
    legend : str
        Grafana's template of the series' name.
    low, high : float
        Every value of a healthy run lies between these.
    expected : bool
        A healthy run of four ranks with the tuner has such series; if not, only a run in trouble has.
    heatmap : bool
        The series are buckets of a histogram.
    """

    expr: str
    legend: str = ""
    low: float = 0.0
    high: float = math.inf
    expected: bool = True
    heatmap: bool = False


@dataclass(frozen=True)
class Panel:
    """A panel.

    Attributes
    ----------
    kind : str
    title, about : str
        What it is called, and what it tells the reader.
    unit : str
        Grafana's name of the unit.
    queries : tuple of Query
    width, height : int
        In Grafana's grid, which is 24 wide.
    thresholds : tuple of (float, str)
        Values from which a colour holds; below the first it is `base`.
    base : str
    words : mapping of int to (str, str)
        Text and colour for values that are codes.
    top : float or None
        End of the axis.
    stacked : bool
    columns : mapping
        Of a table.
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
    """A dashboard: rows of panels, each with a heading."""

    uid: str
    title: str
    about: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    by_rank: bool = False  # has the variable `rank`
    changes_marked: bool = True  # annotations at each change of the knobs

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for _, panels in self.rows for panel in panels)


def rate(name: str, where: str = RUN) -> str:
    """The rate of a counter, in units a second."""
    return f"rate({name}{{{where}}}[$__rate_interval])"


def mean(name: str, by: str, where: str = RUN) -> str:
    """The mean of a histogram or summary, as a gap where nothing was counted."""
    return f"sum by ({by}) ({rate(name + '_sum', where)}) / (sum by ({by}) ({rate(name + '_count', where)}) > 0)"


def quantile(q: float, name: str, by: str, where: str = RUN) -> str:
    """A quantile of a histogram, interpolated within its buckets."""
    return f"histogram_quantile({q:g}, sum by ({by}, le) ({rate(name + '_bucket', where)}))"
