"""Logs, their replay, and the commands that read them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune import Tuner, cli, journal, picture
from autotune.hindsight import compute_regrets
from autotune.journal import Journal, JournalError
from autotune.log_summary import summarize_log
from autotune.replay import replay_log

from .surfaces import DEFAULT, SPACE, bowl, measured, search


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the log of a search with a drift."""
    path = tmp_path_factory.mktemp("logs") / "log.jsonl"
    rng = np.random.default_rng(0)
    with Journal(path, {"model": "a bowl"}) as rows:
        tuner = Tuner(SPACE, DEFAULT, seed=3, max_trials=14, journal=rows)
        search(tuner, bowl(0.3, 0.3, True), rng)
        for _ in range(10):
            if tuner.observe(measured(bowl(0.8, 0.3, False), tuner.best(), rng)):
                break
        search(tuner, bowl(0.8, 0.3, False), rng)
    return path


def changed(log: Path, path: Path, change: Callable[[list[dict[str, Any]]], Any]) -> Path:
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    change(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_replay_reproduces_every_row_exactly(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = journal.read(log)
    result = replay_log(rows)
    assert result.exact and not result.differences
    assert result.proposals == sum(row["row"] == "ask" for row in rows) > 14
    assert result.decisions >= 3
    assert cli.main(["replay", str(log)]) == 0
    assert "reproduced exactly" in capsys.readouterr().out


def test_a_log_is_private_and_is_not_written_over(log: Path) -> None:
    assert log.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError, match="a log holds one search"):
        Journal(log)


def test_a_killed_search_leaves_whole_rows(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    script = (
        "import os, signal, sys\n"
        "from autotune import *\n"
        "from autotune.journal import Journal\n"
        "tuner = Tuner(Space(a=Real(0, 1)), {'a': 0.5}, journal=Journal(sys.argv[1]))\n"
        "for k in range(6): tuner.tell(tuner.ask().id, [1.0 + 0.01 * k])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert killed.returncode == -9
    assert [row["row"] for row in journal.read(path)] == ["open", *["ask", "tell"] * 6]
    assert replay_log(journal.read(path)).proposals == 6


def _swap(rows: list[dict[str, Any]]) -> None:
    rows[4], rows[5] = rows[5], rows[4]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_swap, r"line 5: expected row n=4, not n=5: rows are missing, or not in order"),
        (lambda rows: rows.pop(7), r"line 8: expected row n=7, not n=8"),
        (lambda rows: rows.pop(0), r"line 1: expected a row 'open'"),
        (lambda rows: rows[0].update(schema=2), r"line 1: expected schema 1, not 2; it was written by a newer version"),
        (lambda rows: rows[0].pop("schema"), r"line 1: expected schema 1, not None; it was not written by the tuner"),
        (lambda rows: rows[3].update(row="poem"), r"line 4: expected a row of kind 'ask', 'tell', 'observe', 'decide'"),
        (lambda rows: rows[2].pop("samples"), r"line 3: expected a field 'samples' in a row 'tell'"),
        (lambda rows: rows[2].update(samples="fast"), r"line 3: expected 'samples' to be a list"),
        (
            lambda rows: rows[2].update(samples=[-1.0]),
            r"line 3: expected samples in seconds, positive and finite, not -1.0",
        ),
    ],
)
def test_a_damaged_log_is_refused_by_its_line(
    log: Path,
    tmp_path: Path,
    change: Callable[[list[dict[str, Any]]], Any],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = changed(log, tmp_path / "log.jsonl", change)
    with pytest.raises(JournalError, match=said):
        journal.read(path)
    for command in ("replay", "show", "best"):
        assert cli.main([command, str(path)]) == 2
    assert "autotune: error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "is empty"),
        (b"step,loss\n1,2\n", "line 1: expected a row in JSON, but: .* Is this a log of the tuner"),
        (b"[1, 2]\n", "line 1: expected a row 'open'"),
        (b'{"row": "op', "line 1: truncated"),
        (b"\xff\xfe\x00\n", "line 1: expected a row in JSON"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(text)
    with pytest.raises(JournalError, match=said):
        journal.read(path)


def test_a_truncated_log_says_what_is_whole(log: Path, tmp_path: Path) -> None:
    path, data = tmp_path / "log.jsonl", log.read_bytes()
    path.write_bytes(data[: data.index(b"\n", 2000) + 20])
    with pytest.raises(JournalError, match=r"line (\d+): truncated, .* head -n \d+ keeps them"):
        journal.read(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows[0].update(seed=4), r"line \d+: the log has trial 1 .*, and the policy now trial 1 "),
        (lambda rows: rows[2].update(samples=[9.0] * 30), r"line \d+: the log has"),
        (lambda rows: rows[-1].update(knobs=DEFAULT), r"the log has the decision to finish .*, and the policy now"),
        (lambda rows: rows[0]["settings"].update(luck=1), r"line 1: settings \['luck'\] are unknown"),
        (lambda rows: rows[0]["settings"].pop("refill"), r"line 1: an earlier version .*\['refill'\]"),
        (lambda rows: rows.pop(), r"the log ends, where the policy goes on with the decision to finish"),
    ],
)
def test_a_log_that_tells_another_story_is_not_reproduced(
    log: Path,
    tmp_path: Path,
    change: Callable[[list[dict[str, Any]]], Any],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = changed(log, tmp_path / "log.jsonl", change)
    with pytest.raises(JournalError, match=said):
        replay_log(journal.read(path))
    assert cli.main(["replay", str(path)]) == 1
    assert "not reproduced" in capsys.readouterr().err


HUGE = 10**400


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows[2].update(id=5), r"line 3: expected a trial that waits to be told \(0\), not trial 5"),
        (lambda rows: rows[3].update(id=0), "line 4: expected a new trial, but trial 0 was asked for before"),
        (lambda rows: rows[0]["default"].update(stores="none"), "line 1: the default has a bad 'stores'"),
        (lambda rows: rows[0].update(first=["x"]), "line 1: expected setting 0 of 'first' to be an object, not 'x'"),
        (lambda rows: rows[0]["settings"].update(worth="x"), "line 1: expected the setting 'worth' to be a number"),
        (lambda rows: rows[0].update(about="x"), "line 1: expected 'about' to be an object, not 'x'"),
        (lambda rows: rows[0].update(environment=[]), "line 1: expected 'environment' to be an object"),
        (lambda rows: rows[0]["space"].update(stores=[1]), "line 1: knob 'stores' is not described as"),
        (lambda rows: rows[1].update(knobs={}), "line 2: the setting of a row 'ask' lacks 'fusion_threshold'"),
        (lambda rows: rows[1].update(phase="x"), "line 2: expected 'phase' to be one of default, design, search,"),
        (lambda rows: rows[3].update(limit="x"), "line 4: expected 'limit' to be a number, not 'x'"),
        (lambda rows: rows[2].update(samples=[]), "line 3: expected at least one sample"),
        (
            lambda rows: rows[2].update(samples=[HUGE]),
            "line 3: .*, but: the whole number 1000.* has more than 64 bits",
        ),
        (lambda rows: rows[-1].update(knobs={"zz": 1}), r"line \d+: the setting of a row 'decide' lacks"),
    ],
)
def test_a_damaged_log_is_refused_by_its_line_whatever_is_asked_of_it(
    log: Path,
    tmp_path: Path,
    change: Callable[[list[dict[str, Any]]], Any],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = changed(log, tmp_path / "log.jsonl", change)
    for command in (["show"], ["best"], ["replay"], ["replay", "--set", "seed=1"]):
        assert cli.main([command[0], str(path), *command[1:]]) == 2
        assert re.search(said, capsys.readouterr().err)


def test_what_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"[" * 200_000 + b"\n")
    with pytest.raises(JournalError, match="line 1: expected a row in JSON, but: is nested too deeply"):
        journal.read(path)


def test_under_other_versions_last_digits_may_differ_and_no_more(log: Path, tmp_path: Path) -> None:
    def elsewhere(rows: list[dict[str, Any]]) -> None:
        rows[0]["environment"]["numpy"] = "1.0"

    def last_digits(rows: list[dict[str, Any]]) -> None:
        elsewhere(rows)
        for row in rows:
            if row["row"] == "decide" and "gap" in row:
                row["gap"] *= 1 + 1e-9
            if row["row"] == "ask" and row["phase"] == "search":
                row["why"] = "said otherwise"

    def another(rows: list[dict[str, Any]]) -> None:
        elsewhere(rows)
        next(row for row in rows if row["row"] == "ask" and row["phase"] == "search")["knobs"]["cycle_time_ms"] = 17.0

    result = replay_log(journal.read(changed(log, tmp_path / "close", last_digits)))
    assert not result.exact
    assert result.differences == [f"numpy 1.0 there, {np.__version__} here"]
    with pytest.raises(JournalError, match=r"cycle_time_ms=17\.0"):
        replay_log(journal.read(changed(log, tmp_path / "far", another)))


def test_show_tells_the_story_and_draws_it(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "log.png"
    assert cli.main(["show", str(log), "--picture", str(file)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    for phase in ("default", "design", "search", "confirm", "reopen", "finish"):
        assert phase in told
    assert "model=a bowl" in told and "128 MiB" in told
    for curve in ("least so far", "regret", "lost so far"):
        assert curve in told
    assert file.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_a_log_of_another_version_is_shown(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = changed(log, tmp_path / "log.jsonl", lambda rows: rows[0]["settings"].update(luck=1))
    assert cli.main(["show", str(path), "--picture", str(tmp_path / "log.svg")]) == 0
    assert "finish" in capsys.readouterr().out


def test_a_picture_has_a_curve_for_each_search_a_slice_for_each_knob_and_a_map_for_each_two_numbers(log: Path) -> None:
    figure = picture.draw_figure(journal.read(log))
    labels = [(axes.get_xlabel(), axes.get_ylabel()) for axes in figure.axes if axes.get_title()]
    believed = picture.BELIEVED
    assert labels == [
        ("trial", "measured time, of what stood before"),
        ("trial", "regret of the best measured so far (%)"),
        *((name, believed) for name in SPACE.knobs),
        ("fusion_threshold", "cycle_time_ms"),
    ]


def test_a_search_that_has_told_nothing_is_shown(log: Path, tmp_path: Path) -> None:
    for kept in (1, 2):
        path = changed(log, tmp_path / f"{kept}.jsonl", lambda rows, kept=kept: rows.__delitem__(slice(kept, None)))
        assert cli.main(["show", str(path), "--picture", str(tmp_path / "log.png")]) == 0


def test_regret_is_by_what_is_believed_at_the_end_of_each_search(log: Path) -> None:
    rows = journal.read(log)
    summary = summarize_log(rows)
    regret = compute_regrets(rows, summary)
    epochs = [line.epoch for line in summary.lines]
    assert len(regret) == len(summary.lines) and set(epochs) == {0, 1}
    second = epochs.index(1)
    for first, last in ((0, second - 1), (second, -1)):
        assert regret[first] > 0.05 > 0.02 > regret[last] >= 0.0
    # The regret changes only when another setting looks best.
    best = summary.compute_best_so_far()
    assert all(regret[k] == regret[k - 1] for k in range(1, second) if best[k] == best[k - 1])
    lost = summary.compute_lost_so_far()
    assert lost == sorted(lost) and lost[0] == 0.0 < lost[-1]


def test_best_prints_what_was_decided(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decided = [row for row in journal.read(log) if row["row"] == "decide"][-1]["knobs"]
    said = {}
    for form in ("json", "environment", "options"):
        assert cli.main(["best", str(log), "--format", form]) == 0
        said[form] = capsys.readouterr().out
    assert json.loads(said["json"]) == decided
    assert f"ENGINE_FUSION_THRESHOLD={decided['fusion_threshold']}\n" in said["environment"]
    options = f"--fusion-threshold {decided['fusion_threshold']} --cycle-time-ms {decided['cycle_time_ms']}"
    assert said["options"] == f"enginerun {options} --stores {decided['stores']}\n"


HOROVOD = """hierarchical_allreduce,hierarchical_allgather,cache_enabled,cycle_time_ms,tensor_fusion_threshold,score
0,0,0,5,4,424.5
0,0,0,17.5,64,612.25
1,0,1,25,16,480
"""


def test_the_log_of_horovods_tuner_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "autotune.csv"
    path.write_text(HOROVOD)
    assert cli.main(["best", str(path), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"fusion_threshold": 64 << 20, "cycle_time_ms": 17.5}
    assert cli.main(["show", str(path)]) == 0
    assert "612.2 ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇ best" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HOROVOD.replace("score", "points"), "line 1: expected the columns"),
        (HOROVOD.replace("612.25", "much"), "line 3: expected a number"),
        (HOROVOD.replace("612.25", "nan"), "line 3: expected a number in each column"),
        (HOROVOD.splitlines()[0] + "\n", "line 2: expected a sample"),
    ],
)
def test_a_damaged_csv_is_refused_by_its_line(
    tmp_path: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "autotune.csv"
    path.write_text(text)
    assert cli.main(["best", str(path)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("command", "missing"), [("show", "rich"), ("replay", "scipy")])
def test_what_is_not_installed_is_named(log: Path, command: str, missing: str) -> None:
    without = f"import sys; sys.modules[{missing!r}] = None; from autotune.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", without, command, str(log)], text=True, capture_output=True)
    assert done.returncode == 2
    assert done.stderr == f"autotune: error: {missing} is missing: pip install '.[autotune]' in the source tree\n"


def test_best_needs_nothing_but_numpy(log: Path) -> None:
    without = "import sys; sys.modules.update(scipy=None, rich=None); from autotune.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", without, "best", str(log)], text=True, capture_output=True)
    assert done.returncode == 0 and done.stdout.startswith("ENGINE_FUSION_THRESHOLD="), done.stderr


def test_the_policy_imports_no_framework_and_no_engine() -> None:
    unwanted = {"torch", "sklearn", "engine", "engine_ext", "rich", "matplotlib"}
    script = f"import sys, autotune; print(sorted({unwanted} & set(sys.modules)))"
    said = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, check=True, env=os.environ)
    assert said.stdout.strip() == "[]"


def with_hostile_texts(value: Any, text: str) -> Any:
    """Return a field's value with `text` appended to every text in it."""
    if isinstance(value, dict):
        return {name: with_hostile_texts(each, text) for name, each in value.items()}
    if isinstance(value, list):
        return [with_hostile_texts(each, text) for each in value]
    return value + text if isinstance(value, str) else value


@pytest.mark.sample(1)
@pytest.mark.parametrize("text", ["\x1b[2K\r\x9b1A\u202e", "[/]"])
def test_texts_of_a_log_do_not_control_the_terminal(
    log: Path, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each text is replaced in turn, because a log with several hostile texts is often refused for the first."""
    places = [
        (number, name)
        for number, row in enumerate(map(json.loads, log.read_text().splitlines()))
        for name in row
        if name != "row" and (number < 3 or number > 60)
    ]
    shown = 0
    for number, name in places:
        path = changed(
            log,
            tmp_path / "log.jsonl",
            lambda rows, n=number, name=name: rows[n].update({name: with_hostile_texts(rows[n][name], text)}),
        )
        for command in ("show", "best"):
            shown += cli.main([command, str(path)]) == 0
            said = "".join(capsys.readouterr())
            assert all(each.isprintable() for each in said.replace("\n", "")), (number, name, command)
    assert shown > len(places)
