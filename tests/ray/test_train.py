"""The engine in Ray Train: places, restarts from a checkpoint by Ray's own rules, the first cause."""

from __future__ import annotations

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

from . import programs

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(180)]


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
