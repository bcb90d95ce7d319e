# ruff: noqa: E402 - the path first
"""The benchmark of policies: recorded surfaces, surfaces that change, and runs that are merged."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="needs matplotlib")
pytest.importorskip("rich", reason="needs rich")
ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "benchmarks").exists():
    pytest.skip("the benchmarks are not part of this copy", allow_module_level=True)

from rich.console import Console

from benchmarks.autotune import contenders, drift, minutes, problems, recorded, report, run
from benchmarks.autotune.recorded import RecordedSurface, RecordingError
from benchmarks.autotune.surfaces import DEFAULT
from benchmarks.common import paths

AXES: dict[str, list[Any]] = {
    "fusion_threshold": [1 << 16, 1 << 22, 1 << 30],
    "cycle_time_ms": [0, 10.0, 0.1],
    "stores": ["cached", "streaming"],
}


def median_of(threshold: int, cycle: float, stores: str) -> float:
    place = {1 << 16: 0.0, 1 << 22: 1.0, 1 << 30: 3.0}[threshold]
    return 0.1 + 0.02 * place + {0: 0.05, 0.1: 0.0, 10.0: 0.03}[cycle] + 0.01 * (stores == "streaming")


def recording() -> dict[str, Any]:
    """Return an invented recording; the samples of a cell are its median, and values around it that differ by cell."""
    cells = []
    for number, knobs in enumerate(itertools.product(*AXES.values())):
        scatter = np.array([-0.02, 0.0, 0.01 + 0.001 * number])
        samples = median_of(*knobs) * np.exp(scatter)
        cells.append({"knobs": dict(zip(AXES, knobs, strict=True)), "samples": samples.tolist()})
    default = {"fusion_threshold": 1 << 26, "cycle_time_ms": 5.0, "stores": "cached"}
    head = {"schema": 1, "workload": "made up", "ranks": 2, "environment": {}}
    return {**head, "default": default, "axes": AXES, "cells": cells}


def test_a_recording_is_what_was_measured_at_its_cells() -> None:
    found = RecordedSurface(recording(), "file")
    for threshold, cycle, stores in itertools.product(*AXES.values()):
        knobs = {"fusion_threshold": threshold, "cycle_time_ms": cycle, "stores": stores}
        assert found.compute_seconds(knobs) == pytest.approx(median_of(threshold, cycle, stores), rel=1e-12)
    assert found.least == pytest.approx(0.1)
    knobs = found.space.describe()
    assert knobs["fusion_threshold"] == {"kind": "Integer", "low": 1 << 16, "high": 1 << 30, "log": True, "off": None}
    assert knobs["cycle_time_ms"] == {"kind": "Real", "low": 0.1, "high": 10.0, "log": True, "off": 0}
    assert knobs["stores"] == {"kind": "Choice", "values": ["cached", "streaming"]}


def test_between_cells_logarithms_are_interpolated_where_the_tuner_sees_a_setting() -> None:
    found = RecordedSurface(recording(), "file")
    # Half way on both log scales; 0 is on none.
    knobs = {"fusion_threshold": 1 << 26, "cycle_time_ms": 1.0, "stores": "streaming"}
    corners = [median_of(a, b, "streaming") for a in (1 << 22, 1 << 30) for b in (0.1, 10.0)]
    assert found.compute_seconds(knobs) == pytest.approx(np.exp(np.mean(np.log(corners))), rel=1e-12)
    # A quarter of the way on one log scale.
    knobs |= {"fusion_threshold": 1 << 24, "cycle_time_ms": 0}
    ends = [median_of(a, 0, "streaming") for a in (1 << 22, 1 << 30)]
    assert found.compute_seconds(knobs) == pytest.approx(ends[0] ** 0.75 * ends[1] ** 0.25, rel=1e-12)
    # Outside the recorded range the edge applies.
    outside = {"fusion_threshold": 1 << 10, "cycle_time_ms": 99.0, "stores": "cached"}
    assert found.compute_seconds(outside) == pytest.approx(median_of(1 << 16, 10.0, "cached"), rel=1e-12)


def test_steps_scatter_as_in_the_nearest_cell() -> None:
    found, rng = RecordedSurface(recording(), "file"), np.random.default_rng(0)
    knobs = {"fusion_threshold": 1 << 27, "cycle_time_ms": 0.2, "stores": "streaming"}
    number = list(itertools.product(*AXES.values())).index((1 << 30, 0.1, "streaming"))
    scatter = np.log(found.draw_steps(knobs, 200, rng) / found.compute_seconds(knobs))
    assert set(np.round(scatter, 9)) == set(np.round([-0.02, 0.0, 0.01 + 0.001 * number], 9))


def _lose(content: dict[str, Any]) -> None:
    content["cells"].pop(4)


def _double(content: dict[str, Any]) -> None:
    content["cells"][3] = content["cells"][2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: content.update(schema=2), "file: schema 2, where 1 is read"),
        (lambda content: content.pop("axes"), "file lacks 'axes'"),
        (lambda content: content["cells"][2].pop("samples"), "file lacks 'samples'"),
        (_lose, r"file: 1 cells are missing, the first is \{'fusion_threshold': 65536, 'cycle_time_ms': 0.1, 'stores'"),
        (_double, "file: cell 3 is of the same setting as another"),
        (lambda content: content["cells"][1]["knobs"].pop("stores"), "file: cell 1 has the knobs"),
        (lambda content: content["cells"][1]["knobs"].update(stores="auto"), "stores='auto', which is not on its axis"),
        (lambda content: content["cells"][0].update(samples=[0.1, 0.1]), "file: cell 0 needs at least 3 samples"),
        (lambda content: content["cells"][0].update(samples=[0.1, 0.1, -1]), "file: cell 0 needs at least 3 samples"),
        (lambda content: content["default"].update(cycle_time_ms=50), "file: the default has a bad 'cycle_time_ms'"),
        (lambda content: content["axes"].update(stores=["cached"]), "file: a choice is among two or more"),
        (lambda content: content["axes"].update(cycle_time_ms=[1.0]), "file: low must be below high"),
    ],
)
def test_a_file_that_is_no_full_grid_is_refused(change: Callable[[dict[str, Any]], Any], said: str) -> None:
    content = json.loads(json.dumps(recording()))
    change(content)
    with pytest.raises(RecordingError, match=said):
        RecordedSurface(content, "file")


@pytest.fixture
def recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(recorded, "FOLDER", tmp_path)
    (tmp_path / "made_up.json").write_text(json.dumps(recording()))
    return tmp_path


@pytest.fixture
def console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Console:
    """Return a console that writes to memory, and redirect results, so that earlier measurements stay."""
    monkeypatch.setattr(paths, "OUT", tmp_path / "out")
    return Console(file=io.StringIO(), width=160)


def test_what_is_written_is_read_and_takes_the_place_of_what_was_there(recordings: Path) -> None:
    content = recording()
    for change in (1.0, 1.25):
        cells = [{**cell, "samples": [change * each for each in cell["samples"]]} for cell in content["cells"]]
        default = content["default"] | {"version": 7}  # a knob that has no axis
        path = recorded.write("job", 2, {"revision": "x"}, default, AXES, cells)
        found = recorded.read_surface("recorded:job")
        assert path == recordings / "job.json" and run.list_surfaces()[-2:] == ("recorded:job", "recorded:made_up")
        assert (found.workload, found.ranks, found.default) == ("job", 2, content["default"])
        assert found.least == pytest.approx(0.1 * change, rel=1e-5)
    with pytest.raises(RecordingError, match=r"job\.json: 1 cells are missing"):
        recorded.write("job", 2, {}, default, AXES, cells[1:])
    assert len(json.loads(path.read_text())["cells"]) == len(cells)


@pytest.mark.usefixtures("recordings")
@pytest.mark.parametrize("contender", ["ours", "random", "horovod", "optuna_tpe"])
def test_policies_search_a_recorded_surface(contender: str) -> None:
    if contender.startswith("optuna"):
        pytest.importorskip("optuna", reason="needs optuna")
    assert run.list_surfaces()[-1] == "recorded:made_up"
    row = run.run_search(run.AutotuneSettings(trials=12), "recorded:made_up", problems.RECORDED, contender, 0)
    assert row["trials"] == 12 or (contender == "ours" and row["trials"] < 12)
    assert 0.0 <= row["regret"] <= row["default_regret"] + 0.2


def test_optuna_gets_the_whole_space(recordings: Path) -> None:
    pytest.importorskip("optuna", reason="needs optuna")
    problem = problems.make_problem("recorded:made_up", problems.RECORDED, 0)
    tried: list[dict[str, Any]] = []

    def measure(knobs: dict[str, Any], limit: float) -> tuple[np.ndarray, bool]:
        tried.append(knobs)
        return np.array([problem.seconds(knobs)]), False

    best = contenders.search_with_tpe(problem, 0, 30, measure)
    assert tried[0] == problem.default
    assert all(problem.space.check(knobs) == knobs for knobs in tried)
    assert {knobs["cycle_time_ms"] == 0 for knobs in tried} == {True, False}
    assert problem.seconds(best) == min(map(problem.seconds, tried))


def test_horovods_policy_is_not_run_without_its_knobs(recordings: Path) -> None:
    content = recording()
    content["axes"] = {"cycle_time_ms": AXES["cycle_time_ms"]}
    content["cells"] = [
        {"knobs": {"cycle_time_ms": cycle}, "samples": [0.1, 0.1, 0.1]} for cycle in AXES["cycle_time_ms"]
    ]
    content["default"] = {"cycle_time_ms": 5.0}
    (recordings / "one.json").write_text(json.dumps(content))
    cases = run.AutotuneSettings(seeds=1, surfaces=run.list_surfaces()[-2:]).list_searches()
    assert {surface for surface, _, contender, _ in cases if contender == "horovod"} == {"recorded:made_up"}
    assert {surface for surface, _, contender, _ in cases if contender == "ours"} == set(run.list_surfaces()[-2:])


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["slower", "faster"])
def test_a_drift_is_noticed_and_what_is_found_then_is_better(kind: str) -> None:
    row = drift.run_search("narrow", "3 %", kind, 0, trials=20, steps=30, observed=400, horizon=2000)
    assert row["alarms"] == [] and 0 < row["noticed"] <= 200 and row["trials"] <= 15
    assert row["regret"] < 0.5 * row["regret_before"]


def test_a_trial_is_cut_short_as_soon_as_its_median_is_slow() -> None:
    slow_later = np.array([1.0, 1.0, 3.0, 3.0, 3.0, 3.0])
    samples, cut = problems.cut_short(slow_later, 1.5)
    assert cut and samples.tolist() == [1.0, 1.0, 3.0, 3.0]
    assert problems.cut_short(slow_later, 4.0)[1] is False
    assert problems.cut_short(np.array([3.0, 3.0, 3.0]), 1.5)[1] is False  # complete


def test_a_minute_that_cannot_win_keeps_its_default() -> None:
    lost, left = minutes.run_minute(0.2, 0)
    assert 0.0 < lost < 0.05 and not left


def test_what_nobody_notices_keeps_its_regret() -> None:
    row = drift.run_search("narrow", "3 %", "slower", 0, trials=20, steps=30, observed=20, horizon=2000)
    assert row["noticed"] is None and row["regret"] == row["regret_before"] > 0.0


def test_a_change_is_as_large_as_it_is_said_to_be() -> None:
    surface = drift._scale_surface(lambda knobs: 0.2 + 0.01 * knobs["cycle_time_ms"], DEFAULT, 0.11)
    assert surface(DEFAULT) == pytest.approx(0.11)
    assert surface(DEFAULT | {"cycle_time_ms": 11.0}) == pytest.approx(0.11 * 0.31 / 0.21)


def test_an_alarm_opens_a_search_and_the_watch_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([False, True, False, True, False])

    class Jumpy:
        done = True
        default, best = DEFAULT, lambda self: DEFAULT
        observe = staticmethod(lambda samples: next(looks))

    problem = problems.make_synthetic_problem(lambda knobs: 0.1, "3 %")
    assert drift._collect_alarms(Jumpy(), problem, 30, 5, np.random.default_rng(0)) == [40, 40]  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_part_that_is_run_again_replaces_its_own_and_leaves_the_rest(console: Console) -> None:
    few = run.AutotuneSettings(
        parts=("searches",), surfaces=("valley", "narrow"), noises=("3 %",), contenders=("random",), seeds=2, trials=3
    )
    first = json.loads(run.run(few, console).read_text())
    again = dataclasses.replace(few, surfaces=("narrow",), contenders=("random", "horovod"), seeds=1)
    second = json.loads(run.run(again, console, merge=True).read_text())
    assert [(row["surface"], row["contender"], row["seed"]) for row in second["searches"]] == [
        ("narrow", "horovod", 0),
        ("narrow", "random", 0),
        ("valley", "random", 0),
        ("valley", "random", 1),
    ]
    assert [run["command"] for run in second["runs"]] == [first["runs"][0]["command"]] * 2
    shown = "\n".join(table.to_markdown() for table in report.build_tables(second))
    assert "| valley | random |" in shown and "| 0 of 2 |" in shown and "Merged: `" in shown
    assert report.draw_figure(second) == paths.OUT / "autotune.png"
    with pytest.raises(ValueError, match="the last run has trials=3, this one 4: they do not merge"):
        run.run(dataclasses.replace(again, trials=4), console, merge=True)
    alone = json.loads(run.run(again, console).read_text())
    assert {row["surface"] for row in alone["searches"]} == {"narrow"}


@pytest.mark.slow
@pytest.mark.usefixtures("recordings")
def test_tables_have_recorded_surfaces_and_drifts(console: Console) -> None:
    settings = run.AutotuneSettings(
        surfaces=("recorded:made_up",), noises=("3 %",), contenders=("random",), seeds=1, trials=4, observed=100
    )
    content = json.loads(run.run(settings, console).read_text())
    assert len(content["searches"]) == 1 and len(content["drifts"]) == len(drift.DRIFTING) * len(drift.KINDS)
    shown = [table.to_markdown() for table in report.build_tables(content)]
    assert "4 trials of 30 steps, recorded on jobs" in shown[0] and "| recorded:made_up | random |" in shown[0]
    assert "10% slower at once" in shown[1] and "no other policy here notices a drift" in shown[2]
    assert "| narrow | 3 % | 0 | 0 of 1 |" in shown[2]
    assert report.draw_figure(content) == paths.OUT / "autotune.png"
