"""The engine in Ray Train: places, restarts from a checkpoint by Ray's own rules, the first cause."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs ray: pip install 'ray[train]'")
pytest.importorskip("ray.train", reason="needs what ray[train] brings")
pytest.importorskip("torch", reason="needs torch")

from ray.train import FailureConfig, RunConfig, ScalingConfig, WorkerGroupError
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from engine.ray import EngineConfig, EngineTorchConfig

from ..waiting import until
from . import programs

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(240)]


def run_config(directory: Path, failures: int) -> Any:
    """Ray's directory for checkpoints, and its number of restarts."""
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
    assert 1 <= again <= 4  # Ray decides which reports it has kept
    assert sorted(began[:2]) == [(0, 0, 2, 0), (1, 1, 2, 0)]
    assert sorted(began[2:]) == [(0, 0, 2, again), (1, 1, 2, again)]


class Training:
    """Run of Ray Train in a thread of its own, whose workers record their steps."""

    def __init__(self, home: Path, trainer: DataParallelTrainer) -> None:
        self._home = home
        self._seen = 0
        self._fitting = ThreadPoolExecutor(1).submit(trainer.fit)

    def steps(self) -> list[tuple[int, ...]]:
        """Number, size, rank and process ID of all steps so far."""
        path = self._home / "steps"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [tuple(map(int, line.split())) for line in lines if line.endswith("\n")]

    def group(self, size: int) -> dict[int, int]:
        """Wait until a group of that size has made steps since the last call; return the process IDs by rank."""

        def there() -> dict[int, int]:
            assert not self._fitting.done(), self._fitting.result()
            found = {rank: pid for _, each, rank, pid in self.steps()[self._seen :] if each == size}
            return found if len(found) == size else {}

        found = until(there, f"a group of {size} workers makes steps", 150, pause=0.05)
        self._seen = len(self.steps())
        return found

    def stop(self) -> Any:
        """End the training; return the metrics that were reported last."""
        (self._home / "stop").touch()
        return self._fitting.result(120).metrics


@pytest.mark.slow  # four worker groups of Ray Train, and a lost node that Ray notices after some 15 s
def test_an_elastic_group_begins_again_at_the_last_checkpoint_with_as_many_workers_as_there_is_room_for(
    cluster: Any, add_node: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "10")  # limits waiting for resources of a lost node
    node = add_node()
    training = Training(
        tmp_path,
        DataParallelTrainer(
            programs.train_on,
            train_loop_config={"home": str(tmp_path)},
            backend_config=EngineConfig(),
            scaling_config=ScalingConfig(
                num_workers=(1, 2), resources_per_worker={"CPU": 2}, elastic_resize_monitor_interval_s=1
            ),
            run_config=run_config(tmp_path, failures=2),
        ),
    )
    groups = [training.group(2)]
    os.kill(groups[-1][1], signal.SIGKILL)
    groups.append(training.group(2))
    cluster.remove_node(node, allow_graceful=False)
    groups.append(training.group(1))
    add_node()
    groups.append(training.group(2))
    metrics = training.stop()

    assert len({pid for group in groups for pid in group.values()}) == 7, "each group has processes of its own"
    made = [[(step, size) for step, size, _, pid in training.steps() if pid == group[0]] for group in groups]
    assert made[0][0][0] == 0 and [each[0][1] for each in made] == [2, 2, 1, 2]
    for before, after in pairwise(made):
        assert [step for step, _ in after] == list(range(after[0][0], after[0][0] + len(after)))
        assert 1 <= after[0][0] <= before[-1][0] + 2, "it begins at a checkpoint of the group before"
    assert metrics == {"step": made[-1][-1][0], "total": 2.0}


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


@pytest.mark.slow
def test_rays_own_trainer_takes_the_backend_of_torch_distributed(tmp_path: Path) -> None:
    trainer = TorchTrainer(
        programs.train_by_torch,
        train_loop_config={"directory": str(tmp_path)},
        torch_config=TorchConfig(backend="engine"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=run_config(tmp_path, failures=0),
    )
    assert trainer.fit().error is None
    told = [(tmp_path / f"rank.{rank}").read_text() for rank in range(2)]
    assert told == ["engine EngineProcessGroup [[1.5, 1.5, 1.5]]"] * 2
