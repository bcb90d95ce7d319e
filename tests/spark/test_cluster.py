"""`engine.spark.run` with separate executors, one of which is killed."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from engine.host import processes
from engine.launch import JobError

from ..waiting import until
from . import called
from .sessions import Spark
from .test_run import SOON, gone, told

pytestmark = pytest.mark.timeout(300)  # the first test of a session starts a JVM, and Spark in it


@pytest.fixture(scope="module")
def spark(application: Spark) -> Any:
    return application.session("local-cluster[2,1,1024]", {"spark.speculation": "true"})


def executor_of(pid: int) -> int:
    """Process ID of the executor's JVM, two levels above a task's Python process and its daemon."""
    daemon = processes.read_process(pid)
    assert daemon is not None
    above = processes.read_process(daemon.parent)
    assert above is not None
    return above.parent


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_a_killed_executor_ends_the_job_and_leaves_nothing(spark, tmp_path, times):
    """Holds twice in a row, since Spark starts a new executor; executors of one machine count as one host."""
    from engine.spark import run, slots

    quiet = {"stdout": io.StringIO(), "stderr": io.StringIO()}
    for time_ in range(times):
        until(lambda: slots._count_slots(spark.sparkContext) == 2, "both executors are there")
        home = tmp_path / str(time_)
        home.mkdir()
        killed: list[float] = []

        def kill(home: Path = home, killed: list[float] = killed) -> None:
            task = told(home)[1][1]
            killed.append(time.monotonic())
            os.kill(executor_of(task), signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        with pytest.raises(JobError, match=r"^rank 1 on .* was lost: .* its executor was lost") as caught:
            run(called.tells_and_waits, (str(home), True), num_proc=2, **quiet)
        assert time.monotonic() - killed[0] < SOON
        thread.join()
        assert caught.value.rank == 1
        left = [pid for rank in told(home) for pid in (rank[0], rank[2])]
        until(lambda left=left: all(map(gone, left)), f"{left} are gone", 10)
    until(lambda: slots._count_slots(spark.sparkContext) == 2, "both executors are there again")
    out, err = io.StringIO(), io.StringIO()
    results = run(called.place, num_proc=2, stdout=out, stderr=err)
    assert [found[:4] for found in results] == [(0, 2, 0, 2), (1, 2, 1, 2)]
    assert out.getvalue().count("was here") == 2  # once per rank, in spite of speculation
    assert "ranks are never started twice" in err.getvalue()
