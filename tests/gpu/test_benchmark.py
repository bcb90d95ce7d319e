"""`python -m benchmarks gpu` on the stand-ins: its tables and record, and parts that fail, crash and hang."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rich", reason="needs rich")

from rich.console import Console

from benchmarks.common import paths
from benchmarks.gpu import beliefs, binding, overlap, reference, report, run
from benchmarks.gpu.driver import BFLOAT16, KERNELS
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.ranks import Ranks

from ..standins import ROOT, build, environment
from .jobs import chosen

Bench = Callable[..., tuple[dict[str, Any], str]]
MINUTES = 2.0
ON_STAND_INS = tuple(name for name, part in PARTS.items() if "torch" not in part.needs)


@pytest.fixture(scope="session")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stand-ins with an NCCL that lets two ranks share a device."""
    return build(tmp_path_factory.mktemp("sharing"), 23007)


@pytest.fixture
def bench(sharing: Path, libraries: Path, registered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Function that runs the benchmark, and returns its record and output; earlier measurements stay."""
    monkeypatch.setattr(paths, "OUT", tmp_path)
    for name in [name for name in os.environ if name.startswith(("STAND_", "CUDA_", "NCCL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(KERNELS, str(registered))
    monkeypatch.setenv("STAND_QUIET", "1")

    def measure(
        *only: str, shares: bool = False, minutes: float = MINUTES, merge: bool = False, **stand: str
    ) -> tuple[dict[str, Any], str]:
        for name, value in chosen(sharing if shares else libraries).items():
            monkeypatch.setenv(name, value)
        for name, value in stand.items():
            monkeypatch.setenv(f"STAND_{name.upper()}", value)
        console = Console(file=io.StringIO(), width=200)
        content = json.loads(run.run(run.GpuSettings(only, minutes, quick=True), console, merge).read_text())
        for table in report.build_tables(content):
            table.print_to(console)
        return content, console.file.getvalue()  # type: ignore[attr-defined]

    return measure


def outcomes(content: dict[str, Any]) -> dict[str, str]:
    """Return the outcome of each part."""
    return {name: found["outcome"] for name, found in content["parts"].items()}


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_everything(bench: Bench) -> None:
    """All parts that need no torch run; the table marks its numbers as the stand-in's."""
    content, text = bench(shares=True, minutes=8.0)  # a limit by shares, which no part needs alone
    whole = dict.fromkeys(ON_STAND_INS, "ok") | dict.fromkeys(("binding", "steps", "overlap"), "skipped")
    assert outcomes(content) == whole, text
    assert content["here"]["stand_in"] and "torch" in content["parts"]["steps"]["why"]
    titles = [table.title for table in report.build_tables(content)]
    assert all(title.startswith("STAND-IN, no GPU: ") for title in titles)
    assert "STAND-IN, no GPU: Results on 2 ranks on one GPU" in titles
    assert "Its times and bandwidths mean nothing" in text and "NCCL 2.30.7" in text
    assert content["parts"]["litmus"]["counts"]["ok"] >= 25
    assert content["parts"]["failure"]["growth"] == 0
    assert content["parts"]["failure"]["lost"]["said"].startswith("rank 1 died")
    assert not [row for row in content["parts"]["bandwidth"]["rows"] if not row["bandwidth"] > 0]
    for world in content["parts"]["frozen"]["worlds"].values():
        assert {"frozen pass", "launch of a graph"} == set(world["ratios"])
        assert all(row["median"] > 0 for row in world["rows"])
    assert "STAND-IN, no GPU: Frozen passes of 100 tensors of 4 KiB on 2 ranks on one GPU" in titles
    assert content["parts"]["frozen"]["workloads"].startswith("torch has no CUDA here")
    rows = content["parts"]["numerics"]["worlds"]["2"]["rows"]
    assert set(reference.DTYPES) < set(rows) and 0 < rows["float32"]["sum"] <= 0.5
    assert len(report.build_tables(content)[-1].rows) == len(beliefs.BELIEFS)


@pytest.mark.slow
def test_what_two_ranks_need_is_said(bench: Bench) -> None:
    """An NCCL too old for two ranks on a GPU leaves the rest to be measured; two GPUs need no newer NCCL."""
    content, text = bench("bandwidth", "failure")
    assert outcomes(content) == {"bandwidth": "ok", "failure": "ok"}
    assert "skipped: two ranks need NCCL 2.30 or newer to share the one GPU that is here: NCCL is 2.28.7" in text
    content, text = bench("failure", devices="2", merge=True)
    assert outcomes(content) == {"bandwidth": "ok", "failure": "ok"}
    assert content["parts"]["failure"]["lost"]["where"] == "on two GPUs"


@pytest.mark.slow
def test_a_driver_that_breaks_its_promises_is_told_first(bench: Bench) -> None:
    content, text = bench("litmus", mutant="wait_does_nothing", deadline="1000")
    assert outcomes(content) == {"litmus": "failed"}
    assert "THE DRIVER IS NOT AS THE TESTS TAKE IT TO BE" in report.build_tables(content)[0].title
    assert text.index("THE DRIVER IS NOT") < text.index("wait_orders_two_streams")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("fault", "weight", "outcome", "why"),
    [
        ("cuMemsetD8Async:1:hang", 2.3, "hung", "was killed"),
        ("cuMemsetD8Async:3:kill", 50.0, "crashed", "it was ended by SIGKILL"),
        ("cuMemsetD8Async:3:700", 50.0, "failed", "cuMemsetD8Async returned CUDA_ERROR_ILLEGAL_ADDRESS (700)"),
    ],
)
def test_a_part_that_goes_wrong_takes_no_other_with_it(
    fault: str, weight: float, outcome: str, why: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PARTS, "bandwidth", dataclasses.replace(PARTS["bandwidth"], weight=weight))
    content, text = bench("bandwidth", "failure", fail=fault)
    assert outcomes(content) == {"bandwidth": outcome, "failure": "ok"}, text
    assert why in content["parts"]["bandwidth"]["why"] and why in text


def test_parts_for_which_no_time_is_left_are_not_begun(bench: Bench) -> None:
    """Something is written, however little time there is."""
    content, text = bench("opening", "costs", minutes=1e-3)
    assert outcomes(content) == {"opening": "skipped", "costs": "skipped"}
    assert text.count("the time was over") >= 2


def test_a_rank_that_fails_is_told(bench: Bench) -> None:
    """A part's ranks are processes of their own."""
    content, _ = bench("opening", fail="cuMemHostAlloc:1:2")
    assert outcomes(content) == {"opening": "failed"}
    assert "CUDA_ERROR_OUT_OF_MEMORY" in content["parts"]["opening"]["why"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("settings", "wanted"),
    [({"devices": 0}, "no GPU: cuInit returned CUDA_ERROR_NO_DEVICE (100)"), ({}, "libcuda.so.1")],
)
def test_without_a_gpu(settings: dict[str, Any], wanted: str, libraries: Path, tmp_path: Path) -> None:
    """The benchmark says why, and writes nothing."""
    settings_of_engine = chosen(libraries if settings else tmp_path)
    env = {**environment(libraries if settings else tmp_path, quiet=1, **settings), **settings_of_engine}
    script = f"from pathlib import Path\nfrom benchmarks.common import paths\npaths.OUT = Path({str(tmp_path)!r})\n"
    script += "import sys\nsys.argv[1:] = ['gpu']\nfrom benchmarks.__main__ import main\nmain()"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("no GPU: ") and wanted in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("settings", "wanted"), [({"only": ("cost",)}, "no part cost"), ({"minutes": 0}, "--minutes")])
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ValueError, match=wanted):
        run.GpuSettings(**settings).check()


def test_exact_results() -> None:
    """The reference of integers overflows, truncates toward zero, and handles bools."""
    given = [np.array([-128, 7, -7, 100], np.int8), np.array([-1, 4, 4, 100], np.int8)]
    for op, wanted in {
        "sum": [127, 11, -3, -56],
        "average": [-64, 5, -1, 100],
        "min": [-128, 4, -7, 100],
        "product": [-128, 28, -28, 16],
    }.items():
        np.testing.assert_array_equal(reference.reduce_whole(given, op), np.array(wanted, np.int8), op)
    bools = [np.array([True, False]), np.array([True, True])]
    assert reference.reduce_whole(bools, "sum").tolist() == [True, True]
    assert reference.reduce_whole(bools, "product").tolist() == [True, False]
    assert reference.reduce_whole(bools, "average") is None


@pytest.mark.parametrize("dtype", reference.FLOATS)
def test_errors_count_units_in_the_last_place(dtype: str) -> None:
    given = [reference.round_values(np.array([1.0, 2.0]), dtype), reference.round_values(np.array([1.0, 4.0]), dtype)]
    right = reference.round_values(np.array([2.0, 6.0]), dtype)
    assert reference.error(right, given, dtype, "sum") == 0
    next_one = right.copy()
    next_one.view(f"u{right.itemsize}")[0] += 1
    assert reference.error(next_one, given, dtype, "sum") == 1
    lost = reference.round_values(np.array([np.nan, 6.0]), dtype)
    assert reference.error(lost, given, dtype, "sum") == float("inf")
    assert reference.error(lost, [lost, given[1]], dtype, "min") > 1  # 4, and not 6


def test_bfloat16_rounds_to_the_nearest_and_to_even() -> None:
    values = np.array([1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, -2.5])
    got = reference.widen_values(reference.round_values(values, BFLOAT16), BFLOAT16)
    np.testing.assert_array_equal(got, [1.0, 1.0, 1 + 2.0**-6, 1 + 2.0**-7, -2.5])


def event(name: str, kind: str, begin: float, length: float, **more: Any) -> dict[str, Any]:
    """Return one event of a trace."""
    return {"name": name, "cat": kind, "ts": begin, "dur": length, "args": more}


def test_overlap_of_a_trace() -> None:
    """The engine takes 30 us: 20 between the first and last kernel of backward, and 15 under a kernel."""
    trace = [
        event(overlap.BACKWARD, "user_annotation", 100, 50),
        event("cudaLaunchKernel", "cuda_runtime", 90, 1, correlation=1),
        event("cudaLaunchKernel", "cuda_runtime", 110, 1, correlation=2),
        event("cuLaunchKernel", "cuda_driver", 120, 1, correlation=3),
        event("forward", "kernel", 95, 10, correlation=1, stream=7),
        event("gradient", "kernel", 130, 15, correlation=2, stream=7),
        event("gradient", "kernel", 150, 10, correlation=3, stream=7),
        event("pack_float32_float16", "kernel", 140, 10, correlation=4, stream=20),
        event("ncclDevKernel_AllReduce", "kernel", 150, 20, correlation=5, stream=20),
    ]
    told = overlap.analyse_trace(trace)
    assert told is not None
    assert told["work"] == pytest.approx(30e-6)
    assert told["backward"] == pytest.approx(2 / 3)
    assert told["computing"] == pytest.approx(0.5)
    assert overlap.analyse_trace(trace[:4]) is None
    assert overlap.analyse_trace(trace[:6]) == {"work": 0.0}


@pytest.mark.slow
def test_cases_of_the_binding_in_the_hosts_memory(tmp_path: Path) -> None:
    """All of them, and those left when time is over, run on two ranks without a GPU: the host against itself."""
    pytest.importorskip("torch", reason="needs torch")
    (known := tmp_path / "here.json").write_text(json.dumps({"cards": []}))
    for seconds in ("90", "0"):
        with Ranks("benchmarks.gpu.binding", 2, [str(tmp_path), str(known), seconds], binding.PATIENCE) as job:
            job.end(100)
        told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
        said = set(told[0].values()) | set(told[1].values())
        assert said == {binding.OK if seconds != "0" else binding.OVER}, told
        assert len(told[0]) == len(told[1]) and (len(told[0]) > 100) == (seconds != "0")


def test_a_wrong_result_of_the_binding_is_told() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    from benchmarks.gpu.binding_cases import BindingRank

    me = object.__new__(BindingRank)
    me.device, me.peer = "here", "there"
    right = torch.arange(4.0)
    results = {"here": right.clone(), "there": right}
    results["here"][2] = 2.5
    said = binding.run_case(lambda: me.compare_devices(results.__getitem__))
    assert "result 0: 1 of 4 differ, first [2]: 2.5, not 2.0" in said
    assert "differs by 0.167 of its size" in binding.run_case(lambda: me.compare_devices(results.__getitem__, 0.1))
    assert binding.run_case(lambda: me.compare_devices(results.__getitem__, 0.2)) == binding.OK
    assert "1 results, and 2 in" in binding.run_case(
        lambda: me.compare_devices({"here": right, "there": [right, right]}.__getitem__)
    )


@pytest.mark.slow
def test_frozen_steps_beside_gloo(tmp_path: Path) -> None:
    """An average over one rank equals its input, so a pass that does nothing is right."""
    pytest.importorskip("torch", reason="needs torch")
    script = """if True:
        import json, sys, torch
        from pathlib import Path
        from types import SimpleNamespace
        from benchmarks.gpu import frozen_steps
        from benchmarks.training.models import Chain
        from engine.torch import freezing
        Chain.LENGTH = 10
        passes = []
        made = SimpleNamespace(enqueue_pass=passes.append)
        freezing.is_on_gpu = lambda _tensor: True
        freezing.stream_of = lambda _device: 7
        device = lambda: SimpleNamespace(freeze=lambda _ordinal, *_: made, check_device=lambda _ordinal: None)
        freezing.runtime = SimpleNamespace(current_device=device, current_settings=freezing.runtime.current_settings)

        class Again:
            def run_on_stream(self, act): act()
            def capture_action(self, act): self.replay_graph = act

        told = frozen_steps.measure_workload("tiny", Path(sys.argv[1]), 2, 0.0, "cpu", Again)
        print(json.dumps(told | {"passes": len(passes)}))
    """
    done = subprocess.run([sys.executable, "-c", script, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert set(told["differences"].values()) == {0}
    assert {len(each) for each in told["rounds"].values()} == {2}
    assert told["passes"] > 10, "frozen steps were not frozen"
    part = {"outcome": "ok", "workloads": {"tiny": told}, "worlds": {}, "why": ""}
    assert "engine_replay to ddp" in beliefs._format_replays({"frozen": part})
    rows = report.MAKERS["frozen"](part)[0].rows
    assert [row[3] for row in rows] == list(told["ratios"])


@pytest.mark.slow
def test_steps_and_overlap_beside_gloo(tmp_path: Path) -> None:
    """Code that measures on a GPU also runs on the processor, so that it is tested."""
    pytest.importorskip("torch", reason="needs torch")
    script = """if True:
        import json, sys, torch
        from pathlib import Path
        from benchmarks.gpu import overlap, steps
        from benchmarks.training.models import Chain
        Chain.LENGTH = 10
        told = {"steps": steps.measure_workload("tiny", Path(sys.argv[1]), 2, 0.0, device="cpu")}
        torch.distributed.destroy_process_group()
        told["overlap"] = overlap.measure_workload("tiny", Path(sys.argv[1]), 1, device="cpu")
        print(json.dumps(told))
    """
    done = subprocess.run([sys.executable, "-c", script, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["steps"]["tensors"] == 20 and told["steps"]["difference"] == 0
    assert {len(each) for each in told["steps"]["rounds"].values()} == {2}
    parts = {"steps": {"outcome": "ok", "workloads": {"tiny": told["steps"]}, "why": ""}}
    assert "2000 tensors of 1 KiB" in beliefs._format_steps(parts)
    assert report.MAKERS["steps"](parts["steps"])[0].rows[0][0] == "2000 tensors of 1 KiB"
    assert report.MAKERS["overlap"]({"workloads": {"tiny": told["overlap"]}})[0].rows
