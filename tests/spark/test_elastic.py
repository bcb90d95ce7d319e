"""`engine.spark.run_elastic`: killed ranks, tasks and executors, admission of hosts, and refusals."""

from __future__ import annotations

import errno
import io
import os
import signal
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import pytest

from engine.host import private_files
from engine.launch import JobError, LaunchError
from engine.spark import run_elastic, slots
from engine.spark.task_channel import BEGIN, reach_driver
from engine.spark.task_registry import HOSTS, MOST, SOCKET, TaskRegistry

from ..waiting import until
from . import called
from .sessions import Spark
from .test_cluster import executor_of
from .test_run import gone

SUMS = [float(sum(range(12 * step, 12 * step + 12))) for step in range(20)]
AGAIN = 200.0  # seconds until a world after the loss of a host: its lease, and a new executor, on a busy machine

pytestmark = pytest.mark.timeout(300)  # the first test of a session starts a JVM, and Spark in it


@pytest.fixture(scope="module")
def spark(application: Spark) -> Any:
    return application.session("local-cluster[2,1,1024]", {"spark.speculation": "true"})


class Worlds:
    """Worlds so far, as the ranks have recorded them."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.newest = 0
        self.pids: set[int] = set()

    def next(self) -> list[tuple[int, int, int]]:
        """Wait for a world of two ranks after the last one; return the process IDs of each rank, agent and task."""

        def found() -> list[list[int]] | None:
            numbers = sorted({int(path.name.split(".")[1]) for path in self.home.glob("world.*")}, reverse=True)
            for number in numbers:
                paths = [self.home / f"world.{number}.{rank}" for rank in range(2)]
                if number > self.newest and all(path.exists() for path in paths):
                    told = [[int(word) for word in path.read_text().split()] for path in paths]
                    if [each[0] for each in told] == [2, 2] and not any(gone(each[1]) for each in told):
                        self.newest = number
                        return told
            return None

        told = until(found, f"a world of two ranks after world {self.newest}", AGAIN, 0.05)
        self.pids |= {pid for each in told for pid in each[1:3]}
        return [(each[1], each[2], each[3]) for each in told]


def disturbed(home: Path, kills: Any, **options: Any) -> tuple[list[Any], str]:
    """Run a job while `kills` acts on its worlds; return the job's result, and the launcher's output."""
    worlds, problems = Worlds(home), []

    def work() -> None:
        try:
            kills(worlds)
        except BaseException as error:  # raised in the test's thread
            problems.append(error)
        (home / "go").touch()

    thread = threading.Thread(target=work)
    thread.start()
    out, err = io.StringIO(), io.StringIO()
    results = run_elastic(
        called.sums, (str(home), len(SUMS), True), num_proc=2, min_np=1, stdout=out, stderr=err, **options
    )
    thread.join()
    assert not problems, f"{problems}\n{err.getvalue()}"
    until(lambda: all(map(gone, worlds.pids)), f"{worlds.pids} are gone", 30)
    return results, err.getvalue()


def test_ranks_and_tasks_are_killed_and_the_result_is_that_of_an_undisturbed_run(spark, tmp_path):
    """A rank is killed with speculation on, then the Python process of a task, which Spark restarts."""

    def kills(worlds: Worlds) -> None:
        os.kill(worlds.next()[1][0], signal.SIGKILL)
        os.kill(worlds.next()[1][2], signal.SIGKILL)
        worlds.next()

    results, said = disturbed(tmp_path, kills)
    assert results == [(rank, 2, SUMS) for rank in range(2)]
    assert "task0.1@127.0.0.1" in said and "was killed by SIGKILL" in said and "was lost" in said


@pytest.mark.slow
def test_agents_and_executors_are_killed_and_the_result_is_that_of_an_undisturbed_run(spark, tmp_path):
    """An agent is killed, which its task restarts, and then an executor, which Spark replaces."""
    until(lambda: slots._count_slots(spark.sparkContext) == 2, "both executors are there")

    def kills(worlds: Worlds) -> None:
        os.kill(worlds.next()[1][1], signal.SIGKILL)
        os.kill(executor_of(worlds.next()[1][2]), signal.SIGKILL)
        worlds.next()

    results, said = disturbed(tmp_path, kills)
    assert results == [(rank, 2, SUMS) for rank in range(2)]
    assert said.count("was lost") == 2
    until(lambda: slots._count_slots(spark.sparkContext) == 2, "both executors are there again")


def test_an_exception_of_the_program_ends_the_job_with_its_traceback(spark):
    """Such a job has the properties of the calling thread, such as its group."""
    quiet = {"stdout": io.StringIO(), "stderr": io.StringIO()}
    spark.sparkContext.setJobGroup("mine", "a job of ours")
    with pytest.raises(JobError, match=r"(?s)first failure: .*ValueError: rank 1 does not like it"):
        run_elastic(called.ends_badly, (1,), num_proc=2, **quiet)
    assert len(spark.sparkContext.statusTracker().getJobIdsForGroup("mine")) == 1
    spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)


def test_what_cannot_be_is_refused_before_anything_starts(spark):
    with pytest.raises(LaunchError, match="num_proc is 2; it must lie between min_num_proc, 1, and max_num_proc, 1"):
        run_elastic(called.sums, num_proc=2, min_np=1, max_np=1)
    with pytest.raises(LaunchError, match="5 ranks need as many slots at once, and Spark has 2"):
        run_elastic(called.sums, num_proc=6, min_np=5)
    remote = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
    with pytest.raises(LaunchError, match=r"a session of Spark Connect has neither: .*engine.spark.run"):
        run_elastic(called.sums, num_proc=2, spark=remote)


def test_who_comes_and_is_gone_at_once_disturbs_nobody(tmp_path, monkeypatch):
    """Port scanners do that: more than the limit of unauthenticated connections come, and each is reset."""
    problems: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", problems.append)
    with TaskRegistry(1, "secret", "127.0.0.1", tmp_path) as offered:
        address = ("127.0.0.1", offered.port)
        for _ in range(2 * MOST):
            with socket.create_connection(address) as stranger:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        until(lambda: (tried := reach_driver([address], "secret", 0)) and not tried.close(), "a task is let in")
    assert problems == []


def test_hosts_that_cannot_be_written_are_written_with_the_next_change(tmp_path, monkeypatch, caplog):
    """A full disk costs no task its place, and is said."""

    def write_nothing(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def offers(number: int) -> Any:
        channel = reach_driver([("127.0.0.1", offered.port)], "secret", number)
        assert channel is not None
        channel.send("host", attempt=0, pid=os.getpid())
        return channel

    with TaskRegistry(2, "secret", "127.0.0.1", tmp_path) as offered:
        with monkeypatch.context() as full:
            full.setattr(private_files, "replace", write_nothing)
            first = offers(0)
            until(lambda: "No space left on device" in caplog.text, "a warning")
        assert (tmp_path / HOSTS).read_text() == "" and offered.came == 1
        second = offers(1)
        until(lambda: len((tmp_path / HOSTS).read_text().split()) == 2, "both tasks are hosts")
        first.close()
        second.close()


def test_one_attempt_of_a_task_is_a_host_at_a_time_and_another_is_a_host_of_another_name(tmp_path):
    """The second attempt waits, under speculation, until the first has gone; carriers get each attempt once."""

    def hosts() -> list[str]:
        return (tmp_path / HOSTS).read_text().split()

    def offers(attempt: int) -> Any:
        channel = reach_driver([("127.0.0.1", offered.port)], "secret", 1)
        assert channel is not None
        channel.send("host", attempt=attempt, pid=os.getpid())
        os.set_blocking(channel.reading, True)
        return channel

    def asks(name: str) -> tuple[socket.socket, list[int]]:
        carrier = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        carrier.connect(str(tmp_path / SOCKET))
        carrier.sendall(f"{name}\n".encode())
        return carrier, socket.recv_fds(carrier, 1, 1)[1]

    with TaskRegistry(2, "secret", "127.0.0.1", tmp_path) as offered:
        assert reach_driver([("127.0.0.1", offered.port)], "another", 1) is None
        assert hosts() == []
        first = offers(0)
        until(lambda: hosts() == ["[task1.1@127.0.0.1]:1"], "the first attempt is a host")
        second = offers(1)
        carrier, given = asks("task1.1@127.0.0.1")
        assert len(given) == 1 and os.read(first.reading, 1) == BEGIN
        os.close(given[0])
        assert asks("task1.1@127.0.0.1")[1] == [] and asks("task0.1@127.0.0.1")[1] == []
        assert hosts() == ["[task1.1@127.0.0.1]:1"]
        carrier.close()  # the launcher has dropped the host: its task learns of that
        until(lambda: os.read(first.reading, 1) == b"", "the first attempt is let go")
        until(lambda: hosts() == ["[task1.2@127.0.0.1]:1"], "the second attempt is a host")
        first.close()
    until(lambda: os.read(second.reading, 1) == b"", "nobody is kept at the end")
    second.close()
