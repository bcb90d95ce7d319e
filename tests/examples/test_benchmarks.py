# ruff: noqa: E402 - the path first
"""The benchmarks check what they time, and write what their tables read."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("matplotlib", reason="needs matplotlib")
pytest.importorskip("rich", reason="needs rich")
ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "benchmarks").exists():
    pytest.skip("the benchmarks are not part of this copy", allow_module_level=True)

from rich.console import Console

from benchmarks import __main__ as command
from benchmarks import observing, sets
from benchmarks.autotune import report as autotune_report
from benchmarks.autotune import run as autotune
from benchmarks.collective import operations, run, worker
from benchmarks.collective import report as collective_report
from benchmarks.collective.backends import select_share
from benchmarks.common import binding, paths, records, stats
from benchmarks.frameworks import report as frameworks_report
from benchmarks.frameworks import run as frameworks
from benchmarks.hosts import report as hosts_report
from benchmarks.hosts import run as hosts
from benchmarks.scaling import architectures, measured
from benchmarks.scaling import run as scaling

from ..netns import lacking


@pytest.fixture
def console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Console:
    """Return a console that writes to memory, and redirect results, so that earlier measurements stay."""
    monkeypatch.setattr(paths, "OUT", tmp_path)
    return Console(file=io.StringIO(), width=command.WIDTH)


def text(tables: list[Any]) -> str:
    return "\n".join(table.to_markdown() for table in tables)


def test_what_an_operation_must_give() -> None:
    pattern, weights = np.arange(6, dtype=np.float32), [1, 2, 3]
    sent = [pattern, 2 * pattern, 3 * pattern]
    wanted = {
        "allreduce": np.sum(sent, axis=0),
        "broadcast": sent[0],
        "allgather": np.concatenate(sent),
        "reducescatter": np.sum(sent, axis=0)[2:4],
        "alltoall": np.concatenate([values[2:4] for values in sent]),
    }
    for operation, result in wanted.items():
        (got,) = operations.compute_expected(operation, pattern, 1, weights)
        np.testing.assert_array_equal(got, result)


def test_a_group_is_divided_tensor_by_tensor() -> None:
    count = operations.get_granularity("grouped_reducescatter", 2) // operations.FLOAT
    got = operations.compute_expected("grouped_reducescatter", np.arange(count, dtype=np.float32), 1, [1, 2])
    assert [tensor.tolist() for tensor in got] == [[3 * i] for i in range(1, count, 2)]


def test_the_halves_of_a_world() -> None:
    assert [select_share("halves", rank, 4) for rank in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert {select_share("half", rank, 4) for rank in range(4)} == {(0, 1)}


@pytest.mark.parametrize(
    ("method", "request_"), [("time_first_call", {}), ("time_block", {"warmup": 0, "iterations": 1})]
)
def test_a_wrong_result_is_an_error(method: str, request_: dict[str, Any]) -> None:
    class Backend:
        def prepare_any(self, case: str, nbytes: int) -> operations.Prepared:
            values = np.empty(nbytes // operations.FLOAT, np.float32)
            return operations.Prepared(values, lambda: None, lambda _: [values], "alltoall")

    rank = worker.CollectiveRank(SimpleNamespace(rank=1, ranks=2, meet=lambda: None), Backend())
    with pytest.raises(worker.WrongResultError, match="alltoall, 64 bytes"):
        getattr(rank, method)({**request_, "case": "alltoall", "bytes": 64})


def test_sizes_that_cannot_be_divided_are_refused() -> None:
    settings = run.CollectiveSettings(ranks=(3,), operation_sizes=(8,)).select_operations(["alltoall"])
    with pytest.raises(ValueError, match="alltoall over 3 ranks: sizes are multiples of 12 bytes, not 8"):
        settings.check()
    with pytest.raises(ValueError, match="not 3"):
        sets.ProcessSetSettings(ranks=3).check()


@pytest.mark.slow
def test_every_operation_is_measured_and_checked(console: Console) -> None:
    nbytes = operations.get_granularity("grouped_allreduce", 2)
    settings = run.CollectiveSettings(
        ranks=(2,), operation_sizes=(nbytes,), contenders=("engine",), tensors=20, call_rounds=1
    )
    settings = dataclasses.replace(
        settings, parts=("operations", "calls"), operation_rounds=2, operation_block_seconds=0.0
    )
    content = json.loads(run.run(settings, console).read_text())
    assert [row["case"] for row in content["operations"]] == list(operations.NAMES)
    assert all(row["samples"] == 6 and row["least"] > 0 for row in content["operations"])
    shown = text(collective_report.build_tables(content))
    assert "grouped_reducescatter, 128 B" in shown
    if len(binding.list_processors()) >= 2:
        assert "allreduce_async_, one rank after another | 1 of 2" in shown
    assert collective_report.draw_figure(content) == paths.OUT / "collective.png"


@pytest.mark.slow
def test_sets_are_measured_beside_the_world(console: Console) -> None:
    path = sets.run(
        sets.ProcessSetSettings(sizes=(4096,), contenders=("engine",), rounds=2, block_seconds=0.0), console
    )
    content = json.loads(path.read_text())
    assert [(row["case"], row["ranks"]) for row in content["results"]] == [
        ("world", 4),
        ("halves", 4),
        ("half", 4),
        (sets.SMALLER, 2),
    ]
    ratios = sets.build_tables(content)[1]
    assert len(ratios.columns) == 4 and "gloo" not in ratios.to_markdown()
    by_case = {row["case"]: row["round_medians"] for row in content["results"]}
    shown = float(ratios.rows[0][1].split()[0])
    assert shown == pytest.approx(stats.estimate_ratio(by_case["halves"], by_case["world"]).value, rel=0.01)
    assert sets.draw_figure(content).exists()


@pytest.mark.slow
def test_hosts_are_measured_beside_bare_sockets(console: Console) -> None:
    if reason := lacking():
        pytest.skip(reason)
    settings = hosts.HostsSettings(
        parts=("idle",),
        cables=("gigabit",),
        per_host=(1,),
        sizes=(4096,),
        contenders=("engine", "sockets"),
        also=("small:ENGINE_CHUNK_BYTES=65536",),
        rounds=2,
        block_seconds=0.0,
        compressed=(1 << 16,),
        idle_seconds=0.1,
    )
    path = hosts.run(settings, console)
    stale = {"part": "sizes", "cable": "gigabit", "per_host": 1, "bytes": 4, "contender": "gloo"}
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"results": [*content["results"], stale]}))
    settings = dataclasses.replace(settings, parts=("sizes", "compression"))
    content = json.loads(hosts.run(settings, console, merge=True).read_text())
    rows = content["results"]
    assert [row["contender"] for row in rows if row["part"] == "sizes"] == ["engine", "small", "sockets"]
    assert [row["case"] for row in rows if row["part"] == "compression"] == ["none", "fp16", "fp8"]
    assert [row["where"] for row in rows if row["part"] == "idle"] == ["0", "1", "launcher"]
    # Nothing is faster than the cable: a round trip takes 2 ms, and each rank has to hear from the others.
    assert all(row["least"] > 1e-3 for row in rows if row["part"] == "sizes")
    shown = text(hosts_report.build_tables(content))
    assert "| small / bare sockets |" in shown and "1 ms each way" in shown and "idle job, the busier host" in shown
    assert hosts_report.draw_figure(content) == paths.OUT / "hosts.png"


def test_contenders_with_other_settings_have_names_of_their_own() -> None:
    (own,) = (each for each in hosts.HostsSettings(also=("x:A=1,B=2",)).list_variants() if each.name == "x")
    assert (own.backend, own.variables, own.launcher) == ("engine", {"A": "1", "B": "2"}, None)
    (started,) = (each for each in hosts.HostsSettings(also=("y@mpirun:A=1",)).list_variants() if each.name == "y")
    assert started.launcher == "mpi"
    with pytest.raises(ValueError, match="not by 'srun'"):
        hosts.HostsSettings(also=("y@srun:A=1",)).check()
    with pytest.raises(ValueError, match="names of their own"):
        hosts.HostsSettings(also=("x:A=1", "x:A=2")).check()
    for wrong in ("gloo:A=1", "x", "x:A", ":A=1"):
        with pytest.raises(ValueError, match="NAME:VARIABLE=VALUE"):
            hosts.HostsSettings(also=(wrong,)).check()
    with pytest.raises(ValueError, match="multiples of 4"):
        hosts.HostsSettings(sizes=(6,)).check()


@pytest.mark.slow
def test_jobs_are_watched_only_where_it_is_said(console: Console) -> None:
    steps = (("hooks", 2), ("training", 1))
    settings = observing.ObservingSettings(workloads=("hooks",), tensors=50, rounds=2, warmup=1, steps=steps)
    content = json.loads(observing.run(settings, console).read_text())
    assert [row["variant"] for row in content["results"]] == ["never", "off", "on", "paused", "counted"]
    assert all(len(row["processor"]) == 2 and min(row["processor"]) > 0 for row in content["results"])
    assert "| gradient hooks alone, never watched |" in text(observing.build_tables(content))
    assert observing.draw_figure(content).exists()


@pytest.mark.slow
def test_bindings_are_measured_beside_bare_calls_and_steps_alone(console: Console) -> None:
    pytest.importorskip("keras", reason="needs Keras")
    settings = frameworks.FrameworkSettings(
        frameworks=("torch",), models=("small",), rounds=2, block_seconds=0.0, fit_block_seconds=0.0
    )
    for part in frameworks.PARTS:
        path = frameworks.run(dataclasses.replace(settings, parts=(part,)), console, merge=True)
    content = json.loads(path.read_text())
    assert [each["part"] for each in content["results"]] == ["calls", "fit"]
    calls, fit = (each["rounds"] for each in content["results"])
    assert {"bare", "bare group", "named", "group"} <= set(calls)
    assert set(fit) == {"engine.fit", "engine.fit_floor", "engine.bare"}
    assert all(len(each) == 2 and min(each) > 0 for each in (*calls.values(), *fit.values()))
    shown = text(frameworks_report.build_tables(content))
    assert "torch: 4 KiB, in place" in shown and "a small model" in shown and "Strategy" not in shown


def test_what_a_binding_adds_is_told_by_round() -> None:
    names = ("engine.fit", "engine.bare", "engine.fit_floor", "strategy.loop_strategy", "strategy.loop_floor")
    rounds = dict(zip(names, ([3.0, 5.0, 4.0], [1.0] * 3, [2.0, 4.0, 3.0], [9.0] * 3, [5.0] * 3), strict=True))
    rounds |= {"engine.loop": [4.0] * 3, "engine.loop_floor": [2.0] * 3}
    results = [{"part": "fit", "framework": "tensorflow", "model": "large", "rounds": rounds}]
    environment = dict.fromkeys(
        ("processor", "usable_processors", "memory_gib", "kernel", "python", "revision", "date")
    )
    environment |= {"packages": {}, "virtual_machine": False, "cpu_quota": None}
    content = {"results": results, "settings": {"ranks": 2}, "environment": environment}
    fits, beside = frameworks_report.build_tables(content)
    assert fits.rows[0][4:] == ["1 s [1 s, 1 s]", "1 s", "33.3 %", "10 %", "miss"]
    assert beside.rows[0][-3:] == ["0.5", "0.25", "miss"]


@pytest.mark.slow
def test_policies_search_for_a_known_bottom(console: Console) -> None:
    policies = ("ours", "random", "horovod")
    settings = autotune.AutotuneSettings(
        parts=("searches",), surfaces=("valley", "flat"), contenders=policies, seeds=2, flat_seeds=2, trials=6
    )
    content = json.loads(autotune.run(settings, console).read_text())
    assert len(content["searches"]) == 2 * 2 * 3 * 2
    for row in content["searches"]:
        assert row["regret"] == 0.0 if row["surface"] == "flat" else 0.0 <= row["regret"] < 1.0
        # Our search rests once it has lost what it may in a job of that length; the others know no such limit.
        assert 1 <= row["trials"] <= 6 if row["contender"] == "ours" else row["trials"] == 6
    shown = text(autotune_report.build_tables(content))
    assert "| valley | autotune.Tuner |" in shown and "in 0 of 4 searches" in shown
    assert autotune_report.draw_figure(content) == paths.OUT / "autotune.png"


def test_another_build_is_the_one_that_runs(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("place = 'there'")
    variables = {**os.environ, **observing.get_build_variables(str(tmp_path))}
    program = "import engine, benchmarks.observing; print(engine.place)"
    done = subprocess.run([sys.executable, "-P", "-c", program], env=variables, text=True, capture_output=True)
    assert done.stdout == "there\n", done.stderr


@pytest.mark.parametrize(
    ("layers", "parameters", "tensors", "multiplications"),
    [
        (architectures.build_vgg16, 138_357_544, 32, 15.47e9),
        (architectures.build_resnet101, 44_549_160, 314, 7.57e9),
        (architectures.build_inception3, 23_817_352, 190, 5.71e9),
    ],
)
def test_layers_add_up_to_what_is_known_of_the_models(
    layers: Callable[[], tuple[architectures.Layer, ...]], parameters: int, tensors: int, multiplications: float
) -> None:
    """Parameters and trainable tensors are those of Keras and torchvision."""
    made = layers()
    assert sum(sum(layer.tensors) for layer in made) == parameters
    assert sum(len(layer.tensors) for layer in made) == tensors
    assert sum(layer.multiplications for layer in made) == pytest.approx(multiplications, rel=1e-3)


def test_what_is_foreseen_stands_beside_what_is_published(console: Console) -> None:
    scaling.run(scaling.ScalingSettings())
    content = records.read("scaling")
    assert content is not None
    rows = content["results"]
    published = {(row["model"], row["servers"]): row["published"] for row in rows}
    assert [published[name, 128] for name in ("Inception V3", "ResNet-101", "VGG-16")] == [0.90, 0.90, 0.68]
    assert all(row["foreseen"] >= row["half_batch"] and row["foreseen"] >= row["fitted"] for row in rows)
    (chosen,) = [row for row in rows if (row["model"], row["servers"]) == scaling.FITTED_ON]
    assert chosen["fitted"] == pytest.approx(chosen["published"], abs=1e-3)
    shown = text(scaling.build_tables(content))
    assert "Not measured" in shown and "miss" in shown and "+26.9" in shown
    found = content["sensitivity"]
    assert 0 < found["close"] < found["combinations"] and "| +8.1 pass |" in shown
    plausible = next(iter(found["choices"].values()))
    for name, sign in (("link reaches 25 Gbit/s", 1), ("steps do not vary", 1), ("batch of 32", -1), ("no fusion", -1)):
        differences = [sign * (other - each) for other, each in zip(found["choices"][name], plausible, strict=True)]
        assert max(differences) > 0.02 and min(differences) > -0.001, name


@pytest.mark.slow
def test_what_is_foreseen_stands_beside_what_is_measured(console: Console) -> None:
    if reason := lacking():
        pytest.skip(reason)
    worlds, variants = ((1, 2), (2, 2)), ("gradients", "gradients, fp8", "4 local steps")
    settings = measured.MeasuredSettings(("VGG-16",), worlds, (10e9,), variants=variants, steps=2, periods=1)
    content = json.loads(measured.run(settings, console).read_text())
    alone, _, two, coded, local = content["results"]
    assert alone["sent"] < 1e4 and alone["foreseen_bytes"] == 0
    # Each of two ranks on a host sends half of the data, and then its part of the sum.
    assert two["foreseen_bytes"] < two["sent"] < 1.5 * two["foreseen_bytes"]
    assert two["seconds"] > alone["seconds"] and two["foreseen"] > alone["foreseen"]
    assert coded["sent"] < 4 * two["sent"] / 3 and local["sent"] < 4 * two["sent"] / 3  # of four times the size
    assert all(1 < row["sent"] / row["foreseen_bytes"] < 1.2 for row in (coded, local))
    assert "| VGG-16 | gradients | 10 Gbit/s | 200 | 2 x 2 |" in text(measured.build_tables(content))
