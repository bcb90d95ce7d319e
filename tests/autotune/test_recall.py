"""Recall of earlier searches: how a job is identified, what is stored, and what later jobs try first."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from autotune import cli, journal, result_cache
from autotune.replay import replay_log
from autotune.session import Session, SessionError
from engine.config import config
from engine.errors import ConfigError
from engine.launch.cli.options import parse
from engine.tuning import trial_loop as tuning
from engine.tuning.job import describe_job, describe_model
from engine.tuning.knobs import KNOBS, describe_misfit

from ..ranks import run_ranks
from . import recall_programs, tuned_programs
from .test_session import BEGIN, packed, searched, seconds

FEW = ["--autotune", "--autotune-steps-per-sample", "4", "--autotune-bayes-opt-max-samples", "12"]

# Jobs


@pytest.mark.slow
def test_a_search_begins_with_what_the_last_one_has_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = tmp_path / "cache"
    options = [*FEW, "--autotune-cache", str(cache), "--log-level", "info"]
    models = [(10, 20_000), (20_000, 10), (900_000,)]  # the second is the first in another order
    two = run_ranks(2, recall_programs.searches, str(tmp_path), models, options=options, timeout=100.0)
    three = run_ranks(3, recall_programs.searches, str(tmp_path), [(20_000, 10)], options=options)
    assert two.values[0] == two.values[1] and three.values[0] == three.values[1] == three.values[2]
    found = two.values[0]
    logs = [journal.read(tmp_path / name) for name in ("2.0.jsonl", "2.1.jsonl", "2.2.jsonl", "3.0.jsonl")]
    first, again, other, wider = (rows[0] for rows in logs)
    assert all(replay_log(rows).exact for rows in logs)
    # The first job has nothing to recall. Each later one tries the nearest result right after the default.
    suggested = first["about"]["link"]["suggests"] if "link" in first["about"] else None
    assert first["first"] == [suggested] * (suggested is not None) and "nothing is known" in first["about"]["recalled"]
    kept = next(row["knobs"] for row in logs[0] if row.get("final"))
    assert kept["cycle_time_ms"] <= 2.0 and kept == found[0]
    for rows in logs[1:3]:
        assert rows[0]["first"][0] == found[0 if rows is logs[1] else 1]
        assert [row["knobs"] for row in rows if row["row"] == "ask"][:2] == [rows[0]["default"], rows[0]["first"][0]]
    assert again["about"]["recalled"].startswith("this job: on ")
    assert other["about"]["recalled"].startswith("another model, of 0.244 MB and not 3.76 MB: on ")
    assert wider["first"][0] == found[1] and wider["about"]["recalled"].startswith("the same model, on 2 ranks: on ")
    about = {name: first["about"][name] for name in ("model", "tensors", "bytes")}
    assert about["tensors"] == 6 and about["bytes"] == 4 * (3 + 1000 + 40_000 + 1 + 20_010)
    assert about == {name: again["about"][name] for name in about} == {name: wider["about"][name] for name in about}
    # There is one file for each kind of job, and the log shows what was recalled.
    results, skipped = result_cache.read(cache)
    assert len(results) == 3 and not skipped
    assert {(each.job.ranks, each.job.tensors) for each in results} == {(2, 6), (2, 5), (3, 6)}
    assert "autotune: recalled from this job: on " in two.ranks[0].stderr
    assert cli.main(["show", str(tmp_path / "2.1.jsonl")]) == 0
    shown = capsys.readouterr().out.replace("\n", "").replace(" ", "")
    assert "recalled:thisjob:on" in shown and "triedfirst:fusion_threshold=" in shown


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_told_once_and_tuning_goes_on() -> None:
    options = [*FEW, "--autotune-cache", "/proc/nowhere"]
    finished = run_ranks(1, tuned_programs.until_over, options=options)
    said = [line for line in finished.ranks[0].stderr.splitlines() if "autotune: " in line]
    assert len(said) == 2
    assert "what was found cannot be kept in /proc/nowhere: No such file or directory" in said[0]
    assert " trials" in said[1]


# Identity of a job


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith(("ENGINE_", "HOROVOD_")):
            monkeypatch.delenv(name)
    yield
    engine.shutdown()


@pytest.mark.usefixtures("alone")
def test_the_engine_tells_what_it_reduces() -> None:
    engine.init()
    native = engine.session.runtime.current_engine()
    assert native.definitions() == []
    for _ in range(3):
        engine.allreduce(np.ones((3, 4), np.float64), name="a", op=engine.Max)
    engine.grouped_allreduce([np.ones(5, np.float32), np.ones((2, 2), np.int64)], name="g", op=engine.Sum)
    engine.broadcast(np.ones(2, np.uint8), 0, name="b")
    engine.reducescatter(np.ones((6, 2), np.float16), name="r", op=engine.Sum)
    engine.allgather(np.ones(2, np.int32))
    told = {each["name"]: each for each in native.definitions()}
    assert set(told) == {"a", "g", "b", "r", "allgather.noname.0"}
    expected = {"kind": "allreduce", "op": "max", "dtype": "float64", "tensors": 1, "sparse": False, "wire": 0}
    assert told["a"] == expected | {"name": "a", "dims": (3, 4), "bytes": 96, "times": 3}
    assert (told["g"]["tensors"], told["g"]["bytes"], told["g"]["times"]) == (2, 52, 1)
    assert (told["b"]["op"], told["allgather.noname.0"]["op"]) == (None, None)
    assert (told["r"]["kind"], told["r"]["dims"], told["r"]["bytes"]) == ("reducescatter", (6, 2), 24)
    first = describe_model(native.definitions(), 1)
    assert first is not None and (first["tensors"], first["bytes"]) == (4, 96 + 52 + 24)
    engine.grouped_allreduce([np.ones(5, np.float32), np.ones((4, 1), np.int64)], name="g", op=engine.Sum)
    second = describe_model(native.definitions(), 1)  # the same bytes in another shape
    assert second is not None and second["bytes"] == first["bytes"] and second["model"] != first["model"]


def tensor(name: str, **changes: Any) -> dict[str, Any]:
    fields = {"kind": "allreduce", "op": "sum", "dtype": "float32", "tensors": 1, "sparse": False, "wire": 0}
    return {"name": name, **fields, "dims": (2, 3), "bytes": 24, "times": 40, **changes}


def signature(*tensors: dict[str, Any], steps: int = 40) -> str:
    found = describe_model(tensors, steps)
    assert found is not None
    return str(found["model"])


def test_a_model_is_what_is_reduced_in_a_step_and_nothing_else() -> None:
    same = signature(tensor("a"), tensor("b", dims=(7,)))
    assert len(same) == 16 and int(same, 16)
    assert same == signature(tensor("x", dims=(7,)), tensor("c", times=39))
    assert same == signature(tensor("a", times=900), tensor("b", dims=(7,), times=100), steps=800)
    for more in (
        tensor("once", times=1),
        tensor("broadcast.start", kind="broadcast", op=None),
        tensor("allreduce.noname.17"),
    ):
        assert same == signature(tensor("a"), tensor("b", dims=(7,)), more)
    for changes in (
        {"dims": (3, 2)},
        {"dtype": "int32"},
        {"op": "max"},
        {"kind": "reducescatter"},
        {"wire": 2},
        {"sparse": True},
        {"tensors": 2},
    ):
        assert same != signature(tensor("a", **changes), tensor("b", dims=(7,)))
    assert same != signature(tensor("a"), tensor("b", dims=(7,)), tensor("c"))
    assert signature(tensor("a")) != signature(tensor("a"), tensor("b"))
    assert describe_model([], 10) is None and describe_model([tensor("a", times=1)], 10) is None
    assert describe_model([tensor("a", times=0)], 0) is None


# Messages


def reduced(**changes: Any) -> dict[str, Any]:
    return describe_job({"model": "a1", "tensors": 3, "bytes": 100}, (2,), 8, {"stores": "auto"}) | changes


def told(session: Session, **message: Any) -> dict[str, Any]:
    return dict(json.loads(session.answer_message(packed(**message))))


def told_what_is_known(home: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Return the tuner's answer to a request to recall results for a job."""
    session = Session()
    told(session, type="prepare")
    return told(session, type="recall", job=about, cache=str(home))


def search_with(home: Path, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what is recalled for a job, and the end of a search that does not use it."""
    session = Session()
    assert told(session, type="prepare") == {"version": 2, "type": "ready"}
    recalled = told(session, type="recall", job=reduced(**changes), cache=str(home))
    return recalled, searched(lambda **message: told(session, **message))


def test_a_search_is_recalled_by_messages(tmp_path: Path) -> None:
    recalled, done = search_with(tmp_path)
    assert recalled["knobs"] is None and "warnings" not in recalled | done
    recalled, _ = search_with(tmp_path)
    assert recalled["knobs"] == done["best"] and recalled["why"].startswith("this job: ")
    (result,), _ = result_cache.read(tmp_path)
    assert (result.gain, result.sure, result.trials) == (done["gain"], done["sure"], done["trials"])
    assert result.job.processor == journal.read_processor_model() and result.versions["scipy"]
    recalled, _ = search_with(tmp_path, ranks=3)
    assert recalled["why"].startswith("the same model, on 2 ranks: ")
    assert len(list(tmp_path.iterdir())) == 2


def test_what_one_layout_over_hosts_has_taught_is_not_taken_for_another(tmp_path: Path) -> None:
    def laid_out(*crews: int) -> dict[str, Any]:
        about = describe_job({"model": "a1", "tensors": 3, "bytes": 100}, crews, 8, {"stores": "auto"})
        assert (about["ranks"], about["hosts"]) == (sum(crews), len(crews))
        return about

    search_with(tmp_path, **laid_out(4, 2))
    for other in (laid_out(6), laid_out(3, 3), laid_out(2, 2, 2)):
        recalled = told_what_is_known(tmp_path, other)
        assert recalled["knobs"] is None and "nothing is known" in recalled["why"]
    assert told_what_is_known(tmp_path, laid_out(4, 2))["why"].startswith("this job: ")


def test_a_damaged_result_is_told_once_by_its_file(tmp_path: Path) -> None:
    search_with(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text("{")
    (tmp_path / "a1-9-000000000000.json").write_text("")
    recalled, done = search_with(tmp_path)
    assert recalled["knobs"] is None and "warnings" not in done
    (warning,) = recalled["warnings"]
    assert warning.startswith(f"a result that was kept is not used: {path}: ")
    assert warning.endswith("; 1 more are not used either")
    assert search_with(tmp_path)[0]["knobs"] == done["best"]  # a valid file has replaced it


def test_a_cache_that_is_no_directory_is_told_once(tmp_path: Path) -> None:
    home = tmp_path / "file"
    home.touch()
    recalled, done = search_with(home)
    assert recalled["warnings"] == [f"nothing is recalled or kept: {home}: Not a directory"]
    assert done["type"] == "done" and "warnings" not in done
    assert home.read_bytes() == b""


def test_a_search_after_a_drift_that_finds_nothing_leaves_what_is_kept(tmp_path: Path) -> None:
    session = Session()
    told(session, type="recall", job=reduced(), cache=str(tmp_path))
    done = searched(lambda **message: told(session, **message))
    (before,), _ = result_cache.read(tmp_path)
    slower = [3 * seconds(done["best"]["size"])] * 9
    answer: dict[str, Any] = {"type": "watching"}
    while answer["type"] == "watching":
        answer = told(session, type="observe", samples=slower)
    while answer["type"] == "trial":  # all settings are equally fast now
        answer = told(session, type="told", id=answer["id"], status="ok", samples=[1.0 + 0.001 * k for k in range(5)])
    assert answer["gain"] is None and answer["best"] == done["best"] == before.knobs
    assert result_cache.read(tmp_path) == ([before], [])


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({}, "'recall' lacks 'job'"),
        ({"job": reduced()}, "'recall' lacks 'cache'"),
        ({"job": {}, "cache": None}, "'recall' makes no sense: .*missing"),
        ({"job": [], "cache": None}, "'recall' makes no sense"),
        ({"job": reduced(model="/etc/passwd"), "cache": None}, "'model' is '/etc/passwd'"),
        ({"job": reduced(), "cache": 3}, "'recall' makes no sense"),
    ],
)
def test_junk_is_not_recalled(message: dict[str, Any], says: str) -> None:
    with pytest.raises(SessionError, match=says):
        Session().answer_message(packed(type="recall", **message))


def test_what_is_recalled_cannot_come_in_a_search(tmp_path: Path) -> None:
    session = Session()
    told(session, **BEGIN)
    for kind in ("prepare", "recall"):
        with pytest.raises(SessionError, match=f"'{kind}' is not expected now"):
            told(session, type=kind, job=reduced(), cache=str(tmp_path))


# Rank 0


DEFAULT: dict[str, Any] = {"fusion_threshold": 64 << 20, "cycle_time_ms": 5.0, "stores": "auto", "chunk_bytes": 1 << 19}


class Asked:
    """Engine and tuner process that has these knobs to recall."""

    size = 2
    compressible = False
    codable = False
    sockets_per_lane = 0
    chainable = False

    def __init__(self, knobs: Any) -> None:
        self.recalled = knobs
        self.messages: list[dict[str, Any]] = []

    def knobs(self) -> dict[str, Any]:
        return DEFAULT | {"version": 0, "entry": 0}

    def counters(self) -> dict[str, int]:
        return {"entries": 100, "tensors": 100, "bytes": 1000, "device_bytes": 0}

    def definitions(self) -> list[dict[str, Any]]:
        return [tensor("a")]

    def record_steps(self) -> None:
        pass

    def tell(self, **fields: int) -> None:
        pass

    def send_request(self, message: dict[str, Any], _: float) -> dict[str, Any]:
        self.messages.append(message)
        return {"type": "known", "knobs": self.recalled, "why": "a reason"}


def first_of(recalled: Any, held: tuple[str, ...] = (), given: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return the settings that are tried first, without knobs that equal the default."""
    fake: Any = Asked(recalled)
    about: dict[str, Any] = {}
    search = tuning.Tuning(fake, config.Config(autotune=True), held, (), given or {}, about)
    search._recall_result(fake)
    (message,) = fake.messages
    assert message["cache"] is None and message["job"]["held"] == {name: DEFAULT[name] for name in held}
    assert search._about["recalled"] == "a reason"
    return [{name: value for name, value in each.items() if value != DEFAULT[name]} for each in search._first]


@pytest.mark.parametrize(
    ("recalled", "held", "given", "first"),
    [
        (None, (), {}, []),
        ({}, (), {}, []),
        ("nonsense", (), {}, []),
        (DEFAULT, (), {}, []),  # nothing better is known than the default
        ({"cycle_time_ms": 1.0, "unheard_of": 3}, (), {}, [{"cycle_time_ms": 1.0}]),
        ({"cycle_time_ms": 1.0, "stores": "cached"}, ("stores",), {}, [{"cycle_time_ms": 1.0}]),
        ({"cycle_time_ms": 99.0}, (), {}, [{"cycle_time_ms": 50.0}]),
        ({"fusion_threshold": 1}, (), {}, [{"fusion_threshold": 1 << 16}]),
        ({"cycle_time_ms": "1", "fusion_threshold": 1e6, "stores": 3, "chunk_bytes": True}, (), {}, []),
        ({"cycle_time_ms": 1.0}, (), {"stores": "cached"}, [{"stores": "cached"}, {"cycle_time_ms": 1.0}]),
        ({"cycle_time_ms": 1.0}, (), {"cycle_time_ms": 1.0}, [{"cycle_time_ms": 1.0}]),
    ],
)
def test_what_the_user_gives_comes_before_what_is_recalled_as_far_as_that_can_be_tried(
    recalled: Any, held: tuple[str, ...], given: dict[str, Any], first: list[dict[str, Any]]
) -> None:
    assert first_of(recalled, held, given) == first


def test_a_model_that_is_not_known_or_no_cache_asks_for_nothing() -> None:
    fake: Any = Asked({"cycle_time_ms": 1.0})
    search = tuning.Tuning(fake, config.Config(autotune=True, autotune_cache=False), (), (), {}, {})
    search._recall_result(fake)
    assert search._about["tensors"] == 1
    fake.definitions = list
    search = tuning.Tuning(fake, config.Config(autotune=True), (), (), {}, {})
    search._recall_result(fake)
    assert fake.messages == [] and search._first == [] and search._about == {}


def test_the_kind_of_a_knob_is_known() -> None:
    good = {"Integer": 1, "Real": 1.5, "Choice": "auto"}
    for name, about in KNOBS.items():
        assert describe_misfit(name, about["values"][0] if about["kind"] == "Choice" else good[about["kind"]]) == ""
        for bad in (None, True, [], {}, "1", float("nan"), float("inf")):
            assert describe_misfit(name, bad) != ""


# The setting


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("auto", None),
        ("1", None),
        (True, None),
        ("off", False),
        ("0", False),
        ("none", False),
        (False, False),
        ("/a/b", Path("/a/b")),
        (Path("/a"), Path("/a")),
    ],
)
def test_the_cache_is_a_directory_or_off(value: Any, expected: Any) -> None:
    assert config.load({}, {"autotune_cache": value}).autotune_cache == expected
    if isinstance(value, str):
        assert config.load({"ENGINE_AUTOTUNE_CACHE": value}).autotune_cache == expected


def test_what_is_no_cache_is_refused_and_the_launcher_hands_it_on(tmp_path: Path) -> None:
    for bad in (3, "a\0b", ["x"]):
        with pytest.raises(ConfigError, match=r"autotune_cache is .*; expected auto, off, or a path"):
            config.load({}, {"autotune_cache": bad})
    name = "ENGINE_AUTOTUNE_CACHE"
    assert name not in parse(["-np", "1", "true"]).settings
    assert parse(["-np", "1", "--autotune-cache", str(tmp_path), "true"]).settings[name] == str(tmp_path)
    assert parse(["-np", "1", "--no-autotune-cache", "true"]).settings[name] == "off"
