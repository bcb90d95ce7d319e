"""Jobs of real processes, for tests of the launcher."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import uuid
from dataclasses import dataclass
from pathlib import Path

import engine

from ..waiting import MARK, marked, until, until_files

DEADLINE = 100.0
SETTINGS = ("ENGINE_", "HOROVOD_", "OMP_", "PYTHONUNBUFFERED", "NO_COLOR")


@dataclass
class Finished:
    """Result of a job: exit code and output."""

    code: int
    out: str
    err: str

    def lines(self, rank: int, name: str = "stdout") -> list[str]:
        """Lines of one rank's stream that the launcher showed."""
        tag = f"[{rank}]<{name}>:"
        text = self.out if name == "stdout" else self.err
        return [line.removeprefix(tag) for line in text.split("\n") if line.startswith(tag)]

    @property
    def failure(self) -> list[str]:
        """Last part of the report: the first failure."""
        lines = self.err.rstrip("\n").split("\n")
        starts = [index for index, line in enumerate(lines) if line.startswith("enginerun: first failure:")]
        assert len(starts) == 1, self.err
        return lines[starts[0] :]


class Launcher:
    """Starts jobs for one test."""

    command = (sys.executable, "-m", "engine.launch")

    def __init__(self, home: Path) -> None:
        self.home = home
        self.temporary = home / "tmp"
        self.temporary.mkdir()
        self.mark = uuid.uuid4().hex
        root = str(Path(engine.__file__).parents[1])
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)},
            "PYTHONPATH": root,
            "TMPDIR": str(self.temporary),
            "HERE": str(home),
            MARK: self.mark,
        }
        self.started: list[subprocess.Popen[bytes]] = []

    def script(self, text: str, name: str = "rank.py") -> str:
        """Write a rank's program, which can use `rank`, `here`, `touch`, `linger`, `until` and `wait_for`."""
        prelude = """
            import os, pathlib, signal, subprocess, sys, time
            rank = int(os.environ["RANK"]); size = int(os.environ["WORLD_SIZE"])
            here = pathlib.Path(os.environ["HERE"])
            def touch(name): (here / name).touch()
            def linger(): time.sleep(600)
            def until(condition):
                end = time.monotonic() + 60
                while not condition():
                    if time.monotonic() > end: sys.exit(99)
                    time.sleep(0.002)
            def wait_for(*names): until(lambda: all((here / name).exists() for name in names))
        """
        path = self.home / name
        path.write_text(textwrap.dedent(prelude) + textwrap.dedent(text))
        return str(path)

    def start(self, *arguments: object, python: str = "", **options: object) -> subprocess.Popen[bytes]:
        """Start `enginerun`; with `python`, its ranks run that code."""
        command = [*self.command, *map(str, arguments)]
        if python:
            command += [sys.executable, self.script(python)]
        return self.start_command(command, **options)

    def start_command(self, command: list[str], **options: object) -> subprocess.Popen[bytes]:
        """Start a command that runs a job."""
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        settings = {"env": self.environment, "cwd": self.home, **streams, **options}
        process = subprocess.Popen(command, **settings)  # type: ignore[call-overload]
        self.started.append(process)
        return process

    def finish(self, process: subprocess.Popen[bytes]) -> Finished:
        """Wait for a job."""
        out, err = process.communicate(timeout=DEADLINE)
        out, err = (data or b"" for data in (out, err))  # None where the stream goes to a file
        return Finished(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))

    def run(self, *arguments: object, python: str = "") -> Finished:
        """Start a job and wait for it."""
        return self.finish(self.start(*arguments, python=python))

    def wait_for(self, *names: str) -> None:
        """Wait until ranks have touched files."""
        until_files(*(self.home / name for name in names))

    def nothing_left(self) -> None:
        """Check that no process of the test is left."""
        until(lambda: not marked(self.mark), "no process left")

    def kept(self) -> list[Path]:
        """Temporary directories that still exist."""
        return sorted(self.temporary.iterdir())
