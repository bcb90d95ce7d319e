"""Tuning during training: jobs of two ranks whose steps depend on the knobs, and failures of the tuner."""

from __future__ import annotations

import json
import logging
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from autotune import Space, Tuner, cli, journal
from autotune.replay import replay_log
from engine.config import config
from engine.errors import ConfigError
from engine.tuning import trial_loop as tuning
from engine.tuning.knobs import KNOBS, clamp_knobs, format_knobs, space_of
from engine.tuning.process import TunerError
from engine.tuning.steps import Steps

from ..ranks import run_ranks, start_ranks
from ..waiting import until
from . import tuned_programs

DEFAULT = {"fusion_threshold": 64 << 20, "cycle_time_ms": 5.0, "stores": "auto", "chunk_bytes": 1 << 19}
FEW = ["--autotune", "--autotune-steps-per-sample", "4", "--autotune-warmup-samples", "0"]


def opened(default: dict[str, Any]) -> str:
    """Return a log that has just begun, in a space with this default."""
    space = {
        name: {"kind": "Choice", "values": [value, "x"]}
        if isinstance(value, str)
        else {"kind": "Real", "low": 0, "high": 1 << 40}
        for name, value in default.items()
    }
    head = {"row": "open", "n": 0, "schema": 1, "seed": 0, "max_trials": 3, "space": space, "default": default}
    return json.dumps(head | {"first": [], "settings": {}}) + "\n"


def rows_of(path: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in journal.read(path) if row["row"] == kind]


def test_a_search_finds_a_faster_setting_for_all_ranks_and_its_log_is_reproduced(tmp_path: Path) -> None:
    log = tmp_path / "new" / "log.jsonl"
    options = [*FEW, "--autotune-bayes-opt-max-samples", "12", "--autotune-log-file", str(log)]
    chosen = {"HOROVOD_FUSION_THRESHOLD": str(1 << 20), "ENGINE_CHUNK_BYTES": "64K"}
    finished = run_ranks(2, tuned_programs.search, str(log), options=options, env=chosen)
    first, second = finished.values
    assert first == second
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    rows = journal.read(log)
    result = replay_log(rows)
    assert result.exact and result.proposals >= 6
    # A knob that the user has set is held; the default is the setting that ran, and is measured first.
    held = {"fusion_threshold": 1 << 20, "chunk_bytes": 1 << 16}
    assert {name: first[name] for name in held} == held
    running = {name: value for name, value in DEFAULT.items() if name not in held}
    assert rows[0]["space"].keys() == running.keys()  # no tensor may be compressed
    assert rows[0]["default"] == rows_of(log, "ask")[0]["knobs"] == running
    about = rows[0]["about"]
    assert {name: about[name] for name in ("ranks", "held", "tensors")} == {"ranks": 2, "held": held, "tensors": 5}
    assert about["bytes"] == 4 * (3 + 1000 + 40_000 + 1 + 8) and "recalled" not in about
    assert about["score"] == "seconds per step"
    assert all(len(row["samples"]) >= 4 for row in rows_of(log, "tell") if row["status"] == "ok")
    # The decision is deployed, and was logged in one line.
    final = next(row for row in rows_of(log, "decide") if row.get("final"))
    said = [line for line in finished.ranks[0].stderr.splitlines() if "autotune: " in line]
    assert final["knobs"]["cycle_time_ms"] <= 2.0
    assert f"cycle_time_ms={final['knobs']['cycle_time_ms']} " in said[0] and "less time than before" in said[0]
    assert said[0].endswith(f"log in {log}")
    if len(said) == 1:  # no drift has been seen since
        assert {name: first[name] for name in running} == final["knobs"]
    assert "autotune: " not in finished.ranks[1].stderr


@pytest.mark.slow
def test_a_search_over_hosts_turns_the_knobs_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRETENDED_HOSTS", "2")
    log = tmp_path / "log.jsonl"
    options = [*FEW, "--autotune-bayes-opt-max-samples", "6", "--autotune-log-file", str(log)]
    first, second = run_ranks(2, tuned_programs.search, str(log), options=options).values
    assert first == second and first["cycle_time_ms"] <= 2.0
    about = journal.read(log)[0]["about"]
    assert {name: about[name] for name in ("ranks", "hosts")} == {"ranks": 2, "hosts": 2}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("signum", "answering", "says"),
    [("SIGKILL", 20.0, "process was killed by SIGKILL"), ("SIGSTOP", 8.0, "process has not answered for 8 s")],
)
def test_training_goes_on_when_the_tuner_is_lost(signum: str, answering: float, says: str) -> None:
    options = [*FEW, "--autotune-bayes-opt-max-samples", "900"]
    with start_ranks(2, tuned_programs.survive, answering, options=options) as job:
        job.wait_for("ready", timeout=90.0)
        os.kill(int((job.directory / "pid").read_text()), getattr(signal, signum))
        finished = job.finish()  # also checks that no process is left
    warnings = [line for line in finished.ranks[0].stderr.splitlines() if "autotune: " in line]
    assert len(warnings) == 1, finished
    assert says in warnings[0]
    best = warnings[0].partition("; training goes on with ")[2]
    first, second = finished.values
    assert first == second
    assert best == format_knobs({name: first[name] for name in DEFAULT})


def test_nothing_of_a_job_is_left_when_rank_0_is_killed_in_a_search() -> None:
    with start_ranks(2, tuned_programs.survive, 9.0, options=[*FEW, "--autotune-bayes-opt-max-samples", "900"]) as job:
        job.wait_for("ready", timeout=90.0)
        os.kill(int((job.directory / "pid").read_text()), signal.SIGSTOP)
        os.kill(job.pid(0), signal.SIGKILL)
        assert job.finish(check=False).code == 128 + signal.SIGKILL


@pytest.mark.slow
def test_a_job_without_steps_is_told_so_once() -> None:
    (said,) = run_ranks(1, tuned_programs.without_steps, env={"ENGINE_AUTOTUNE": "1"}).values
    assert len(said) == 2
    assert "autotune: no step of a DistributedOptimizer over all ranks has ended in the first 0.3 s" in said[0]
    assert "the job ended before the first trial" in said[1]


def test_training_goes_on_without_scipy(tmp_path: Path) -> None:
    (tmp_path / "scipy").mkdir()
    (tmp_path / "scipy" / "__init__.py").write_text("raise ModuleNotFoundError('hidden', name='scipy')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    finished = run_ranks(1, tuned_programs.until_over, env={"PYTHONPATH": path}, options=FEW)
    (said,) = (line for line in finished.ranks[0].stderr.splitlines() if "autotune: " in line)
    assert (
        "autotune: nothing is tuned: scipy is missing: pip install '.[autotune]' in the source tree; training goes"
        in said
    )
    assert "ERROR" in said


# In one process, a world of one rank


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith(("ENGINE_", "HOROVOD_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ENGINE_AUTOTUNE_CACHE", "off")
    yield
    engine.shutdown()


def executed_knobs() -> dict[str, Any]:
    engine.allreduce(np.ones(3, np.float32))
    return engine.knobs()


@pytest.mark.usefixtures("alone")
def test_a_job_begins_with_the_knobs_of_a_log_but_for_those_that_were_chosen(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    header = "hierarchical_allreduce,hierarchical_allgather,cache_enabled,cycle_time_ms,tensor_fusion_threshold,score\n"
    log.write_text(header + "0,0,1,2.5,32,1.5\n0,0,1,7.5,8,0.5\n")
    engine.init(autotune_from=log, fusion_threshold="2M")
    knobs = executed_knobs()
    assert {name: knobs[name] for name in DEFAULT} == DEFAULT | {"fusion_threshold": 2 << 20, "cycle_time_ms": 2.5}


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["config", "options", "environment"])
def test_what_best_prints_starts_a_job_with_these_knobs(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("yaml", reason="needs PyYAML")
    decided = {"fusion_threshold": 16746108, "cycle_time_ms": 0.1443, "stores": "streaming", "chunk_bytes": 885385}
    decided |= {"between_hosts": "chain", "compression": "bf16", "sockets_per_lane": 3}
    assert decided.keys() == KNOBS.keys()
    log = tmp_path / "log.jsonl"
    first = DEFAULT | {"between_hosts": "auto", "compression": "none", "sockets_per_lane": 1}
    with journal.Journal(log) as rows:
        Tuner(Space.from_description(KNOBS), first, journal=rows)
        rows({"row": "decide", "decision": "finish", "knobs": decided, "why": "", "final": True})
    assert cli.main(["best", str(log), "--format", form]) == 0
    said = capsys.readouterr().out
    options, env = [], {}
    if form == "config":
        (tmp_path / "job.yaml").write_text(said)
        options = ["--config-file", str(tmp_path / "job.yaml")]
    elif form == "options":
        options = said.split()[1:]
    else:
        env = dict(line.split("=") for line in said.splitlines())
    for knobs in run_ranks(2, tuned_programs.knobs, options=options, env=env).values:
        assert {name: knobs[name] for name in decided} == decided


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("chosen", "travels"), [({}, "bf16"), ({"compression": "none"}, "none")])
def test_compression_of_a_log_is_for_tensors_that_allow_it_and_gives_way_to_the_user(
    chosen: dict[str, str], travels: str, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(opened({"compression": "bf16"}))
    engine.init(autotune_from=log, **chosen)
    engine.barrier()
    assert tuned_programs.compressed_step(0) == travels == engine.knobs()["compression"]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"autotune_from": "/nowhere"}, r"autotune_from is '/nowhere', which cannot be used: .*No such file"),
        ({"autotune_from": __file__}, r"autotune_from is .* cannot be used: .* line 1: expected a row in JSON"),
        ({"autotune_from": "LOG"}, r"cannot be used: it has stores='fast'; one of auto, cached, streaming is"),
        ({"autotune_from": "FP16"}, r"cannot be used: it has compression='fp16'; one of none, bf16, fp8 is expected"),
        ({"autotune": 1, "autotune_log": "/proc/a/b"}, r"autotune_log is '/proc/a/b', where rank 0 cannot write"),
        ({"autotune": 1, "autotune_log": "/proc"}, r"autotune_log is '/proc', where rank 0 cannot write: it is a dir"),
    ],
)
def test_files_that_cannot_be_used_are_an_error_at_the_start(
    settings: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("LOG").write_text(opened({"cycle_time_ms": 2, "stores": "fast"}))
    Path("FP16").write_text(opened({"compression": "fp16"}))
    with pytest.raises(ConfigError, match=says):
        engine.init(**settings)
    assert not engine.is_initialized()


@pytest.mark.usefixtures("alone")
def test_a_program_that_turns_knobs_itself_ends_the_search(caplog: pytest.LogCaptureFixture) -> None:
    engine.init(autotune=True)
    running = tuned_programs.tuner()
    with caplog.at_level(logging.WARNING, "engine"):
        for threshold in (1 << 20, 1 << 21):
            engine.set_knobs(fusion_threshold=threshold)
    assert executed_knobs()["fusion_threshold"] == 1 << 21
    engine.shutdown()
    assert [record.getMessage() for record in caplog.records] == [
        "autotune: the tuning ends here, because engine.set_knobs was called"
    ]
    assert not running._thread.is_alive()


class FakeEngine:
    """Engine that returns the marks that it is given, and remembers the last four."""

    compressible = False
    codable = False
    sockets_per_lane = 0
    chainable = False
    on_device = 0

    def __init__(self) -> None:
        self.marks: list[tuple[int, ...]] = []
        self.set: list[dict[str, Any]] = []

    def knobs(self) -> dict[str, Any]:
        return DEFAULT | {"version": 0, "entry": 0}

    def set_knobs(self, **knobs: Any) -> int:
        self.set.append(knobs)
        return len(self.set)

    def record_steps(self) -> None:
        pass

    def counters(self) -> dict[str, int]:
        return {"entries": 100, "tensors": 100, "bytes": 1000, "device_bytes": self.on_device}

    def tell(self, **fields: int) -> None:
        pass

    def mark(self, seconds: float, version: int = 0, source: int = 0, **more: int) -> None:
        sums = {"waited": 0, "busy": 0, "nbytes": 0} | more
        self.marks.append((round(seconds * 1e9), version, source, *sums.values()))

    def steps(self, since: int) -> tuple[int, list[tuple[int, ...]]]:
        since = max(since, len(self.marks) - 4)
        return since, self.marks[since:]


def test_a_step_counts_for_the_knobs_under_which_all_of_it_ran() -> None:
    fake: Any = FakeEngine()
    steps = Steps(fake)
    for seconds, version in ((1.0, 0), (1.5, 0), (1.75, 1)):
        fake.mark(seconds, version)
    assert [each[:2] for each in steps.read()] == [(0.5, 0), (0.25, None)]
    fake.mark(2.0, 1)
    assert [each[:2] for each in steps.read()] == [(0.25, 1)]
    assert steps.read() == []
    for k in range(6):  # two marks are forgotten: the gap is no step
        fake.mark(3.0 + k, 1)
    assert [each[:2] for each in steps.read()] == [(1.0, 1)] * 3


class Steady(FakeEngine):
    """Engine that ends one more step at each poll, under the knobs that were set last."""

    def __init__(self, seconds: list[float]) -> None:
        super().__init__()
        self.seconds, self.now = iter(seconds), 0.0

    def steps(self, since: int) -> tuple[int, list[tuple[int, ...]]]:
        self.now += next(self.seconds)
        self.mark(self.now, len(self.set))
        return super().steps(since)


@pytest.mark.parametrize(
    ("seconds", "samples", "status"),
    [
        ([1.0, 9.0, 9.0, *[0.1] * 5], [0.1] * 5, "ok"),
        ([1.0, 9.0, 9.0, 0.1, 60.0, 0.1, 0.1, 60.0], [0.1, 60.0, 0.1, 0.1, 60.0], "ok"),
        ([1.0, 0.1, 0.1, 0.3, 0.1, 0.3], [0.3, 0.1, 0.3], "aborted"),
        ([1.0, 0.1, 0.1, 0.1, 0.1, 0.3, 0.3, 0.3], [0.1, 0.1, 0.3, 0.3, 0.3], "ok"),
    ],
)
def test_a_trial_ends_early_when_it_is_slow_and_not_for_a_pause(
    seconds: list[float], samples: list[float], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "PERIOD", 0.0)
    fake: Any = Steady(seconds)
    search = tuning.Tuning(fake, config.Config(autotune_steps=5), (), (), {}, {})
    knobs = DEFAULT | {"cycle_time_ms": 1.0}
    measured, how = search._measure_trial({"type": "trial", "id": 1, "knobs": knobs, "best": DEFAULT, "limit": 0.2})
    assert ([each.value for each in measured], how) == (pytest.approx(samples), status)
    assert fake.set == [knobs]
    search._apply_knobs(search._best)
    assert fake.set == [knobs, DEFAULT]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"knobs": {"stores": "auto"}}, "has sent the knobs {'stores': 'auto'}; they are fusion_threshold,"),
        ({"best": None}, "has sent the knobs None"),
        ({"limit": "1"}, "has sent a limit of '1'"),
    ],
)
def test_a_trial_that_makes_no_sense_turns_no_knob(wrong: dict[str, Any], says: str) -> None:
    fake: Any = Steady([])
    search = tuning.Tuning(fake, config.Config(), (), (), {}, {})
    trial = {"type": "trial", "id": 1, "knobs": DEFAULT | {"stores": "cached"}, "best": DEFAULT, "limit": None}
    with pytest.raises(TunerError, match=says):
        search._measure_trial(trial | wrong)
    assert fake.set == []


def test_the_engine_remembers_when_steps_ended() -> None:
    engine.init()
    try:
        native = engine.session.runtime.current_engine()
        native.mark_step()
        assert native.steps(0) == (0, [])
        native.record_steps()
        for _ in range(4100):
            native.mark_step()
        first, marks = native.steps(1)
        assert (first, len(marks)) == (4, 4096)
        times = [mark[0] for mark in marks]
        assert times == sorted(times) and {mark[1:3] for mark in marks} == {(0, 0)}
        assert native.steps(4099) == (4099, marks[-1:])
        assert native.steps(4200) == (4100, [])
        engine.set_knobs(stores="cached")
        executed_knobs()
        native.mark_step(3)
        assert native.steps(4100)[1][0][1:3] == (1, 3)
    finally:
        engine.shutdown()


@pytest.mark.usefixtures("alone")
def test_the_knobs_of_a_log_are_tried_first_in_a_search(tmp_path: Path) -> None:
    known, log = tmp_path / "known.jsonl", tmp_path / "log.jsonl"
    known.write_text(opened({"cycle_time_ms": 0.5, "fusion_threshold": 1 << 20}))
    engine.init(autotune=True, autotune_from=known, autotune_log=log, autotune_warmup=0, stores="cached")
    until(
        lambda: tuned_programs.native_mark() or (log.exists() and log.read_bytes()), "the search is logged", 90.0, 0.01
    )
    opening = journal.read(log)[0]
    assert opening["default"] == {name: value for name, value in DEFAULT.items() if name != "stores"}
    assert opening["first"] == [opening["default"] | {"cycle_time_ms": 0.5, "fusion_threshold": 1 << 20}]


@pytest.mark.slow
def test_compression_is_tuned_where_the_program_allows_it(tmp_path: Path) -> None:
    """The search finds the faster dtype, every result is exact or that of bf16, and the next job starts with it."""
    log = tmp_path / "log.jsonl"
    held = {f"ENGINE_{name.upper()}": str(value) for name, value in DEFAULT.items()}
    options = [*FEW, "--autotune-bayes-opt-max-samples", "6", "--autotune-log-file", str(log)]
    finished = run_ranks(2, tuned_programs.search_compression, str(log), options=options, env=held)
    assert finished.values == [{"none", "bf16"}] * 2
    opening = journal.read(log)[0]
    assert opening["space"] == {"compression": KNOBS["compression"] | {"values": ["none", "bf16"]}} and opening[
        "default"
    ] == {"compression": "none"}
    assert {row["knobs"]["compression"] for row in rows_of(log, "ask")} == {"none", "bf16"}
    final = next(row for row in rows_of(log, "decide") if row.get("final"))
    assert final["knobs"] == {"compression": "bf16"}
    said = [line for line in finished.ranks[0].stderr.splitlines() if "autotune: " in line]
    assert "autotune: compression=bf16: a step takes " in said[0]
    again = run_ranks(2, tuned_programs.compressed_from_the_start, options=["--autotune-from", str(log)])
    assert again.values == ["bf16"] * 2


@pytest.mark.parametrize(("held", "tried"), [((), True), (("compression",), False)])
def test_compression_is_taken_up_when_tensors_tell_that_it_matters(held: tuple[str, ...], tried: bool) -> None:
    class Compressing(Steady):
        def knobs(self) -> dict[str, Any]:
            return super().knobs() | {"compression": "none"}

    fake: Any = Compressing([])
    search = tuning.Tuning(fake, config.Config(), held, (), {"stores": "cached", "compression": "bf16"}, {})
    assert "compression" not in search._space and search._first == [DEFAULT | {"stores": "cached"}]
    fake.compressible = True
    search._update_space()
    new = {"compression": "none"} if tried else {}
    assert search._space.keys() == search._default.keys() == (DEFAULT | new).keys()
    assert search._default == search._running == search._best == DEFAULT | new
    assert search._first == [DEFAULT | {"stores": "cached"} | ({"compression": "bf16"} if tried else {})]


def test_fp8_is_tried_where_tensors_allow_it_and_is_left_out_of_a_log_elsewhere() -> None:
    """Tensors with Compression.tuned8 on several hosts make the engine `codable`."""
    fake: Any = FakeEngine()
    fake.compressible = True
    without = space_of(fake, ())
    assert without["compression"]["values"] == ["none", "bf16"]
    assert "compression" not in clamp_knobs({"compression": "fp8"}, without)
    fake.codable = True
    assert space_of(fake, ())["compression"]["values"] == ["none", "bf16", "fp8"]
    assert clamp_knobs({"compression": "fp8"}, space_of(fake, ())) == {"compression": "fp8"}
    assert "compression" not in space_of(fake, ("compression",))


def test_knobs_of_a_log_are_moved_into_the_ranges() -> None:
    known = {"fusion_threshold": 0, "cycle_time_ms": 0.0, "stores": "cached", "other": 3}
    assert clamp_knobs(known, KNOBS) == {"fusion_threshold": 1 << 16, "cycle_time_ms": 0.0, "stores": "cached"}
    assert clamp_knobs({"cycle_time_ms": 100.0}, KNOBS) == {"cycle_time_ms": 50.0}
    assert json.dumps(KNOBS)


def test_what_is_about_host_memory_is_not_tried_for_tensors_on_gpus() -> None:
    fake = FakeEngine()
    fake.compressible = fake.chainable = True
    fake.sockets_per_lane = 4
    on_host = set(space_of(fake, ()))  # type: ignore[arg-type]
    fake.on_device = 880  # of 1000 bytes: the rest counts
    assert set(space_of(fake, ())) == on_host  # type: ignore[arg-type]
    fake.on_device = 920
    on_gpus = set(space_of(fake, ()))  # type: ignore[arg-type]
    assert on_gpus == {"fusion_threshold", "cycle_time_ms", "compression"}
    assert on_host - on_gpus == {"stores", "chunk_bytes", "sockets_per_lane", "between_hosts"}


def test_sockets_of_lanes_are_tried_only_where_there_are_several() -> None:
    fake = FakeEngine()
    names = set(space_of(fake, ()))  # type: ignore[arg-type]
    assert "sockets_per_lane" not in names
    fake.sockets_per_lane = 1
    assert set(space_of(fake, ())) == names  # type: ignore[arg-type]
    fake.sockets_per_lane = 4
    space = space_of(fake, ())  # type: ignore[arg-type]
    assert space["sockets_per_lane"] == {"kind": "Integer", "low": 1, "high": 4, "log": True}
    assert space_of(fake, {"sockets_per_lane"}) == space  # type: ignore[arg-type]
