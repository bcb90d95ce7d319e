"""Command `python -m grafana.preview URL RUN`: record what a Prometheus answers to the panels that the pages show."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

HERE = Path(__file__).parent
POINTS = 120  # points of a line
SHOWN = {
    "overview": ("Step time against its floor", "Exposed communication"),
    "ranks": ("Blocked in the engine", "Arrival lag by rank and host"),
    "engine": ("From submission to the start", "Tensors in a batch"),
    "autotune": ("Score", "Chunk"),
}
"""Panels of each dashboard that are recorded."""


class Source:
    """Prometheus server and the time range that is drawn."""

    def __init__(self, url: str, run: str, end: float, minutes: float) -> None:
        self.url, self.run, self.end, self.start = url.rstrip("/"), run, end, end - 60 * minutes
        self.step = max(5.0, (self.end - self.start) / POINTS)

    def fill_in(self, expr: str) -> str:
        interval = f"{max(20, round(self.step + 5))}s"
        return expr.replace("$run", self.run).replace("$rank", ".*").replace("$__rate_interval", interval)

    def _query_api(self, path: str, **parameters: Any) -> list[dict[str, Any]]:
        with urlopen(f"{self.url}/api/v1/{path}?{urlencode(parameters)}", timeout=60) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found

    def query_over_time(self, expr: str) -> list[dict[str, Any]]:
        return self._query_api("query_range", query=self.fill_in(expr), start=self.start, end=self.end, step=self.step)

    def query_now(self, expr: str) -> list[dict[str, Any]]:
        return self._query_api("query", query=self.fill_in(expr), time=self.end)


def add_answers(board: dict[str, Any], source: Source) -> dict[str, Any]:
    """Return the dashboard with the answers to its queries."""
    for panel in board["panels"]:
        if panel["type"] == "table":
            panel["rows"] = list(_merge_rows(panel, source))
        elif panel["type"] != "row":
            panel["series"] = [
                {
                    "name": _name(target["legendFormat"], one["metric"]),
                    "values": [[t, float(v)] for t, v in one["values"]],
                }
                for target in panel["targets"]
                for one in source.query_over_time(target["expr"])
            ]
    marks = [
        {"color": mark["iconColor"], "time": moment}
        for mark in board["annotations"]["list"]
        for moment in sorted(set(_find_moments(mark, source)))
    ]
    return {**board, "marks": marks, "run": source.run, "start": source.start, "end": source.end, "step": source.step}


def _name(legend: str, labels: dict[str, str]) -> str:
    if not legend:
        return ", ".join(f"{name}={value}" for name, value in labels.items()) or "value"
    return re.sub(r"{{\s*(\w+)\s*}}", lambda match: labels.get(match[1], ""), legend)


def _merge_rows(panel: dict[str, Any], source: Source) -> Iterator[dict[str, Any]]:
    """Return the rows that the transformation `merge` makes of the queries: one for each set of labels."""
    rows: list[dict[str, Any]] = []
    alone = len(panel["targets"]) == 1
    for target in panel["targets"]:
        for one in source.query_now(target["expr"]):
            value = {"Value" if alone else f"Value #{target['refId']}": float(one["value"][1])}
            same = [row for row in rows if all(row.get(name, text) == text for name, text in one["metric"].items())]
            if same and not alone:
                same[0].update(value)
            else:
                rows.append({**one["metric"], **value})
    return iter(sorted(rows, key=lambda row: int(row.get("rank", 0))))


def _find_moments(mark: dict[str, Any], source: Source) -> Iterator[float]:
    for one in source.query_over_time(mark["target"]["expr"]):
        for moment, value in one["values"]:
            at = float(value) / 1000 if mark.get("useValueForTime") else moment
            if source.start <= at <= source.end:
                yield at


def record_board(name: str, source: Source) -> dict[str, Any]:
    """Return the recorded panels of a dashboard, with times in seconds since the start."""
    path = HERE.parent / "dashboards" / f"enginerun-{name}.json"
    board = json.loads(path.read_text())
    titled = {panel["title"]: panel for panel in board["panels"]}
    board["panels"] = [titled[title] for title in SHOWN[name]]
    answered = add_answers(board, source)
    panels = [
        {
            "title": panel["title"],
            "unit": panel["fieldConfig"]["defaults"]["unit"],
            "series": [
                {"name": series["name"], "values": [[round(t - source.start, 1), v] for t, v in series["values"]]}
                for series in panel["series"]
            ],
        }
        for panel in answered["panels"]
    ]
    changes = [round(mark["time"] - source.start, 1) for mark in answered["marks"] if mark["color"] == "blue"]
    return {"panels": panels, "changes": changes}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m grafana.preview", description=__doc__)
    parser.add_argument("url", help="of a Prometheus, such as http://127.0.0.1:9090")
    parser.add_argument("run", help="name of the run")
    parser.add_argument("--end", type=float, default=time.time(), help="unix time at which the recording ends (now)")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--about", default="a job", help="what kind of run it is, on which machine")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/history/recorded/dashboards.json"))
    given = parser.parse_args()
    source = Source(given.url, given.run, given.end, given.minutes)
    boards = {name: record_board(name, source) for name in SHOWN}
    content = {"about": given.about, "seconds": source.end - source.start, "boards": boards}
    given.out.write_text(json.dumps(content, separators=(",", ":")) + "\n")
    print(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
