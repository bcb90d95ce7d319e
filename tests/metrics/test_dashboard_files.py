"""Dashboard files equal the code's output, and the code uses only metrics that the engine exports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from .prometheus_server import ROOT

pytest.importorskip("grafana_foundation_sdk", reason="needs Grafana's SDK, of the dev extra")

from grafana import __main__ as command
from grafana import promql
from grafana.build import find_layout_problems, render_dashboard, round_trip
from grafana.common import Panel, Query
from grafana.queries import DASHBOARDS, list_panel_queries, shorten_durations

FILES = sorted((ROOT / "grafana/dashboards").glob("*.json"))


def test_files_are_what_the_code_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--check"]) == 0, capsys.readouterr().err


def test_check_says_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "DIRECTORY", tmp_path)
    assert command.main([]) == 0
    assert command.main(["--check"]) == 0
    changed = tmp_path / "enginerun-ranks.json"
    changed.write_text(changed.read_text().replace("Arrival lag by rank", "Arrival lag by tank"))
    (tmp_path / "stray.json").write_text("{}")
    (tmp_path / "enginerun-engine.json").unlink()
    capsys.readouterr()
    assert command.main(["--check"]) == 1
    error = capsys.readouterr().err
    assert "-      " in error and "tank" in error
    assert "stray.json: no code makes this dashboard" in error
    assert "enginerun-ranks.json, enginerun-engine.json, stray.json: run `python -m grafana`" in error


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_sdk_reads_all_that_it_wrote(path: Path) -> None:
    assert round_trip(path.read_text()) == path.read_text()


def test_the_round_trip_would_notice_an_unknown_key() -> None:
    given = FILES[0].read_text().replace('"editable": true', '"editible": true')
    assert round_trip(given) != given


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_panel_is_complete(path: Path) -> None:
    board = json.loads(path.read_text())
    assert board["uid"] == path.stem and board["tags"] == ["enginerun"]
    assert [variable["name"] for variable in board["templating"]["list"]][:2] == ["datasource", "run"]
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert panels
    for panel in panels:
        assert panel["title"] and panel["description"] and panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["targets"] and all(target["expr"] for target in panel["targets"])


def test_there_are_four_dashboards_with_links_to_each_other() -> None:
    boards = [json.loads(path.read_text()) for path in FILES]
    assert len({board["uid"] for board in boards}) == len(boards) == 4
    assert all(board["links"][0]["tags"] == ["enginerun"] and board["links"][0]["keepTime"] for board in boards)


@pytest.mark.parametrize(
    ("expr", "problem"),
    [
        ("rate(engine_colectives_total[1m])", "names engine_colectives_total, which no code exports"),
        ("engine_collective_duration_seconds", "names engine_collective_duration_seconds, which no code exports"),
        ('engine_rank_up{ranks="1"}', "asks engine_rank_up for the label ranks, which it does not have"),
        ('engine_knob{name="threshold"}', "asks engine_knob for name=threshold, which it never is"),
        ('engine_errors_total{kind=~"died|burnt"}', "asks engine_errors_total for kind=burnt, which it never is"),
        ("sum by (run, op) (engine_rank_up)", "groups by op, which none of its metrics has"),
        ("sum by (run) (run:engine_steps:rate1m)", "names run:engine_steps:rate1m, which no code exports"),
        ("vector(0)", "names no metric"),
    ],
)
def test_what_no_code_exports_is_refused(expr: str, problem: str) -> None:
    assert next(promql.find_problems(expr)).startswith(problem)


@pytest.mark.parametrize(
    "expr",
    [
        "histogram_quantile(0.95, sum by (op, le) (rate(engine_collective_duration_seconds_bucket[$__rate_interval])))",
        "sum without (instance) (engine_rank_up) and on (run) engine_job_active == bool 1",
        'run_rank:engine_arrival_lag_seconds:mean1m{rank="2"} offset 5m',
        'label_replace(engine_rank_up, "nonsense", "$1", "rank", "(.*)")',
    ],
)
def test_what_is_exported_or_recorded_is_accepted(expr: str) -> None:
    assert list(promql.find_problems(expr)) == []


def test_generation_fails_when_a_panel_lacks_something(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bad = Panel("stat", "Bad", " ", "", (Query("sum(engine_rank_upp)"),))
    board = replace(DASHBOARDS[0], rows=(("Row", (bad,)),))
    problems = list(command.find_problems(board))
    assert any("no about" in problem for problem in problems) and any("no unit" in problem for problem in problems)
    assert any("engine_rank_upp" in problem for problem in problems)
    monkeypatch.setattr(command, "DASHBOARDS", (board,))
    monkeypatch.setattr(command, "DIRECTORY", tmp_path)
    assert command.main([]) == 1
    assert list(tmp_path.iterdir()) == []


def test_panels_that_overlap_or_lie_outside_are_refused() -> None:
    board = json.loads(render_dashboard(DASHBOARDS[0]))
    assert list(find_layout_problems(board)) == []
    board["panels"][2]["gridPos"]["x"] -= 1
    assert "covers" in next(find_layout_problems(board))
    board["panels"][2]["gridPos"].update(x=22, w=4, y=500)
    assert "outside" in next(find_layout_problems(board))


def test_every_panel_has_queries_with_ranges() -> None:
    asked = list(list_panel_queries())
    assert len(asked) > 60
    assert all(one.query.low <= one.query.high and one.unit and one.title for one in asked)
    assert "$" not in "".join(one.make_expression("a") for one in asked)


def test_hurried_rules_wait_less() -> None:
    assert (
        shorten_durations("rate(x_mean1m[1m]) offset 30s\nfor: 15m > 600", 10)
        == "rate(x_mean1m[6s]) offset 3s\nfor: 90s > 600"
    )
