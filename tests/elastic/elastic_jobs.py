"""Elastic jobs of real processes, for tests of the launcher."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ..launch.launch_jobs import Finished, Launcher
from ..waiting import until

PRELUDE = """
import os, signal, sys
from tests.elastic.worker_program import HERE, Training
def touch(name): (HERE / name).touch()
def there(name): return (HERE / name).exists()
"""
UNTIL_STOP = "def body(t):\n    while not t.stopped: t.step()\n"


class Elastic:
    """Elastic jobs of one test."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.home = launcher.home

    def start(self, *options: object, body: str = UNTIL_STOP, after: str = "") -> subprocess.Popen[bytes]:
        """Start a job whose workers run `body(t)` in each world."""
        program = self.program(body, after)
        return self.start_command([*self.launcher.command, *map(str, options), sys.executable, str(program)])

    def program(self, body: str = UNTIL_STOP, after: str = "") -> Path:
        """Write the program of such a job, and return its path."""
        text = f"{PRELUDE}{body}\nt = Training()\nok = t.run(body)\n{after}\nsys.exit(0 if ok else 3)\n"
        path = self.home / "train.py"
        path.write_text(text)
        return path

    def start_command(self, command: list[str]) -> subprocess.Popen[bytes]:
        """Start a job by the given command."""
        self.errors = self.home / "errors"
        with self.errors.open("wb") as errors:
            return self.launcher.start_command(command, stderr=errors)

    def run(self, *options: object, body: str = UNTIL_STOP, after: str = "") -> Finished:
        return self.wait(self.start(*options, body=body, after=after))

    def wait(self, process: subprocess.Popen[bytes]) -> Finished:
        """Wait for the end of a job, and return its result."""
        done = self.launcher.finish(process)
        done.err = self.errors.read_text()
        return done

    def commits(self, world: int) -> None:
        """Wait until a world has committed, and the driver has most likely received the commit."""
        until(lambda: len(list(self.home.glob(f"met.{world}.check*.0"))) > 2, f"commits in world {world}")

    def said(self) -> str:
        """Return the launcher's output so far."""
        return self.errors.read_text()

    def finish(self, process: subprocess.Popen[bytes]) -> Finished:
        (self.home / "stop").touch()
        return self.wait(process)

    def pid(self, worker: int) -> int:
        """Return the pid of the worker that has a place."""
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
    """Return the lines that the launcher printed about worlds."""
    start = "enginerun: world "
    return [line.removeprefix(start) for line in done.err.splitlines() if line.startswith(start)]
