"""Interpretation of Spark's answers without Spark: whether missing tasks run, and which rank is blamed."""

from __future__ import annotations

import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engine.launch import LaunchError
from engine.launch.process.rank_end import RankEnd
from engine.spark import slots
from engine.spark.collecting import LateStartError
from engine.spark.job import _Job
from engine.spark.rank_assignment import TaskInfo, assign_ranks
from engine.spark.record import RankRecord
from engine.spark.task import FIRST, LAST, JobSpec, TaskSupervisor


def spec(**more: Any) -> JobSpec:
    return JobSpec(2, "spark-test", "secret", (), b"call", {}, **more)


def job(session: Any = None, came: int = 0, **listener: Any) -> _Job:
    heard = {"records": {}, "lost": {}, "came": came, "await_reports": lambda seconds: None}
    return _Job(session, spec(), SimpleNamespace(**heard | listener), print)  # type: ignore[arg-type]


@pytest.mark.parametrize("came", [0, 1])
@pytest.mark.parametrize(
    ("tasks", "active", "completed", "runs"), [(2, 2, 0, True), (2, 1, 1, True), (2, 1, 0, False), (3, 2, 0, False)]
)
def test_tasks_that_spark_runs_are_not_late_though_some_cannot_reach_the_driver(
    came: int, tasks: int, active: int, completed: int, runs: bool
):
    info = SimpleNamespace(numTasks=tasks, numActiveTasks=active, numCompletedTasks=completed)
    tracker = SimpleNamespace(
        getJobInfo={7: SimpleNamespace(stageIds=[3])}.get,
        getStageInfo={3: info}.get,  # asking for another job's stages would fail
    )
    tagged = SimpleNamespace(getJobIdsForTag={"spark-test": [7]}.get)
    scala = SimpleNamespace(sc=lambda: SimpleNamespace(statusTracker=lambda: tagged))
    session = SimpleNamespace(sparkContext=SimpleNamespace(statusTracker=lambda: tracker, _jsc=scala))
    assert job(session, came)._runs_unseen() is runs


@pytest.mark.parametrize(
    ("tasks", "inflight", "completed", "runs"), [(2, 2, 0, True), (2, 1, 1, True), (2, 0, 0, False), (3, 2, 0, False)]
)
def test_spark_connect_tells_by_its_progress_that_tasks_run(tasks: int, inflight: int, completed: int, runs: bool):
    handlers: list[Any] = []

    class Session:
        registerProgressHandler = staticmethod(handlers.append)
        removeProgressHandler = staticmethod(handlers.remove)

    Session.__module__ = "pyspark.sql.connect.session"
    found = job(Session())
    with found._progress.follow_session(Session()):
        (handler,) = handlers
        stage = SimpleNamespace(num_tasks=tasks, num_completed_tasks=completed)
        handler(stages=None, inflight_tasks=2, operation_id=None, done=False)
        assert not found._runs_unseen()
        handler(stages=[stage], inflight_tasks=inflight, operation_id="1", done=False)
    assert found._runs_unseen() is runs and not handlers


def test_what_a_task_has_raised_goes_before_its_lost_connection():
    lost = RankRecord(1, "node", RankEnd(1, -9, time.time(), by_launcher=False, lost="its task was killed"), {})
    other = RankRecord(0, "node", RankEnd(0, -15, time.time(), by_launcher=True), {})
    found = job(lost={1: lost}, records={0: other})
    said = f"Spark's stack\n{FIRST}rank 1 on node cannot be run: OSError: no space{LAST}\n more of it"
    assert (
        str(found._explain_failure(RuntimeError(said), 1.0, 0.0)) == "rank 1 on node cannot be run: OSError: no space"
    )
    assert str(found._explain_failure(RuntimeError("ExecutorLost"), 1.0, 0.0)).startswith("rank 1 on node was lost")
    assert isinstance(found._explain_failure(LateStartError(), 1.0, 0.0), LaunchError)


def test_a_task_says_for_which_rank_it_has_raised(monkeypatch: pytest.MonkeyPatch):
    """Holds for any exception after the driver knows the rank, such as one of a full disk."""
    import sys

    from engine.spark import task

    info = SimpleNamespace(address="127.0.0.1:1")
    context = SimpleNamespace(partitionId=lambda: 0, getTaskInfos=lambda: [info], allGather=lambda text: [text])
    spark = ModuleType("pyspark")
    spark.BarrierTaskContext = SimpleNamespace(get=lambda: context)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyspark", spark)
    monkeypatch.setitem(sys.modules, "pyarrow", ModuleType("pyarrow"))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(task, "TaskSupervisor", full)
    with pytest.raises(task.RankFailedError, match=r"^\[\[rankrank 0 on .* cannot be run: OSError: .*No space"):
        list(task.serve(spec(), []))


@pytest.mark.parametrize(("hosts", "interface"), [("ab", "lo"), ("aa", None)])
def test_each_host_uses_the_first_interface_that_it_has(hosts: str, interface: str | None, tmp_path, monkeypatch):
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = assign_ranks([TaskInfo(host, host, "127.0.0.1", 1, 2) for host in hosts])[0]
    given = JobSpec(2, "spark-test", "secret", (), b"call", {"ENGINE_INTERFACE": "none0,lo"})
    assert TaskSupervisor(given, place, "a", None)._plan().environment.get("ENGINE_INTERFACE") == interface


def test_ranks_are_by_default_as_many_as_slots(monkeypatch: pytest.MonkeyPatch):
    session = SimpleNamespace(sparkContext=SimpleNamespace(defaultParallelism=8))
    for found, size in ((3, 3), (0, 1)):
        monkeypatch.setattr(slots, "_count_slots", lambda context, found=found: found)
        assert slots.default_size(session) == size
