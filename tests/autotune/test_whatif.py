"""Replay of a log's measurements under another policy or other settings."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune import Tuner, cli, journal
from autotune.journal import Journal, JournalError
from autotune.policies import apply_changes, make_policy
from autotune.trials import PolicyError
from autotune.whatif import Evidence, WhatIf, run_what_if, select_first_search

from .surfaces import DEFAULT, SPACE, bowl, cliff, measured, search

SURFACE = bowl(0.3, 0.3, True)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the log of a search with trials cut short, and of another one after a drift."""
    path = tmp_path_factory.mktemp("logs") / "log.jsonl"
    rng = np.random.default_rng(0)
    with Journal(path) as rows:
        tuner = Tuner(SPACE, DEFAULT, seed=3, max_trials=14, journal=rows)
        search(tuner, cliff(0.5), rng)
        while not tuner.observe(measured(SURFACE, tuner.best(), rng)):
            pass
        search(tuner, SURFACE, rng)
    return path


def go(log: Path, name: str = "tuner", *changes: str) -> WhatIf:
    rows = journal.read(log)
    row = apply_changes(rows[0], changes, name)
    return run_what_if(rows, make_policy(name, row), name, row["seed"], row["max_trials"])


def test_the_same_policy_does_what_it_did_up_to_the_drift(log: Path) -> None:
    found, rows = go(log), select_first_search(journal.read(log))
    asked = [row for row in rows if row["row"] == "ask"]
    assert [(line.id, line.phase, line.knobs, line.why) for line in found.lines] == [
        (row["id"], row["phase"], row["knobs"], row["why"]) for row in asked
    ]
    assert [line.status for line in found.lines] == [row["status"] for row in rows if row["row"] == "tell"]
    assert set(found.sources) == {"log"} and found.drifted
    assert found.best == found.logged == [row["knobs"] for row in rows if row["row"] == "decide"][-1]
    assert found.of_logged == (0.0, 0.0) and found.lost == pytest.approx(found.lost_in_log)
    assert any(line.status == "aborted" for line in found.lines)


def test_what_the_log_has_not_tried_is_answered_by_the_model(log: Path) -> None:
    found = go(log, "random")
    assert found.sources == ["log"] + ["model"] * 13
    assert found.lost == pytest.approx(found.lost_by_model)
    assert found.trials_of_best in (0, 1)
    mean, deviation = found.of_default
    truth = math.log(cliff(0.5)(found.best) / cliff(0.5)(DEFAULT))
    assert abs(mean - truth) < 4 * deviation < 2.0
    assert go(log, "random").lines == found.lines != go(log, "random", "seed=4").lines


def test_the_model_has_the_mean_and_the_scatter_of_what_was_measured(tmp_path: Path) -> None:
    path, rng = tmp_path / "log.jsonl", np.random.default_rng(1)
    with Journal(path) as rows:
        search(Tuner(SPACE, DEFAULT, seed=1, max_trials=20, journal=rows), SURFACE, rng, sd=0.05)
    evidence = Evidence(journal.read(path), seed=0)
    near = {"fusion_threshold": 1 << 21, "cycle_time_ms": 0.5, "stores": "streaming"}
    answers = [evidence.answer_trial(near, math.inf) for _ in range(50)]
    assert {(status, source) for _, status, source in answers} == {("ok", "model")}
    logs = np.log([samples for samples, _, _ in answers])
    assert logs.shape == (50, 30)
    assert logs.mean() == pytest.approx(math.log(SURFACE(near)), abs=0.05)
    assert logs.std() == pytest.approx(0.05, rel=0.15)
    assert Evidence(journal.read(path), seed=0).answer_trial(near, math.inf)[0] == answers[0][0]


def logged(*trials: tuple[list[float], str, float]) -> Evidence:
    """Return a log with trials of one other setting, after one of the default."""
    rows: list[dict[str, Any]] = []
    Tuner(SPACE, DEFAULT, journal=rows.append)
    tried = [(DEFAULT, ([0.1] * 10, "ok", math.inf)), *((OTHER, trial) for trial in trials)]
    for number, (knobs, (samples, status, limit)) in enumerate(tried):
        rows.append({"row": "ask", "id": number, "knobs": knobs, "phase": "search", "why": "", "limit": limit})
        rows.append({"row": "tell", "id": number, "status": status, "samples": samples})
    return Evidence(rows, seed=0)


OTHER = DEFAULT | {"stores": "streaming"}
TEN = [0.1 + 0.001 * k for k in range(10)]


def test_samples_are_given_in_the_order_in_which_they_were_measured_and_then_again() -> None:
    evidence = logged((TEN, "ok", 0.2), (TEN[::-1], "ok", 0.2))
    given = [evidence.answer_trial(OTHER, 0.2) for _ in range(3)]
    assert given == [(TEN, "ok", "log"), (TEN[::-1], "ok", "log"), (TEN, "ok", "again")]


def test_a_trial_is_cut_as_its_limit_now_has_it() -> None:
    evidence = logged((TEN, "ok", 0.2))
    assert evidence.answer_trial(OTHER, 0.1) == (TEN[:3], "aborted", "log")
    assert evidence.answer_trial({**OTHER, "cycle_time_ms": 3.0}, 0.01)[1:] == ("aborted", "model")


def test_a_trial_that_was_cut_is_drawn_out_if_it_is_not_cut_now() -> None:
    few = [0.3, 0.32, 0.31, 0.33]
    assert logged((few, "aborted", 0.2)).answer_trial(OTHER, 0.2) == (few, "aborted", "log")
    assert logged((few, "aborted", 0.2)).answer_trial(OTHER, 0.25) == (few, "aborted", "log")
    samples, status, source = logged((few, "aborted", 0.2)).answer_trial(OTHER, math.inf)
    assert (samples[:4], len(samples), status, source) == (few, 10, "ok", "again")
    assert set(samples) <= set(few)


class Stubborn:
    """Policy that asks for given settings only."""

    done = False

    def __init__(self, *settings: dict[str, Any]) -> None:
        self.settings, self.told = list(settings), []

    def ask(self) -> Any:
        return type("Asked", (), {"id": 0, "knobs": self.settings[len(self.told) % len(self.settings)]})

    def tell(self, trial_id: int, samples: Any, status: str = "ok") -> None:
        self.told.append((trial_id, len(samples), status))

    def best(self) -> dict[str, Any]:
        return self.settings[-1]


def test_a_policy_of_ones_own_needs_no_more_than_the_interface(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine_for_whatif.py").write_text(
        "class Mine:\n"
        "    def __init__(self, space, default, seed, max_trials):\n"
        "        self.knobs = default | {'cycle_time_ms': 0.25}\n"
        "        self.left = [default, self.knobs, self.knobs]\n"
        "    done = property(lambda self: not self.left)\n"
        "    def ask(self): return type('Asked', (), {'id': len(self.left), 'knobs': self.left.pop(0)})\n"
        "    def tell(self, trial_id, samples, status='ok'): pass\n"
        "    def best(self): return self.knobs\n"
        "number = 3\n"
        "def none(*arguments): return object()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["replay", str(log), "--policy", "mine_for_whatif:Mine"]) == 0
    said = capsys.readouterr().out
    assert [line.split()[-1] for line in said.splitlines()[3:6]] == ["log", "model", "model"]
    assert (
        "3 trials of mine_for_whatif:Mine: 1 answered by what the log has measured, 0 by samples used again, "
        "2 by the model" in said
    )
    assert "it would have deployed fusion_threshold=128 MiB cycle_time_ms=0.25 stores=cached" in said
    assert "the log goes on, after a drift or in the background" in said and "the model stands in" in said
    for name, says in {
        "mine_for_whatif:Yours": "the module 'mine_for_whatif' has no 'Yours'",
        "mine_for_whatif:number": "is 3, which cannot be called",
        "mine_for_whatif:none": "which lacks ask, tell, done, best",
        "no_such_module:x": "No module named 'no_such_module'",
        "best": "--policy takes tuner, random, default or module:factory, not 'best'",
    }.items():
        assert cli.main(["replay", str(log), "--policy", name]) == 2
        assert says in capsys.readouterr().err


def test_a_policy_that_leaves_the_space_or_never_ends_is_refused(log: Path) -> None:
    rows = journal.read(log)
    with pytest.raises(PolicyError, match=r"--policy mine: trial 1 has a bad 'cycle_time_ms': it is 0\.05 to"):
        run_what_if(rows, Stubborn(DEFAULT, DEFAULT | {"cycle_time_ms": 99.0}), "mine", 0, 5)
    policy = Stubborn(DEFAULT)
    with pytest.raises(PolicyError, match="--policy mine has asked for 5 trials, as many as it may, and is not done"):
        run_what_if(rows, policy, "mine", 0, 5)
    # One trial of the default is in the log; its samples are used again.
    assert policy.told == [(0, 30, "ok")] * 5
    policy = Stubborn(DEFAULT, {"stores": "cached"})
    policy.done = True  # type: ignore[misc]
    with pytest.raises(PolicyError, match="--policy mine: what it deploys lacks 'fusion_threshold', 'cycle_time_ms'"):
        run_what_if(rows, policy, "mine", 0, 5)


def test_other_settings_are_those_of_the_policy(log: Path) -> None:
    few = go(log, "tuner", "max_trials=5", "seed=11")
    assert len(few.lines) == 5
    assert go(log, "tuner", "worth=0.9").best == DEFAULT
    longer = go(log, "tuner", "abort_above=100", "regret_budget=100")
    assert not any(line.status == "aborted" for line in longer.lines[:5])
    assert "again" in longer.sources[:5]  # a trial that was cut short has few steps
    assert len(go(log, "default").lines) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "worth"], "--set takes NAME=VALUE, not 'worth'"),
        (["--set", "luck=1"], "--set luck: the policy 'tuner' has no such setting; it has abort_above, hope, horizon"),
        (["--set", "worth=much"], "--set worth takes a number of at least 0, not 'much'"),
        (["--set", "worth=nan"], "--set worth takes a number of at least 0, not 'nan'"),
        (["--set", "worth=-1"], "--set worth takes a number of at least 0, not '-1'"),
        (["--set", "regret_budget=0"], "--set regret_budget takes a number of at least 1e-06, not '0'"),
        (["--set", "horizon=1.5"], "--set horizon takes a whole number of at least 1, not '1.5'"),
        (["--set", "max_trials=0"], "--set max_trials takes a whole number of at least 1, not '0'"),
        (["--set", "after_drift=3"], "--set after_drift has no effect: the replay ends with the first search"),
        (["--set", "worth=0.1", "--policy", "random"], "'random' has no such setting; it has max_trials, seed"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(
    log: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", str(log), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_log_without_a_trial_has_nothing_to_answer_from(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with Journal(path) as rows:
        Tuner(SPACE, DEFAULT, journal=rows).ask()
    with pytest.raises(JournalError, match="the log ends before a trial was told"):
        go(path, "random")
    assert cli.main(["replay", str(path), "--policy", "random"]) == 2
