"""`elastic.run` in real processes at the gate of a scripted driver."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ..waiting import until
from .fake_driver import FakeDriver

PROGRAM = "tests.elastic.run_program"
STEPS = 60


class Workers:
    """Workers of a scripted driver, by number."""

    def __init__(self, driver: FakeDriver, directory: Path) -> None:
        self.driver = driver
        self.directory = directory
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def start(self, task: str, workers: Sequence[int], size: int, *more: str) -> None:
        """Start workers, which plan with a world of this size, and wait until they are at the gate."""
        for worker in workers:
            place = {"RANK": worker % size, "SIZE": size, "LOCAL_RANK": worker % size, "LOCAL_SIZE": size}
            environment = os.environ | self.driver.environment(worker) | {"RUN_TEST": str(self.directory)}
            environment |= {f"ENGINE_{name}": str(value) for name, value in place.items()}
            environment |= {"ENGINE_JOB": f"run-{os.getpid()}-{self.directory.name}", "TMPDIR": str(self.directory)}
            self.processes[worker] = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, task, *more],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        for worker in workers:
            self.driver.wait_for("ready", worker)

    def begin(self, world: int, workers: Sequence[int]) -> None:
        """Let workers form a world."""
        self.driver.place(world, workers)
        for worker in workers:
            until(lambda worker=worker: self._joined(worker, world), f"worker {worker} in world {world}")

    def _joined(self, worker: int, world: int) -> bool:
        return any(
            number == worker and said["kind"] == "joined" and said["world"] == world
            for number, said in self.driver.heard
        )

    def half(self, workers: Sequence[int]) -> None:
        """Wait until workers are in the middle of their task."""
        for worker in workers:
            until((self.directory / f"half.{worker}").exists, f"the middle of worker {worker}")

    def recorded(self) -> list[str]:
        """Return the worlds that have records in a temporary directory."""
        return sorted(path.name for path in self.directory.glob("engine-records-*/world.*"))

    def let_go(self) -> None:
        """Let all workers go on."""
        (self.directory / "go").touch()

    def end(self, worker: int, code: int = 0) -> tuple[list[str], str]:
        """Wait for a worker's end, and return the words that it printed and its stderr."""
        process = self.processes.pop(worker)
        out, err = process.communicate(timeout=60)
        assert process.returncode == code, err
        return out.split(), err


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    with FakeDriver() as driver:
        made = Workers(driver, tmp_path)
        try:
            yield made
        finally:
            for process in made.processes.values():
                process.kill()
                process.communicate()


def test_survivors_go_on_from_the_commit_and_a_newcomer_joins_them(workers: Workers) -> None:
    workers.start("steps", range(3), 3)
    workers.begin(1, [0, 1, 2])
    workers.half([0, 1, 2])
    workers.processes[0].kill()
    workers.let_go()
    for worker in (1, 2):
        ready = workers.driver.wait_for("ready", worker, 2)
        assert (ready["why"], ready["world"], ready["culprit"], ready["commit"]) == ("FAILURE", 1, 0, 4)
    workers.start("steps", [3], 3)
    workers.begin(2, [2, 3])  # without worker 1: nothing depends on the identity of workers
    assert workers.recorded() == ["world.1"] * 2
    workers.driver.tell(1, "end", why="there is no place for it", good=False, over=False)
    assert workers.end(1)[0] == []
    for rank, worker in enumerate((2, 3)):
        words, err = workers.end(worker)
        # 20 steps of three ranks are committed, and 40 steps of two ranks follow
        assert words[:7] == ["result", str(STEPS), "140.0", str(rank), "2", str(rank), "2"], err
        assert words[7:] == ["2"]  # reset callbacks of the survivor, and of a newcomer that planned with three ranks
    assert workers.driver.wait_for("done", 3)["world"] == 2
    assert not [*workers.directory.glob("engine-records-*")]


def test_a_change_of_hosts_loses_nothing(workers: Workers) -> None:
    workers.start("steps", [0, 1], 2)
    workers.begin(1, [0, 1])
    workers.half([0, 1])
    workers.start("steps", [2], 3)
    for worker in (0, 1):
        workers.driver.tell(worker, "update", world=1)
    workers.let_go()
    for worker in (0, 1):
        ready = workers.driver.wait_for("ready", worker, 2)
        assert (ready["why"], ready["commit"]) == ("HOSTS", 6)  # the commit of step 25, and one at the interrupt
    workers.begin(2, [0, 1, 2])
    for worker in (0, 1, 2):
        assert workers.end(worker)[0][1:3] == [str(STEPS), str(25 * 2.0 + 35 * 3)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("task", "needs"),
    [
        ("other_exception", "numpy"),
        ("swallowed", "numpy"),
        ("from_a_loader", "torch"),
        pytest.param("py_function", "tensorflow", marks=pytest.mark.slow),
        pytest.param("numpy_function", "tensorflow", marks=pytest.mark.slow),
    ],
)
def test_what_the_program_makes_of_a_failure_does_not_matter(workers: Workers, task: str, needs: str) -> None:
    """The engine is asked what happened, whatever type the exception has."""
    pytest.importorskip(needs)
    workers.start(task, [0, 1], 2)
    workers.begin(1, [0, 1])
    workers.half([0, 1])
    workers.processes[1].kill()
    workers.let_go()
    ready = workers.driver.wait_for("ready", 0, 2)
    assert ready["why"] == "FAILURE" and "rank 1 died" in ready["text"]
    workers.begin(2, [0])
    assert workers.end(0)[0][:3] == ["result", str(STEPS), "80.0"]


def test_an_error_of_the_program_in_a_healthy_world_ends_the_worker(workers: Workers) -> None:
    workers.start("program_error", [0, 1], 2)
    workers.begin(1, [0, 1])
    _, err = workers.end(1, 1)
    assert "ValueError: batch 7 is bad" in err and workers.recorded()
    ready = workers.driver.wait_for("ready", 0, 2)
    assert ready["culprit"] == 1 and "batch 7 is bad" in ready["text"]


def test_a_job_has_one_training(workers: Workers) -> None:
    """A second call, or a nested one, is refused at once, because the driver could not interpret it."""
    workers.start("nested", [0], 1, "twice")
    workers.begin(1, [0])
    words, err = workers.end(0, 1)
    assert words[1].startswith("elastic.run_was_called_again,_and_the_first_call_runs:")
    assert "ConfigError: elastic.run was called again, and the first call is complete:" in err


@pytest.mark.parametrize("passed", [True, False])
def test_one_decision_ends_the_training(workers: Workers, passed: bool) -> None:
    """A rank that returned before another died trains on with the others, or is done if they are."""
    workers.start("ends_late", [0, 1], 2)
    workers.begin(1, [0, 1])
    workers.half([1])
    workers.processes[1].kill()
    assert workers.driver.wait_for("ready", 0, 2)["commit"] == 3
    if passed:
        workers.driver.tell(0, "end", why="the training is complete", good=True)
        assert workers.end(0)[0][:3] == ["result", "5", "10.0"]  # the trained state, not the committed one
        return
    workers.start("ends_late", [2], 2)
    workers.begin(2, [0, 2])
    for worker in (0, 2):
        assert workers.end(worker)[0][:3] == ["result", "5", "10.0"]


def test_who_comes_when_all_is_done_ends_well(workers: Workers) -> None:
    workers.start("steps", [0], 1)
    workers.driver.tell(0, "end", why="the training is complete", good=True)
    words, _ = workers.end(0)
    assert words == []


def test_the_end_of_the_job_is_an_exception_with_the_state_as_it_was_committed(workers: Workers) -> None:
    workers.start("steps", [0, 1], 2)
    workers.begin(1, [0, 1])
    workers.half([0, 1])
    workers.processes[1].kill()
    workers.let_go()
    workers.driver.wait_for("ready", 0, 2)
    workers.driver.tell(0, "end", why="no-workers", good=False)
    assert workers.end(0, 7)[0] == ["over", "False", "no-workers", "20"]


def test_sigterm_lets_a_worker_leave_in_good_order(workers: Workers) -> None:
    workers.start("endless", [0, 1], 2)
    workers.begin(1, [0, 1])
    workers.half([0, 1])
    workers.processes[1].send_signal(signal.SIGTERM)
    workers.driver.wait_for("leaving", 1)
    for worker in (0, 1):
        workers.driver.tell(worker, "update", world=1)
    commits = {workers.driver.wait_for("ready", worker, 2)["commit"] for worker in (0, 1)}
    assert len(commits) == 1
    workers.driver.tell(1, "end", why="it has left", good=False, over=False)
    assert workers.end(1)[0] == []


def test_a_forked_child_has_a_worker_s_sigterm_for_itself(workers: Workers) -> None:
    workers.start("forks", [0], 1)
    workers.begin(1, [0])
    assert workers.end(0)[0][:2] == ["result", str(-signal.SIGTERM)]
    assert "leaving" not in {said["kind"] for _, said in workers.driver.heard}


def test_sigterm_with_an_unread_message_is_a_wish_to_leave(workers: Workers) -> None:
    """An unread message of the agent must not be taken for a hang-up."""
    workers.start("steps", [0, 1], 2)
    workers.begin(1, [0, 1])
    workers.half([0, 1])
    for worker in (0, 1):
        workers.driver.tell(worker, "update", world=1)
    workers.processes[1].send_signal(signal.SIGTERM)
    workers.let_go()
    workers.driver.wait_for("leaving", 1)
    assert {workers.driver.wait_for("ready", worker, 2)["why"] for worker in (0, 1)} == {"HOSTS"}
    workers.driver.tell(1, "end", why="it has left", good=False, over=False)
    assert workers.end(1)[0] == []


@pytest.mark.parametrize("unread", [False, True])
def test_sigterm_ends_a_worker_that_the_agent_has_given_up(workers: Workers, unread: bool) -> None:
    workers.start("steps", [0, 1], 2)
    workers.begin(1, [0, 1])
    workers.half([0, 1])
    if unread:
        workers.driver.tell(1, "update", world=1)
    workers.driver.vanish()
    workers.processes[1].send_signal(signal.SIGTERM)
    workers.end(1, -signal.SIGTERM)


def test_the_hub_listens_anew_after_its_world_was_called_off(tmp_path: Path) -> None:
    """The socket of a cancelled world on several hosts is closed, and the next world meets at another."""
    with FakeDriver(several=True) as driver:
        workers = Workers(driver, tmp_path)
        workers.let_go()
        try:
            workers.start("steps", [0, 1], 2)
            first = driver.wait_for("ready", 0)["port"]
            driver.place(1, [0, 7], {0: "a", 7: "b"}, hub=f"127.0.0.1:{first}")  # there is no worker 7
            driver.tell(0, "void", world=1)
            again = driver.wait_for("ready", 0, 2)
            assert again["why"] == "VOID"
            if again["port"] != first:
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", first), 5)
            driver.place(2, [0, 1], {0: "a", 1: "b"}, hub=f"127.0.0.1:{again['port']}")
            for worker in (0, 1):
                assert workers.end(worker)[0][:3] == ["result", str(STEPS), "120.0"]
        finally:
            for process in workers.processes.values():
                process.kill()
                process.communicate()


def test_outside_an_elastic_job_the_function_is_called_once(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ENGINE_")}
    done = subprocess.run(
        [sys.executable, "-m", PROGRAM, "steps"],
        env=environment | {"RUN_TEST": str(tmp_path), "ENGINE_RANK": "0", "ENGINE_SIZE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["result", "60", "60.0", "0", "1", "0", "1"], done.stderr
