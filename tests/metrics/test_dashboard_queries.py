"""Every query of every panel, run on a real Prometheus that has the history of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest

from grafana.preview import recording
from grafana.queries import Asked, list_panel_queries

from .prometheus_server import Programs, Server
from .synthetic_run import MINUTES, NAME, STEP, history

START = 1_700_000_000.0
END = START + 60 * MINUTES
ASKED = list(list_panel_queries())
NO_ALERTS = "Alerts that are pending or fire"  # the table of a run without any


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


@pytest.mark.parametrize("name", recording.NAMES)
def test_the_files_are_answered_as_well(server: Server, name: str) -> None:
    """The recorder asks the queries of the JSON files, with legends, tables and annotations."""
    found = json.loads(recording.find_file(name).read_text())
    board = recording.record_board(found, recording.Source(server.url, NAME, START, END - STEP))
    assert [panel["title"] for panel in board["panels"]] == [
        panel["title"] for panel in found["panels"] if panel["type"] != "row"
    ]
    for panel in board["panels"]:
        assert panel["title"] == NO_ALERTS or not panel["unanswered"], panel["title"]
        names = [series["name"] for series in panel.get("series", ())]
        assert len(set(names)) == len(names) and all(names), names
    if name == "ranks":
        (table,) = (panel for panel in board["panels"] if panel["title"] == "Ranks")
        assert len(table["rows"]) == 4 and all(None not in row for row in table["rows"])
    assert len(board["marks"]["Changes of the knobs"]) == 25


def test_only_numbers_and_tables_are_asked_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, set[str]] = {"query": set(), "query_range": set()}

    def answer(_: recording.Source, path: str, query: str, **parameters: object) -> list[dict[str, object]]:
        asked[path].add(query)
        return []

    monkeypatch.setattr(recording.Source, "_query_api", answer)
    source = recording.Source("", NAME, START, END)
    panels = [
        panel for name in recording.NAMES for panel in json.loads(recording.find_file(name).read_text())["panels"]
    ]
    recording.record_dashboards(source)
    for path, kinds in (("query", ("stat", "table")), ("query_range", ("stat", "timeseries", "heatmap"))):
        wanted = {source.fill_in(t["expr"]) for p in panels if p["type"] in kinds for t in p["targets"]}
        assert wanted <= asked[path]
        assert path != "query" or wanted == asked[path]


def test_panel_without_data_is_named(server: Server) -> None:
    """Only those of GPUs may have none, and that is no excuse for others."""
    boards = recording.record_dashboards(recording.Source(server.url, NAME, START, END - STEP))
    (unanswered,) = recording.find_unanswered(boards, without=())
    assert unanswered.startswith(f"enginerun: Run overview / {NO_ALERTS}: no series for ALERTS")
    none = recording.record_dashboards(recording.Source(server.url, "another", START, END - STEP))
    named = "\n".join(recording.find_unanswered(none))
    titles = {f"{asked.dashboard} / {asked.title}: " for asked in ASKED if "engine_device_" not in asked.query.expr}
    assert {title for title in titles if title not in named} == {"Run overview / Alerts: "}  # none: 0
    assert "GPU" not in named


def test_one_rank_can_be_chosen(server: Server) -> None:
    of_ranks = [asked for asked in ASKED if "$rank" in asked.query.expr]
    assert len(of_ranks) > 10
    for asked in of_ranks:
        labels = [
            labels for labels, _ in server.query(asked.make_expression(NAME, rank="1|3", interval="30s"), at=END - STEP)
        ]
        assert {of["rank"] for of in labels} == {"1", "3"}, asked.format_label()
