"""`engine.ray.ElasticRayExecutor` on nodes that come and go: surviving workers, new workers, results."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs ray: pip install 'ray[train]'")

import ray

from engine.launch import JobError, LaunchError
from engine.ray import ElasticRayExecutor, RayExecutor, elastic

from ..waiting import until
from . import elastic_programs, programs
from .test_executor import gone, nothing_is_left

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(240)]

SOON = 90.0  # seconds within which a worker starts, on a busy machine


class Job:
    """Job in a thread of its own, whose workers record their places."""

    def __init__(self, home: Path, executor: ElasticRayExecutor) -> None:
        self.home = home
        self.logged: list[dict[str, int]] = []
        self._done: Future[list[Any]] = Future()

        def run() -> None:
            try:
                self._done.set_result(executor.run(elastic_programs.add_up, [self.logged.append], args=(str(home),)))
            except BaseException as error:
                self._done.set_exception(error)

        threading.Thread(target=run, daemon=True).start()

    def workers(self) -> dict[int, tuple[int, int, str]]:
        """Rank, size and host, by process ID, of each live worker that has reached a step."""
        found = {int(path.name.partition(".")[2]): path.read_text().split() for path in self.home.glob("worker.*")}
        return {pid: (int(at[0]), int(at[1]), at[2]) for pid, at in found.items() if not gone(pid)}

    def of_size(self, size: int) -> list[int]:
        """Wait for a world of that size; return the process IDs by rank."""

        def there() -> list[int]:
            assert not self._done.done(), self._done.result()
            among = {rank: pid for pid, (rank, each, _) in self.workers().items() if each == size}
            return [among[rank] for rank in range(size)] if len(among) == size else []

        return until(there, f"there are {size} ranks", SOON, pause=0.02)

    def stop(self) -> list[Any]:
        """End the training; return its result."""
        (self.home / "stop").touch()
        return self.result()

    def result(self) -> list[Any]:
        """Return the function's result, or raise its exception."""
        return self._done.result(SOON)


@pytest.fixture
def start(nothing_left: None) -> Iterator[Callable[..., ElasticRayExecutor]]:
    """Start an executor that is shut down at the end of the test and leaves nothing behind."""
    made: list[ElasticRayExecutor] = []

    def start(settings: Mapping[str, Any], **options: Any) -> ElasticRayExecutor:
        made.append(ElasticRayExecutor(ElasticRayExecutor.create_settings(**settings), **options))
        made[-1].start()
        return made[-1]

    yield start
    for each in made:
        each.shutdown()


@pytest.fixture
def nothing_left(cluster: Any) -> Iterator[None]:
    """Check after each test, once its additional nodes are removed, that all resources are free."""
    yield
    nothing_is_left()


def test_survivors_go_on_without_a_killed_worker_and_a_lost_node_and_take_in_those_that_come(
    cluster: Any,
    start: Callable[..., ElasticRayExecutor],
    add_node: Callable[[], Any],
    tmp_path: Path,
) -> None:
    first = add_node()
    executor = start({"min_np": 1, "max_np": 3}, cpus_per_slot=2, env_vars={"WORD": "x"})
    job = Job(tmp_path, executor)
    began = job.of_size(2)

    os.kill(began[1], signal.SIGKILL)
    assert job.of_size(1) == began[:1], "the survivor keeps its process"
    again = job.of_size(2)
    assert again[0] == began[0] and again[1] != began[1]

    add_node()
    grown = job.of_size(3)
    assert {*again} < {*grown}
    until(lambda: any(each["size"] == 3 for each in job.logged), "three ranks have made a step", SOON)

    on_first = {pid for pid, (_, _, host) in job.workers().items() if host.startswith(first.node_id[:8])}
    assert len(on_first) == 1
    cluster.remove_node(first, allow_graceful=False)
    left = job.of_size(2)
    assert {*left} == {*grown} - on_first

    found = job.stop()
    steps = found[0]["step"]
    whole = {"size": 2, "step": steps, "total": elastic_programs.expected(steps), "word": "x"}
    assert found == [{"rank": rank, "pid": left[rank], **whole} for rank in range(2)]
    sizes = [each["size"] for each in job.logged]
    assert sizes[0] == 2 and 3 in sizes, sizes
    until(lambda: all(map(gone, {*began, *again, *grown})), "all workers have ended")


def test_an_exception_of_the_program_is_the_first_cause_with_its_traceback_once(
    start: Callable[..., ElasticRayExecutor],
) -> None:
    executor = start({"min_np": 2, "max_np": 2})
    with pytest.raises(JobError) as caught:
        executor.run(elastic_programs.raise_in_rank_1)
    text = str(caught.value)
    assert text.count("| ValueError: bad batch") == 1 and 'raise ValueError("bad batch")' in text, text
    assert "raised the same" in text, text
    executor.shutdown()
    with pytest.raises(LaunchError, match=r"call start\(\) first"):
        executor.run(elastic_programs.raise_in_rank_1)


def test_the_other_executor_runs_elastic_jobs_and_each_worker_has_its_gpu_at_the_number_of_its_slot(
    nothing_left: None,
) -> None:
    ranks = RayExecutor(RayExecutor.create_settings(), min_workers=2, max_workers=2, use_gpu=True)
    with pytest.raises(NotImplementedError, match="executable_cls"):
        ranks.start(programs.Counter)
    try:
        ranks.start()
        found = ranks.run(elastic_programs.devices)
        assert sorted(str(seen).split(",")[int(str(slot))] for seen, slot, _ in found) == ["0", "1"], found
        with pytest.raises(NotImplementedError, match=r"run\(\) alone"):
            ranks.run_remote(elastic_programs.devices)
    finally:
        ranks.shutdown()


def test_slots_that_never_come_are_told_with_what_the_cluster_has(
    start: Callable[..., ElasticRayExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "SETTLE", 1.0)
    executor = start({"min_np": 3, "max_np": 5, "elastic_timeout": 1.0}, cpus_per_slot=2)
    with pytest.raises(JobError) as caught:
        executor.run(elastic_programs.devices)
    text = str(caught.value)
    assert "no room within 1 s (elastic_timeout) for 3 ranks, each with 2 CPU" in text
    # Ray may for some seconds count killed nodes of an earlier test, which had two CPUs each.
    assert re.search(r"The cluster has \d nodes: \d with 2 CPU, 2 with 1 CPU;", text), text


def test_what_a_callback_raises_ends_the_job_and_a_value_that_is_too_large_is_refused(
    start: Callable[..., ElasticRayExecutor],
) -> None:
    executor = start({"min_np": 1, "max_np": 1})

    def interrupt(_: str) -> None:
        signal.raise_signal(signal.SIGINT)  # like Ctrl-C, at any time

    with pytest.raises(KeyboardInterrupt):
        executor.run(elastic_programs.log_too_much, [interrupt])

    def fail(value: str) -> None:
        raise KeyError(value)

    with pytest.raises(KeyError, match=r"ray_logger.log: a bytes of 500 KiB; 500 KiB go"):
        executor.run(elastic_programs.log_too_much, [fail])


@pytest.mark.slow  # one more worker takes some seconds
def test_a_discovery_of_the_users_own_and_a_limit_of_resets_are_kept_to(
    start: Callable[..., ElasticRayExecutor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Told:
        slots = 1

        def find_available_hosts_and_slots(self) -> dict[str, int]:
            return {ray.util.get_node_ip_address(): self.slots, "elsewhere": 7}

    told = Told()
    settings = {"min_np": 1, "max_np": 4, "discovery": told, "reset_limit": 1}
    executor = start(settings, override_discovery=False)
    job = Job(tmp_path, executor)
    job.of_size(1)
    assert caplog.text.count("the discovery tells of 'elsewhere', which is no node of the cluster") == 1
    with pytest.raises(LaunchError, match="runs a function already"):
        executor.run(elastic_programs.devices)
    told.slots = 2
    os.kill(job.of_size(2)[1], signal.SIGKILL)
    with pytest.raises(JobError) as caught:
        job.result()
    text = str(caught.value)
    assert "reset_limit" in text and "was killed by SIGKILL" in text.splitlines()[-1], text


def test_shutdown_ends_a_function_that_runs(start: Callable[..., ElasticRayExecutor], tmp_path: Path) -> None:
    executor = start({"min_np": 1, "max_np": 1})
    job = Job(tmp_path, executor)
    (worker,) = job.of_size(1)
    executor.shutdown()
    assert gone(worker)
    with pytest.raises(JobError, match="ended by SIGTERM"):
        job.result()
