"""Every query of every panel, asked of a real Prometheus that has the history of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from prometheus_server import Programs, Server
from synthetic_run import MINUTES, NAME, STEP, history

from grafana.queries import Asked, panel_queries

START = 1_700_000_000.0
END = START + 60 * MINUTES
ASKED = list(panel_queries())


@pytest.fixture(scope="module")
def server(prometheus: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("prometheus")
    given = directory / "history.om"
    given.write_text(history(START))
    prometheus.tool("tsdb", "create-blocks-from", "openmetrics", given, directory / "data")
    with Server(prometheus, directory) as server:
        yield server


@pytest.mark.parametrize("asked", ASKED, ids=Asked.label)
def test_a_healthy_run_answers_in_a_sane_range(server: Server, asked: Asked) -> None:
    """A misspelt metric is a success with no series."""
    expr = asked.expr(NAME, interval="30s")
    now = [value for _, value in server.query(expr, at=END - STEP)]
    over_time = server.query_range(expr, END - 600, END - STEP, 30)
    if asked.query.expected:
        assert now and over_time, f"no series: {expr}"
    values = [*now, *(value for _, series in over_time for value in series)]
    assert all(math.isfinite(value) and asked.query.low <= value <= asked.query.high for value in values), values


def test_another_run_has_no_such_series(server: Server) -> None:
    """The variable is in every query: one run's panels never show another's."""
    other = [asked.label() for asked in ASKED if server.query(asked.expr("another"), at=END - STEP)]
    assert other == ["Run overview / Alerts / firing"]  # none: 0


def test_one_rank_can_be_chosen(server: Server) -> None:
    of_ranks = [asked for asked in ASKED if "$rank" in asked.query.expr]
    assert len(of_ranks) > 10
    for asked in of_ranks:
        labels = [labels for labels, _ in server.query(asked.expr(NAME, rank="1|3", interval="30s"), at=END - STEP)]
        assert {of["rank"] for of in labels} == {"1", "3"}, asked.label()
