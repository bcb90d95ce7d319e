"""A job to be watched, and the environment of programs that watch it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import engine

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("ENGINE_", "COLUMNS"))} | {
    "PYTHONPATH": os.pathsep.join([str(Path(engine.__file__).parents[1]), str(ROOT)])
}


class FakeJob:
    """A stand-in for a launcher (fake_job.py)."""

    def __init__(self, size: int, name: str) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.metrics.fake_job", str(size), name],
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.ranks = [int(pid) for pid in self.process.stdout.readline().split()]

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, *words: object) -> None:
        """Send a command, and wait until it is done."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(*words, file=self.process.stdin, flush=True)
        self.process.stdout.readline()
