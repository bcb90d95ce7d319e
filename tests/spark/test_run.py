"""`engine.spark.run` in one process of Spark: places, output, slots, and the rank blamed for a failure."""

from __future__ import annotations

import functools
import io
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine.host import processes
from engine.launch import JobError, LaunchError

from ..waiting import until
from . import called

SOON = 60.0  # seconds within which a job ends whose rank or task is gone, on a busy machine

pytestmark = pytest.mark.timeout(300)  # the first test of a session starts a JVM, and Spark in it


@pytest.fixture
def run(spark: Any) -> Any:
    from engine.spark import run

    return functools.partial(run, num_proc=2, stdout=io.StringIO(), stderr=io.StringIO())


def gone(pid: int) -> bool:
    found = processes.read_process(pid)
    return found is None or found.state == "Z"


def test_results_come_by_rank_and_output_as_it_is_written(run):
    out = io.StringIO()
    results = run(called.place, ("a",), {"key": 3}, stdout=out, env={"ENGINE_TEST_WORD": "word"})
    assert results == [(rank, 2, rank, 2, 2.0, ("a",), {"key": 3}, "word") for rank in range(2)]
    assert sorted(out.getvalue().splitlines()) == [f"[{rank}]<stdout>:rank {rank} was here" for rank in range(2)]


def test_a_function_of_the_caller_is_enough(run):
    word = "word"

    def rank():
        import engine

        engine.init()
        return word, engine.rank()

    assert run(rank) == [("word", 0), ("word", 1)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failing_ranks_traceback_comes_first(run, rank):
    with pytest.raises(JobError) as caught:
        run(called.raises_on, (rank,))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"rank {rank} on ") and lines[0].endswith(" failed first:")
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == f"ValueError: rank {rank} does not like it"
    assert caught.value.rank == rank


def test_a_failing_rank_ends_those_that_do_not_look(run):
    began = time.monotonic()
    with pytest.raises(JobError, match="ValueError: rank 1 does not like it"):
        run(called.alone_and_raises_on, (1,))
    assert time.monotonic() - began < SOON


def test_a_killed_rank_is_named(run):
    with pytest.raises(JobError, match=r"(?s)^rank 1 on .* failed first\n.*killed by SIGKILL") as caught:
        run(called.killed_on, (1,))
    assert caught.value.rank == 1


def test_a_rank_that_cannot_be_started_says_why(run):
    with pytest.raises(JobError, match=r"^rank [01] on .* cannot be run: .*/nowhere/python"):
        run(called.place, executable="/nowhere/python")


def test_a_rank_that_ends_without_a_result_is_an_error(run):
    with pytest.raises(JobError, match="rank 0 ended before the function returned"):
        run(called.exits, (0,))


def test_a_killed_task_ends_the_job_and_leaves_nothing(run, tmp_path):
    """Spark's Python process is killed; twice, since Spark starts a new one."""
    for time_ in range(2):
        home = tmp_path / str(time_)
        home.mkdir()
        killed: list[float] = []

        def kill(home: Path = home, killed: list[float] = killed) -> None:
            pids = told(home)
            killed.append(time.monotonic())
            os.kill(pids[1][1], signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        with pytest.raises(JobError, match=r"^rank 1 on .* was lost: its task was killed") as caught:
            run(called.tells_and_waits, (str(home), True))
        assert time.monotonic() - killed[0] < SOON
        thread.join()
        assert caught.value.rank == 1
        left = [pid for rank in told(home) for pid in (rank[0], rank[2])]
        until(lambda left=left: all(map(gone, left)), f"{left} are gone", 10)


def told(home: Path) -> list[tuple[int, int, int]]:
    """Process IDs of each rank, its task, and a child of the rank that has left its session."""
    paths = [home / f"rank.{rank}.there" for rank in range(2)]
    until(lambda: all(path.exists() for path in paths), "both ranks have told")
    return [tuple(map(int, path.read_text().split())) for path in paths]  # type: ignore[misc]


def test_too_few_slots_are_told_at_once(run):
    """Spark by itself would wait for minutes."""
    began = time.monotonic()
    with pytest.raises(LaunchError, match="5 ranks need as many slots at once, and Spark has 2"):
        run(called.place, num_proc=5)
    assert time.monotonic() - began < SOON


class Watched(io.StringIO):
    """Stream that acts when a given text is written to it."""

    def __init__(self, text: str, act: Any) -> None:
        super().__init__()
        self._text, self._act = text, act

    def write(self, text: str) -> int:
        if self._text in text:
            self._act()
        return super().write(text)


def held_slot(spark: Any, home: Path) -> tuple[threading.Thread, Path]:
    """Let another job hold a slot until a file exists; return the thread that waits for it, and the file."""
    begun, release = home / "begun", home / "release"

    def hold(_: Any) -> None:
        from tests.waiting import until

        begun.touch()
        until(release.exists, "the slot may be freed")

    thread = threading.Thread(target=lambda: spark.sparkContext.parallelize([0], 1).foreach(hold))
    thread.start()
    until(begun.exists, "the slot is held")
    return thread, release


def test_a_job_waits_for_slots_that_another_one_holds_and_says_so(spark, run, tmp_path):
    """The message says how many of the slots other jobs hold."""
    from engine.spark import slots

    thread, release = held_slot(spark, tmp_path)
    until(lambda: slots._count_busy(spark.sparkContext) == 1, "Spark's status tells of that")
    err = Watched("hold 1 of 2", release.touch)
    assert len(run(called.place, stderr=err)) == 2
    thread.join()
    assert "2 ranks wait for slots: other jobs of this application hold 1 of 2" in err.getvalue()


def test_a_job_that_is_asked_for_in_the_moment_of_another_says_so_later(spark, run, tmp_path, monkeypatch):
    """The other job's tasks do not run yet when slots are counted."""
    from engine.spark import slots

    thread, release = held_slot(spark, tmp_path)
    counted = slots._count_busy
    looks = [0]
    monkeypatch.setattr(slots, "_count_busy", lambda context: looks.pop() if looks else counted(context))
    err = Watched("hold 1 of 2", release.touch)
    assert len(run(called.place, stderr=err)) == 2
    thread.join()
    assert err.getvalue().count("2 ranks wait for slots: other jobs of this application hold 1 of 2") == 1


def test_slots_that_do_not_become_free_are_an_error(spark, run, monkeypatch):
    from engine.spark import slots

    monkeypatch.setattr(slots, "_count_busy", lambda context: 1)
    with pytest.raises(LaunchError, match=r"wait for slots since 0\.2 s: .* hold 1 of 2"):
        run(called.place, start_timeout=0.2)


def test_tasks_that_do_not_come_are_told_by_our_own_deadline(run, monkeypatch):
    """Slots are unknown with Spark Connect, so that this deadline decides."""
    from engine.spark import job

    monkeypatch.setattr(job, "check", lambda *_: None)
    with pytest.raises(LaunchError, match="0 of 3 tasks came within 1 s"):
        run(called.place, num_proc=3, start_timeout=1)


def test_a_job_is_not_taken_for_another_one_of_its_size(run, tmp_path, monkeypatch):
    """One thread's job has all slots; the other's tasks do not come, although as many run. Neither made the session."""
    from engine.spark import job

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run, called.waits_for, (str(tmp_path),))
        until(lambda: len([*tmp_path.glob("there.*")]) == 2, "both ranks of the first job are there")
        monkeypatch.setattr(job, "check", lambda *_: None)
        with pytest.raises(LaunchError, match="0 of 2 tasks came within 1 s"):
            run(called.place, start_timeout=1)
        Path(tmp_path, "go").touch()
        assert first.result() == [0, 1]


def test_where_the_driver_cannot_be_reached_the_first_cause_still_comes(run, monkeypatch):
    from engine.spark import job

    monkeypatch.setattr(job, "JobSpec", functools.partial(job.JobSpec))
    whole = job.JobSpec.func
    monkeypatch.setattr(job, "JobSpec", lambda **fields: whole(**{**fields, "addresses": ()}))
    err = io.StringIO()
    assert [found[0] for found in run(called.place, stderr=err)] == [0, 1]
    assert "the executors do not reach this process" in err.getvalue()
    with pytest.raises(JobError, match=r"(?s)^rank [01] on .*ValueError: rank 1 does not like it") as caught:
        run(called.raises_on, (1,))
    assert caught.value.rank in (0, 1)  # Spark reports one task alone: rank 0's report names rank 1's error, too


@pytest.mark.parametrize(("np", "size"), [(2, 2), (-2, 2)])
def test_horovod_runner_gives_what_rank_0_returned_and_shows_what_is_for_the_driver(spark, capsys, np, size):
    from engine.spark import HorovodRunner

    assert HorovodRunner(np).run(called.place, key=1)[:2] == (0, size)
    said = capsys.readouterr().out.splitlines()
    if np > 0:  # with ranks on the driver everything is shown
        assert sorted(said) == [f"[{rank}]<stdout>:{line}" for rank in range(2) for line in ("lines", "two")]


def test_what_cannot_be_is_refused_before_anything_starts(spark, run):
    spark.conf.set("spark.sql.execution.pyspark.udf.killOnIdleTimeout", "true")
    for idle, told in (("9", "9 s"), ("9s", "9s"), ("2min", "2min")):
        spark.conf.set("spark.sql.execution.pyspark.udf.idleTimeoutSeconds", idle)
        with pytest.raises(LaunchError, match=f"Spark kills Python tasks that are silent for {told}, as"):
            run(called.place)
    spark.conf.unset("spark.sql.execution.pyspark.udf.killOnIdleTimeout")
    spark.conf.unset("spark.sql.execution.pyspark.udf.idleTimeoutSeconds")
    with pytest.raises(LaunchError, match="num_proc is 0"):
        run(called.place, num_proc=0)
    with pytest.raises(TypeError, match="not a function"):
        run("called.place")
    with pytest.raises(TypeError, match="cannot pickle"):
        run(called.place, (threading.Lock(),))
