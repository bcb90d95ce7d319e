"""A worker for tests of the driver: it waits at the gate, meets others by files, and runs its script.

It has no engine: a world fails for its members when one of their processes is gone, and they share data by files in
the working directory.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from engine.elastic.events import Why
from engine.elastic.worker.gate import Assigned, Gate, JobOver
from engine.host import processes

from ..waiting import until

HERE = Path(os.environ["HERE"])


class CalledOff(Exception):
    """The world was cancelled."""


class Broken(Exception):
    """Another member is gone."""

    def __init__(self, culprit: int) -> None:
        super().__init__(f"worker {culprit} is gone")
        self.culprit = culprit


class Updated(Exception):
    """The members have to come to the gate."""


class Training:
    """State of a worker."""

    def __init__(self) -> None:
        self.gate = Gate.open(os.environ)
        self.commit: int | None = None  # newest commit of this worker: the number of steps that are done
        self.stopped = False  # whether the test wants the training to end
        self.told: Assigned | None = None
        signal.signal(signal.SIGTERM, lambda *_: self.gate.request_leave())

    @property
    def worker(self) -> int:
        return self.gate.worker

    @property
    def world(self) -> int:
        return 0 if self.told is None else self.told.place.world

    @property
    def rank(self) -> int:
        assert self.told is not None
        return self.told.place.rank

    @property
    def size(self) -> int:
        assert self.told is not None
        return self.told.place.size

    def run(self, body: Callable[[Training], None]) -> bool:
        """Run `body` in each world until it returns on all; return whether the training is complete."""
        why, text, culprit = Why.NEW, "", None
        while True:
            try:
                self.told = self.gate.wait(self.world, why, text, culprit, self.commit)
            except JobOver as over:
                print(f"worker {self.worker} is told: {over}", flush=True)
                return over.good
            write(HERE / f"pid.{self.worker}", str(os.getpid()))
            print(f"world {self.world} rank {self.rank} of {self.size}: {self.told.reason}", flush=True)
            try:
                self.meet("enter")
                self.gate.report_joined(self.world)
                self.sync()
                body(self)
                self.meet("end")
                self.gate.report_done(self.world)
                return True
            except CalledOff:
                why, text, culprit = Why.VOID, "", None
            except Updated:
                why, text, culprit = Why.HOSTS, "", None
            except Broken as error:
                why, text, culprit = Why.FAILURE, str(error), error.culprit

    def sync(self) -> None:
        """Take the newest commit of all members."""
        mine = HERE / f"commit.{self.world}.{self.rank}"
        write(mine, str(-1 if self.commit is None else self.commit))
        self.meet("sync")
        commits = [int((HERE / f"commit.{self.world}.{rank}").read_text()) for rank in range(self.size)]
        self.commit = max(0, *commits)

    def step(self) -> None:
        """Make a step with the others, and commit."""
        assert self.commit is not None
        self.meet(f"step{self.commit}")
        self.commit += 1
        self.gate.report_commit(self.world, self.commit)
        # All members see it at the same step, as with an allreduce.
        told = (self.gate.is_update_requested(self.world), (HERE / "stop").exists())
        write(HERE / f"told.{self.world}.{self.commit}.{self.rank}", "".join(str(int(each)) for each in told))
        self.meet(f"check{self.commit}")
        words = [(HERE / f"told.{self.world}.{self.commit}.{rank}").read_text() for rank in range(self.size)]
        self.stopped = any(word[1] == "1" for word in words)
        if any(word[0] == "1" for word in words):
            raise Updated

    def meet(self, where: str) -> None:
        """Wait until all members have come here."""
        (HERE / f"met.{self.world}.{where}.{self.rank}").touch()

        def met() -> bool:
            return all((HERE / f"met.{self.world}.{where}.{rank}").exists() for rank in range(self.size))

        self.until(met)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition as long as the world is complete."""
        assert self.told is not None
        members = self.told.members

        def look() -> bool:
            if condition():
                return True
            if self.gate.is_void(self.world):
                raise CalledOff
            for member in members:
                if member != self.worker and gone(member):
                    raise Broken(member)
            return False

        until(look, f"the other members of world {self.world}", pause=0.005)


def write(path: Path, text: str) -> None:
    """Write a file atomically."""
    draft = path.with_name(f".{path.name}")
    draft.write_text(text)
    draft.rename(path)


def gone(worker: int) -> bool:
    """Return whether the process of a worker that has been in a world has ended, or is stopped."""
    path = HERE / f"pid.{worker}"
    if not path.exists():
        return False
    process = processes.read_process(int(path.read_text()))
    return process is None or process.state in "TZ"
