"""Elastic jobs of real processes, without worlds of the engine: the driver, its agents, and what they leave."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from ..launch.conftest import launcher as launcher
from ..launch.launch_jobs import Finished, Launcher
from ..waiting import until

PRELUDE = """
from tests.elastic.worker_program import *
from pathlib import Path
def touch(name): (HERE / name).touch()
def there(name): return (HERE / name).exists()
"""
UNTIL_STOP = "def body(t):\n    while not there('stop'): t.step()\n"


class Elastic:
    """Elastic jobs of one test."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.home = launcher.home

    def start(self, *options: object, body: str = UNTIL_STOP, after: str = "") -> subprocess.Popen[bytes]:
        """Start a job whose workers run `body(t)` in each world."""
        text = f"{PRELUDE}{body}\nt = Training()\nok = t.run(body)\n{after}\nsys.exit(0 if ok else 3)\n"
        (self.home / "train.py").write_text(text)
        return self.launcher.start(*options, "python", self.home / "train.py")

    def run(self, *options: object, body: str = UNTIL_STOP, after: str = "") -> Finished:
        return self.launcher.finish(self.start(*options, body=body, after=after))

    def finish(self, process: subprocess.Popen[bytes]) -> Finished:
        (self.home / "stop").touch()
        return self.launcher.finish(process)

    def pid(self, worker: int) -> int:
        """The process of a worker that has a place."""
        path = self.home / f"pid.{worker}"
        return int(until(lambda: path.exists() and path.read_text(), f"worker {worker} in a world"))

    def world(self, number: int, size: int) -> None:
        """Wait until a world has trained a step."""
        until(
            lambda: all(list(self.home.glob(f"met.{number}.check*.{rank}")) for rank in range(size)),
            f"world {number} of {size} ranks",
        )


@pytest.fixture
def job(launcher: Launcher) -> Elastic:
    return Elastic(launcher)


def worlds(done: Finished) -> list[str]:
    """What the launcher has said of worlds."""
    start = "enginerun: world "
    return [line.removeprefix(start) for line in done.err.splitlines() if line.startswith(start)]


def test_a_job_without_trouble_is_as_any_other(job):
    done = job.run("-np", 2, "--min-np", 1, body="def body(t):\n    for _ in range(3): t.step()\n")
    assert done.code == 0, done.err
    assert worlds(done) == ["1: 2 ranks"]
    assert done.lines(0) == ["world 1 rank 0 of 2: the job begins"]
    assert job.launcher.kept() == []


def test_a_killed_worker_is_replaced_and_the_others_go_on(job):
    """A survivor keeps its process, the newcomer has another number and the same slot."""
    process = job.start("-np", 2, "--min-np", 1)
    job.world(1, 2)
    survivor = job.pid(0)
    os.kill(job.pid(1), signal.SIGKILL)
    job.world(3, 2)
    assert job.pid(0) == survivor
    done = job.finish(process)
    assert done.code == 0, done.err
    assert worlds(done) == [
        "1: 2 ranks",
        "2: 1 rank, because rank 1 (worker 1 on localhost) was killed by SIGKILL",
        "3: 2 ranks, because there are newcomers",
    ]
    assert done.lines(1)[-1].startswith("world 3 rank 1 of 2")
    assert "enginerun: the job had 2 resets" in done.err
