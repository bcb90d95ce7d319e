"""Files of earlier revisions, in `upgrade/`, still load: results of searches, checkpoints, and stages of Spark.

Each archive was written by the revision that it is named after, which ran (`upgrade/make_files.py`).
"""

from __future__ import annotations

import importlib
import json
import shutil
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune import cli, journal, result_cache
from engine.trace import __main__ as trace

from ..on_ranks import on_ranks
from ..spark.sessions import Spark
from .upgrade import writer

HERE = Path(__file__).parent / "upgrade"
ARCHIVES = sorted(HERE.glob("*.zip"))
OLDEST = "4d0d1964"  # the last revision before modules, classes and fields were renamed


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.stem)
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Directory with the files of a revision."""
    with zipfile.ZipFile(request.param) as archive:
        archive.extractall(tmp_path / "files")
    return tmp_path / "files"


def test_there_are_files_of_the_oldest_revision() -> None:
    assert OLDEST in [path.stem for path in ARCHIVES]


def test_a_result_of_a_search_is_offered_to_the_same_kind_of_job(files: Path) -> None:
    [path] = (files / "cache").rglob("*.json")
    results, skipped = result_cache.read(path.parent)
    assert (len(results), skipped) == (1, [])
    known = results[0]
    assert known.gain is not None and known.knobs["cycle_time_ms"] <= 2.0
    found, why, _ = result_cache.find_result(path.parent, known.job)
    assert found == known and why.startswith("this job: on ")
    found, why, _ = result_cache.find_result(path.parent, replace(known.job, version="9.9"))
    assert found == known and f"the same model, with version {known.job.version}: on " in why


def test_a_log_of_a_search_is_shown(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = files / "search" / "autotune.jsonl"
    rows = journal.read(log)
    assert rows[0]["row"] == "open" and any(row.get("final") for row in rows)
    assert cli.main(["show", str(log)]) == 0
    assert "cycle_time_ms" in capsys.readouterr().out


def test_timelines_of_ranks_are_merged_and_summarised(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timelines = [str(path) for path in sorted(files.glob("timeline.rank*.json"))]
    assert len(timelines) == 2
    assert trace.main(["summary", *timelines]) == 0
    assert "gradient.0.weight.round1" in capsys.readouterr().out
    assert trace.main(["merge", *timelines, "-o", str(files / "merged.json")]) == 0


def load_states(archive: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a checkpoint, and what the revision that wrote it found after it."""
    import torch

    with zipfile.ZipFile(archive) as packed:
        expected = json.loads(packed.read("states.json"))
        with packed.open("states.pt") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return torch.load(file, weights_only=False), expected


@on_ranks(2)
@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.stem)
def test_a_training_goes_on_from_a_checkpoint_as_it_did_then(archive: Path, rank: int) -> None:
    kept, expected = load_states(archive)
    model, (optimizer, scheme), data, sampler = writer.make_training()
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    scheme.load_state_dict(kept["scheme"])
    sampler.load_state_dict(kept["sampler"])
    assert list(sampler) == expected["rest"][rank]
    after = writer.train_steps(model, optimizer, data, sampler, writer.REST)
    assert after == pytest.approx(expected["after"], rel=1e-5)
    assert after != pytest.approx(expected["before"], rel=1e-2)


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.stem)
def test_a_state_takes_what_was_kept_of_its_values(archive: Path) -> None:
    from engine.elastic import ElasticBatchSampler

    kept, _ = load_states(archive)
    done = writer.STEPS * writer.BATCH * 2
    assert (kept["epoch"], kept["progress"].epoch, kept["progress"].done) == (4, 4, done)
    batches = ElasticBatchSampler(range(writer.LENGTH), 6, seed=1, rank=0, size=3)
    batches.load_state_dict(kept["batch_sampler"])
    fresh = ElasticBatchSampler(range(writer.LENGTH), 6, seed=9, rank=0, size=3)
    assert batches.done == 6 and list(batches) == list(fresh)[1:]


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    application = Spark()
    yield application.session("local[2]")
    application.end()


@pytest.mark.slow
@pytest.mark.timeout(600)  # a JVM, and executors that import Keras
@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_models_and_estimators_of_spark_load_and_compute(files: Path, spark: Any, framework: str) -> None:
    pytest.importorskip(framework)
    package = importlib.import_module(f"engine.spark.{framework}")
    store_module = importlib.import_module("engine.spark.store")
    title = framework.title()
    expected = json.loads((files / "spark.json").read_text())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = getattr(package, f"{title}Model").load(str(files / "stages" / f"{framework}-model"))
        estimator = getattr(package, f"{title}Estimator").load(str(files / "stages" / f"{framework}-estimator"))
    compression = importlib.import_module("engine").Compression
    assert estimator.getOrDefault("epochs") == 2 and estimator._gradient_compression is compression.fp16
    # `getHistory` returned this list in that revision, and returns the same values in Horovod's form now.
    assert model._history == expected[framework]["history"] and "loss" in str(model.getHistory())
    points = spark.createDataFrame([(point,) for point in expected["points"]], "x array<double>").coalesce(1)
    # Executors read what that revision left in the store; without it, what this one writes.
    for _ in range(2):
        model._store = store_module.Store.create(str(files / "store"))
        output = [row.y__output for row in model.transform(points).collect()]
        assert output == pytest.approx(expected[framework]["output"], rel=1e-4)
        shutil.rmtree(files / "store")
