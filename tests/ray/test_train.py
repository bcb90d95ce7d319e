"""The engine in Ray Train: places, restarts from a checkpoint by Ray's own rules, the first cause."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs ray: pip install 'ray[train]'")
pytest.importorskip("ray.train", reason="needs what ray[train] brings")
pytest.importorskip("torch", reason="needs torch")

from ray.train import FailureConfig, RunConfig, ScalingConfig, WorkerGroupError
from ray.train.torch import TorchTrainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from engine.ray import EngineConfig, EngineTorchConfig

from ..waiting import until
from . import programs

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(240)]


def run_config(directory: Path, failures: int) -> Any:
    """Where Ray keeps checkpoints, and how often it starts again."""
    return RunConfig(storage_path=str(directory), failure_config=FailureConfig(max_failures=failures))


def test_a_killed_worker_is_made_up_for_by_a_new_group_that_begins_at_the_last_checkpoint(tmp_path: Path) -> None:
    log = tmp_path / "log"
    trainer = DataParallelTrainer(
        programs.train,
        train_loop_config={"log": str(log)},
        backend_config=EngineConfig(start_timeout=60),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=run_config(tmp_path, failures=1),
    )
    metrics = trainer.fit().metrics
    assert (metrics["step"], metrics["total"]) == (5, 10.0)
    began = [tuple(map(int, line.split())) for line in log.read_text().splitlines()]
    again = metrics["first"]
    assert 1 <= again <= 4  # Which reports Ray had kept, it decides.
    assert sorted(began[:2]) == [(0, 0, 2, 0), (1, 1, 2, 0)]
    assert sorted(began[2:]) == [(0, 0, 2, again), (1, 1, 2, again)]


@pytest.mark.slow  # two groups of workers of Ray Train, and a node that comes
def test_a_group_that_may_grow_begins_again_with_more_workers_at_the_last_checkpoint(
    add_node: Callable[[], Any], tmp_path: Path
) -> None:
    log = tmp_path / "log"

    trainer = DataParallelTrainer(
        programs.train_until_there_are_two,
        train_loop_config={"log": str(log)},
        backend_config=EngineConfig(start_timeout=60),
        scaling_config=ScalingConfig(
            num_workers=(1, 2), resources_per_worker={"CPU": 2}, elastic_resize_monitor_interval_s=1
        ),
        run_config=run_config(tmp_path, failures=0),
    )
    with ThreadPoolExecutor(1) as pool:
        fitting = pool.submit(trainer.fit)
        until(lambda: log.exists() or fitting.done(), "a step is made", 120, pause=0.1)
        add_node()  # which Ray allows in the main thread alone
        metrics = fitting.result(120).metrics
    made = [tuple(map(int, line.split())) for line in log.read_text().splitlines()]
    alone = [step for size, step in made if size == 1]
    assert alone == list(range(len(alone))) and alone
    assert metrics["total"] == 2.0 and metrics["step"] == metrics["first"] + 2
    assert 1 <= metrics["first"] <= len(alone) + 1  # Which reports Ray had kept, it decides.


@pytest.mark.slow  # a second group of workers of Ray Train, which import much
def test_an_exception_in_rank_1_is_the_error_of_a_torch_trainer(tmp_path: Path) -> None:
    log = tmp_path / "log"
    trainer = TorchTrainer(
        programs.train_and_raise,
        train_loop_config={"log": str(log)},
        torch_config=EngineTorchConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=run_config(tmp_path, failures=0),
    )
    with pytest.raises(WorkerGroupError) as caught:
        trainer.fit()
    assert sorted(log.read_text().splitlines()) == [f"{rank} {rank} [1.0, 1.0] [1.0, 1.0]" for rank in range(2)]
    errors = {rank: str(error) for rank, error in caught.value.worker_failures.items()}
    assert errors.pop(1, "bad batch") == "bad batch" and "ValueError: bad batch" in str(caught.value)
    for rank, text in errors.items():
        assert rank == 0 and text.startswith("rank 1 failed: ValueError: bad batch at programs.py:")
