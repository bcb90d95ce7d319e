"""Every query of every panel, run on a real Prometheus that has the history of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from grafana.preview import __main__ as preview
from grafana.queries import Asked, list_panel_queries

from .prometheus_server import ROOT, Programs, Server
from .synthetic_run import MINUTES, NAME, STEP, history

START = 1_700_000_000.0
END = START + 60 * MINUTES
ASKED = list(list_panel_queries())


@pytest.fixture(scope="module")
def server(prometheus: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("prometheus")
    given = directory / "history.om"
    given.write_text(history(START))
    prometheus.tool("tsdb", "create-blocks-from", "openmetrics", given, directory / "data")
    with Server(prometheus, directory) as server:
        yield server


@pytest.mark.parametrize("asked", ASKED, ids=Asked.format_label)
def test_a_healthy_run_answers_in_a_sane_range(server: Server, asked: Asked) -> None:
    """A query of a misspelt metric succeeds with no series."""
    expr = asked.make_expression(NAME, interval="30s")
    now = [value for _, value in server.query(expr, at=END - STEP)]
    over_time = server.query_range(expr, END - 600, END - STEP, 30)
    if asked.query.expected:
        assert now and over_time, f"no series: {expr}"
    values = [*now, *(value for _, series in over_time for value in series)]
    assert all(math.isfinite(value) and asked.query.low <= value <= asked.query.high for value in values), values


def test_another_run_has_no_such_series(server: Server) -> None:
    """The variable of the run is in every query: one run's panels never show another's."""
    other = [asked.format_label() for asked in ASKED if server.query(asked.make_expression("another"), at=END - STEP)]
    assert other == ["Run overview / Alerts / firing"]  # none: 0


@pytest.mark.parametrize("path", sorted((ROOT / "grafana/dashboards").glob("*.json")), ids=lambda path: path.stem)
def test_the_files_are_answered_as_well(server: Server, path: Path) -> None:
    """The recorder asks the queries of the JSON files, with legends, tables and annotations."""
    board = preview.add_answers(json.loads(path.read_text()), preview.Source(server.url, NAME, END - STEP, MINUTES))
    for panel in board["panels"]:
        if panel["type"] not in ("row", "table"):
            assert panel["series"], panel["title"]
            names = [series["name"] for series in panel["series"]]
            assert len(set(names)) == len(names) and all(names), names
    tables = {panel["title"]: panel["rows"] for panel in board["panels"] if panel["type"] == "table"}
    if "ranks" in path.stem:
        (panel,) = (panel for panel in board["panels"] if panel["title"] == "Ranks")
        columns = set(panel["transformations"][-1]["options"]["indexByName"])
        assert len(tables["Ranks"]) == 4 and all(columns <= row.keys() for row in tables["Ranks"])
    assert len([mark for mark in board["marks"] if mark["color"] == "blue"]) == 25  # changes of the knobs
    recorded = preview.record_board(
        path.stem.removeprefix("enginerun-"), preview.Source(server.url, NAME, END - STEP, MINUTES)
    )
    assert len(recorded["panels"]) == 2 and all(panel["series"] for panel in recorded["panels"])


def test_one_rank_can_be_chosen(server: Server) -> None:
    of_ranks = [asked for asked in ASKED if "$rank" in asked.query.expr]
    assert len(of_ranks) > 10
    for asked in of_ranks:
        labels = [
            labels for labels, _ in server.query(asked.make_expression(NAME, rank="1|3", interval="30s"), at=END - STEP)
        ]
        assert {of["rank"] for of in labels} == {"1", "3"}, asked.format_label()
