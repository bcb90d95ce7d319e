"""Recording of the answers of a Prometheus to every query of every panel of the dashboards, from their JSON files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

DASHBOARDS = Path(__file__).parents[1] / "dashboards"
NAMES = ("overview", "ranks", "engine", "autotune")
GPU = "On the GPU"
"""Row whose panels have no series in a job without GPUs."""


class Source:
    """Prometheus server, the run that is recorded, and its times in Unix seconds.

    Panels over time show the time from `start` to `end`, with a point every `step` seconds. Single numbers and tables
    are of the time `moment`, at which an alert may fire that is over at the end.
    """

    def __init__(self, url: str, run: str, start: float, end: float, step: float = 5.0, moment: float = 0.0) -> None:
        self.url, self.run, self.start, self.end, self.step = url.rstrip("/"), run, start, end, step
        self.moment = moment or end

    def fill_in(self, expr: str) -> str:
        """Replace Grafana's variables in an expression."""
        interval = f"{max(20, round(self.step + 5))}s"
        return expr.replace("$run", self.run).replace("$rank", ".*").replace("$__rate_interval", interval)

    def _query_api(self, path: str, **parameters: Any) -> list[dict[str, Any]]:
        with urlopen(f"{self.url}/api/v1/{path}?{urlencode(parameters)}", timeout=60) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found

    def query_over_time(self, expr: str) -> list[dict[str, Any]]:
        """Return the series of a range query."""
        return self._query_api("query_range", query=self.fill_in(expr), start=self.start, end=self.end, step=self.step)

    def query_moment(self, expr: str) -> list[dict[str, Any]]:
        """Return the series of an instant query at the recording's moment."""
        return self._query_api("query", query=self.fill_in(expr), time=self.moment)


def record_dashboards(source: Source) -> dict[str, Any]:
    """Return the answers to all queries of all dashboards, by the dashboard's name."""
    return {name: record_board(json.loads(find_file(name).read_text()), source) for name in NAMES}


def find_file(name: str) -> Path:
    """Return the path of a dashboard's JSON."""
    return DASHBOARDS / f"enginerun-{name}.json"


def record_board(board: dict[str, Any], source: Source) -> dict[str, Any]:
    """Return a dashboard's panels with the answers to their queries, and the moments of its annotations.

    Times are seconds since the start of the recording. The values of a series are those at multiples of the step, None
    where it has none.
    """
    row = ""
    panels = []
    for panel in board["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
        else:
            panels.append({"row": row, **_record_panel(panel, source)})
    marks = {
        mark["name"]: [round(moment - source.start, 1) for moment in sorted(set(_find_moments(mark, source)))]
        for mark in board["annotations"]["list"]
    }
    return {"title": board["title"], "panels": panels, "marks": marks}


def find_unanswered(boards: dict[str, Any], without: tuple[str, ...] = (GPU,)) -> Iterator[str]:
    """Yield each query that got no series, with its dashboard and panel, but for the panels of some rows."""
    for board in boards.values():
        for panel in board["panels"]:
            if panel["row"] not in without:
                for expr in panel["unanswered"]:
                    yield f"{board['title']} / {panel['title']}: no series for {expr}"


def _record_panel(panel: dict[str, Any], source: Source) -> dict[str, Any]:
    """Return the answers to a panel's queries, and of its look what a drawing needs."""
    defaults = panel["fieldConfig"]["defaults"]
    words = {
        code: [option["text"], option["color"]]
        for mapping in defaults.get("mappings", ())
        for code, option in mapping["options"].items()
    }
    found: dict[str, Any] = {
        "title": panel["title"],
        "kind": panel["type"],
        "unit": defaults["unit"],
        "width": panel["gridPos"]["w"],
        "unanswered": [],
        **({"words": words} if words else {}),
        **({"stacked": True} if defaults.get("custom", {}).get("stacking") else {}),
    }
    if panel["type"] == "table":
        return found | _record_table(panel, source, found["unanswered"])
    series = []
    for target in panel["targets"]:
        answer = source.query_over_time(target["expr"])
        if not answer:
            found["unanswered"].append(target["expr"])
        moment = source.query_moment(target["expr"]) if panel["type"] == "stat" else []
        now = {_name(target["legendFormat"], one["metric"]): one for one in moment}
        for one in answer:
            name = _name(target["legendFormat"], one["metric"])
            made: dict[str, Any] = {"name": name, "values": _fill_gaps(one["values"], source)}
            if name in now:
                made["moment"] = _shorten_number(float(now[name]["value"][1]))
            series.append(made)
    return found | {"series": series}


def _name(legend: str, labels: dict[str, str]) -> str:
    """Return the name that Grafana gives a series."""
    if not legend:
        return ", ".join(f"{name}={value}" for name, value in labels.items()) or "value"
    return re.sub(r"{{\s*(\w+)\s*}}", lambda match: labels.get(match[1], ""), legend)


def _fill_gaps(values: list[list[Any]], source: Source) -> list[float | None]:
    """Return one value for each multiple of the step; Prometheus leaves those out for which there is none."""
    found: list[float | None] = [None] * (int((source.end - source.start) / source.step) + 1)
    for moment, value in values:
        found[round((float(moment) - source.start) / source.step)] = _shorten_number(float(value))
    return found


def _shorten_number(value: float) -> float | None:
    """Return a number with four digits; None for what JSON cannot hold."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _record_table(panel: dict[str, Any], source: Source, unanswered: list[str]) -> dict[str, Any]:
    """Return a table's headings, units and rows as the panel's transformations make them."""
    order: dict[str, int] = {}
    headings: dict[str, str] = {}
    for step in panel["transformations"]:
        order |= step["options"].get("indexByName", {})
        headings |= step["options"].get("renameByName", {})
    columns = [headings.get(name, name) for name in order]
    units = {
        override["matcher"]["options"]: each["value"]
        for override in panel["fieldConfig"]["overrides"]
        for each in override["properties"]
    }
    rows = [[row.get(name) for name in order] for row in _merge_rows(panel, source, unanswered)]
    return {"columns": columns, "units": [units.get(column, "") for column in columns], "rows": rows}


def _merge_rows(panel: dict[str, Any], source: Source, unanswered: list[str]) -> list[dict[str, Any]]:
    """Return the rows that the transformation `merge` makes of the queries: one for each set of labels."""
    rows: list[dict[str, Any]] = []
    alone = len(panel["targets"]) == 1
    for target in panel["targets"]:
        answer = source.query_moment(target["expr"])
        if not answer:
            unanswered.append(target["expr"])
        for one in answer:
            number = _shorten_number(float(one["value"][1]))
            value = {"Value" if alone else f"Value #{target['refId']}": number}
            same = [row for row in rows if all(row.get(name, text) == text for name, text in one["metric"].items())]
            if same and not alone:
                same[0].update(value)
            else:
                rows.append({**one["metric"], **value})
    return sorted(rows, key=lambda row: int(row.get("rank", 0)))


def _find_moments(mark: dict[str, Any], source: Source) -> Iterator[float]:
    for one in source.query_over_time(mark["target"]["expr"]):
        for moment, value in one["values"]:
            at = float(value) / 1000 if mark.get("useValueForTime") else moment
            if source.start <= at <= source.end:
                yield at
