"""Trackers of experiments get throughput and exposed communication, by the trackers' own packages."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ..ranks import Finished, run_ranks

PROGRAM = """
import os, json, sys, time
import numpy as np
import engine, engine.trackers
from tests.waiting import be_late
engine.init({init})
{before}
with {tracker} as tracker:
    for number in range(40):
        engine.allreduce(np.ones(300_000, np.float32), name="a")
        if engine.rank() == {late}:
            be_late(0.05)
        tracker.step(examples=32)
engine.barrier()
{after}
"""
IMPORTS = 300.0  # seconds for a job that imports large packages, on a busy machine
FIGURES = {f"engine/{name}" for name in "steps_per_second examples_per_second step_ms exposed_ms exposed_share".split()}


def needs(package: str) -> Any:
    """Skip a test where a package is missing."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}: pip install '.[trackers]'")


def run(tracker: str, before: str = "", after: str = "", init: str = "", late: int = -1, size: int = 2) -> Finished:
    program = PROGRAM.format(tracker=tracker, before=before, after=after, init=init, late=late)
    env = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
    return run_ranks(size, program, env=env, timeout=IMPORTS)


def check_figures(figures: dict[str, float]) -> None:
    """Check that figures agree with each other and with what the program does."""
    assert figures.keys() >= FIGURES, figures
    assert all(math.isfinite(value) and value >= 0 for value in figures.values()), figures
    per_second = figures["engine/steps_per_second"]
    assert figures["engine/examples_per_second"] == pytest.approx(2 * 32 * per_second, rel=1e-3)
    assert figures["engine/step_ms"] == pytest.approx(1e3 / per_second, rel=1e-3)
    assert 0 < figures["engine/exposed_share"] <= 1
    assert figures["engine/exposed_ms"] == pytest.approx(
        figures["engine/exposed_share"] * figures["engine/step_ms"], rel=1e-3
    )


def read_events(directory: Path) -> Iterator[Any]:
    """Read the files of TensorBoard: records of a length, a checksum of it, an event, and a checksum of that."""
    from tensorboardX.proto.event_pb2 import Event

    for path in directory.rglob("events.out.tfevents.*"):
        data, at = path.read_bytes(), 0
        while at < len(data):
            [length] = struct.unpack_from("<Q", data, at)
            yield Event.FromString(data[at + 12 : at + 12 + length])
            at += 12 + length + 4


@needs("tensorboardX")
def test_tensorboard_gets_scalars_of_rank_0(tmp_path: Path) -> None:
    run(f"engine.trackers.TensorBoardTracker({str(tmp_path)!r}, interval=1000)")
    scalars = [
        (each.step, value.tag, value.simple_value) for each in read_events(tmp_path) for value in each.summary.value
    ]
    assert {step for step, _, _ in scalars} == {40}
    check_figures({tag: value for _, tag, value in scalars})
    assert len(list(tmp_path.rglob("events.out.tfevents.*"))) == 1  # rank 1 writes nothing


@needs("tensorboard")
@pytest.mark.slow
@pytest.mark.timeout(IMPORTS)
def test_a_writer_of_torch_stays_open(tmp_path: Path) -> None:
    before = f"""
writer = None
if engine.rank() == 0:
    sys.modules["tensorflow"] = None  # TensorBoard would import it, which takes long, and goes without
    from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter({str(tmp_path)!r})
"""
    after = "if writer is not None: writer.add_scalar('own', 1.0, 41), writer.close()"
    run("engine.trackers.TensorBoardTracker(writer, interval=1000)", before, after)
    tags = {value.tag for each in read_events(tmp_path) for value in each.summary.value}
    assert FIGURES | {"own"} <= tags


@needs("mlflow")
@pytest.mark.slow
@pytest.mark.timeout(IMPORTS)
@pytest.mark.parametrize("synchronous", [False, True])
def test_mlflow_gets_metrics_of_its_active_run(tmp_path: Path, synchronous: bool) -> None:
    store = tmp_path / "runs"  # which MLflow has to make: in a directory that is there it makes no experiment
    before = f"""
if engine.rank() == 0:
    import mlflow
    mlflow.set_tracking_uri({store.as_uri()!r})
    mlflow.set_experiment("hangs")
    mlflow.start_run(run_name="it")
"""
    after = """
if engine.rank() == 0:
    run = mlflow.active_run()
    mlflow.end_run()
    client = mlflow.MlflowClient()
    found = {name: [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]
             for name in client.get_run(run.info.run_id).data.metrics}
    print("FOUND", json.dumps(found))
"""
    done = run(f"engine.trackers.MLflowTracker(interval=1000, synchronous={synchronous})", before, after)
    [line] = [line for line in done.ranks[0].stdout.splitlines() if line.startswith("FOUND")]
    found = json.loads(line.removeprefix("FOUND "))
    assert {step for each in found.values() for step, _ in each} == {40}
    check_figures({name: each[-1][1] for name, each in found.items()})


def read_wandb(path: Path) -> Iterator[bytes]:
    """Read the records of an offline run: a header, and chunks in blocks of 32 KiB, as in LevelDB's log."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, held = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if kind == 0:
            break
        held += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last chunk of one
            yield held
            held = b""


@needs("wandb")
@pytest.mark.slow
@pytest.mark.timeout(IMPORTS)
def test_wandb_gets_figures_offline(tmp_path: Path) -> None:
    before = f"""
if engine.rank() == 0:
    import wandb
    wandb.init(project="p", mode="offline", dir={str(tmp_path)!r})
"""
    after = "if engine.rank() == 0: wandb.finish()"
    run("engine.trackers.WandbTracker(interval=1000)", before, after)
    from wandb.proto.wandb_internal_pb2 import Record

    [path] = tmp_path.rglob("*.wandb")
    rows = []
    for data in read_wandb(path):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in items})
    [row] = [row for row in rows if "engine/step" in row]
    assert row["engine/step"] == 40
    check_figures({name: value for name, value in row.items() if name in FIGURES})


LOGGING = """
class Kept(engine.trackers.Tracker):  # a stand-in for a tracker's package
    def _log(self, figures, step):
        print("LOGGED", json.dumps([step, figures]))
"""


def logged(done: Finished, rank: int = 0) -> list[tuple[int, dict[str, float]]]:
    lines = [line for line in done.ranks[rank].stdout.splitlines() if line.startswith("LOGGED")]
    return [tuple(json.loads(line.removeprefix("LOGGED "))) for line in lines]


def test_what_a_tracker_has_opened_is_closed_though_the_last_log_fails() -> None:
    program = """
import engine, engine.trackers
class Broken(engine.trackers.Tracker):
    def _log(self, figures, step):
        raise OSError("the disk is full")
    def _close(self):
        print("closed")
engine.init()
tracker = Broken(interval=1000)
tracker.step()
try:
    tracker.close()
except OSError as error:
    print(error)
tracker.close()
"""
    assert run_ranks(1, program).ranks[0].stdout == "closed\nthe disk is full\n"


def test_an_interval_of_zero_logs_every_step_and_nothing_twice() -> None:
    done = run("Kept(interval=0)", LOGGING)
    assert [step for step, _ in logged(done)] == list(range(1, 41))
    assert logged(done, 1) == []


def test_the_rank_that_is_late_is_named() -> None:
    [(step, figures)] = logged(run("Kept(interval=1000)", LOGGING, late=1))
    assert step == 40 and figures["engine/late_rank"] == 1 and figures["engine/late_ms"] > 25, figures


def test_a_job_that_counts_nothing_still_has_its_throughput() -> None:
    program = PROGRAM.format(tracker="Kept(interval=1000)", before=LOGGING, after="", init="", late=-1)
    done = run_ranks(2, program, options=["--no-metrics"])
    [(_, figures)] = logged(done)
    assert figures.keys() == {f"engine/{name}" for name in ("steps_per_second", "examples_per_second", "step_ms")}
    assert "start the job by enginerun, or call engine.init(metrics=True)" in done.err + done.ranks[0].stderr


@needs("keras")
@pytest.mark.slow
@pytest.mark.timeout(IMPORTS)
def test_keras_calls_a_tracker_by_its_own_callback() -> None:
    before = (
        LOGGING
        + """
os.environ["KERAS_BACKEND"] = "torch"
import keras
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
"""
    )
    program = f"""
import os, json
import numpy as np
import engine, engine.trackers
engine.init()
{before}
with Kept(interval=0) as tracker:
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: tracker.step(examples=8))
    model.fit(np.ones((24, 4)), np.ones((24, 1)), batch_size=8, epochs=2, callbacks=[callback], verbose=0)
"""
    assert [step for step, _ in logged(run_ranks(1, program, timeout=IMPORTS))] == [1, 2, 3, 4, 5, 6]
