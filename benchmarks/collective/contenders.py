"""Uniform access to the contenders: the engine, its baselines, and the limits of the machine."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import IO, Any

from benchmarks.collective.backends import BACKENDS
from benchmarks.common import native
from benchmarks.common.processes import Group, Launcher, RankError, get_build_variables

LAUNCHERS: dict[str, Launcher] = {
    "engine": "engine",
    "compression": "engine",
    "gloo": "plain",
    "mpi": "mpi",
    "mpich": "mpich",
    "impi": "impi",
    "sockets": "plain",
    "engine-sets": "engine",
    "gloo-sets": "plain",
    "mpi-sets": "mpi",
}
DEFAULTS = ("limits", "engine", "gloo", "mpi")
NAMES = (*DEFAULTS, "mpich", "impi")
BEFORE = "before"
"""Name of the engine of another build."""


class Contender(ABC):
    """Ranks that stay alive between blocks."""

    name: str
    cases: tuple[str, ...]

    @abstractmethod
    def time_first_call(self, case: str, nbytes: int) -> float:
        """Return the seconds of the first call at this size, whose result is checked in full."""

    @abstractmethod
    def time_block(self, case: str, nbytes: int, warmup: int, iterations: int) -> list[float]:
        """Return the seconds of each iteration: the maximum over the ranks."""

    @abstractmethod
    def close(self) -> None:
        """End the ranks."""


class GroupContender(Contender):
    """Contender with the engine, gloo or MPI. Processors are divided as among `crowd` ranks; 0: the number of ranks.

    `place` is the directory in which another build of the engine is installed, for the contender `BEFORE`.
    """

    def __init__(
        self, name: str, ranks: int, largest: int, processors: Sequence[int], crowd: int = 0, place: str = ""
    ) -> None:
        self.name = name
        backend = "engine" if name == BEFORE else name
        self.cases = BACKENDS[backend].cases if name != BEFORE else ("private", "shared")
        arguments = ["--contender", backend, "--largest", str(largest), "--crowd", str(crowd or ranks)]
        module, variables = "benchmarks.collective.worker", get_build_variables(place) if place else None
        self.group = Group(name, ranks, module, arguments, LAUNCHERS[backend], processors, variables)

    def time_first_call(self, case: str, nbytes: int) -> float:
        return max(float(seconds) for seconds in self.group.ask_ranks({"do": "first", "case": case, "bytes": nbytes}))

    def time_block(self, case: str, nbytes: int, warmup: int, iterations: int) -> list[float]:
        request = {"do": "block", "case": case, "bytes": nbytes, "warmup": warmup, "iterations": iterations}
        return [max(ranks) for ranks in zip(*self.group.ask_ranks(request), strict=True)]

    def close(self) -> None:
        self.group.close()


class MachineLimits(Contender):
    """Limits of the machine, measured by `common/limits.c`."""

    name = "limits"
    cases = ("memcpy", "private_cached", "private_streaming", "in_segment")
    LIMIT = 120.0

    def __init__(self, ranks: int, largest: int, processors: Sequence[int]) -> None:
        command = [str(native.compile_source("limits.c")), "-n", str(ranks), "-m", str(largest)]
        if ranks <= len(processors):
            command += ["-b", ",".join(map(str, processors[:ranks]))]
        command.append("-")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )

    def time_first_call(self, case: str, nbytes: int) -> float:
        return self.time_block(case, nbytes, 0, 1)[0]

    def time_block(self, case: str, nbytes: int, warmup: int, iterations: int) -> list[float]:
        to, back, errors = self._get_pipes()
        try:
            to.write(f"{case} {nbytes} {warmup} {iterations}\n".encode())
            to.flush()
        except BrokenPipeError:
            raise RankError(f"limits has ended: {errors.read().decode()}") from None
        if not select.select([back], [], [], self.LIMIT)[0]:
            raise RankError(f"limits: {case} of {nbytes} bytes took over {self.LIMIT:.0f} s")
        line = back.readline()
        if not line:
            raise RankError(f"limits ended in {case} of {nbytes} bytes: {errors.read().decode()}")
        answer: dict[str, Any] = json.loads(line)
        return [float(seconds) for seconds in answer["seconds"]]

    def close(self) -> None:
        to, back, errors = self._get_pipes()
        with contextlib.suppress(BrokenPipeError):
            to.close()
        try:
            self._process.wait(3.0)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its other ranks die with it
            self._process.wait()
        back.close()
        errors.close()

    def _get_pipes(self) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        return self._process.stdin, self._process.stdout, self._process.stderr


@contextlib.contextmanager
def start_contenders(
    names: Sequence[str], ranks: int, largest: int, processors: Sequence[int], against: str = ""
) -> Iterator[list[Contender]]:
    """Start the named contenders, and the build `against` if given, and always end them all."""
    with contextlib.ExitStack() as stack:
        contenders: list[Contender] = []
        for name in (*names, BEFORE) if against else names:
            contender: Contender
            if name == "limits":
                contender = MachineLimits(ranks, largest, processors)
            else:
                contender = GroupContender(name, ranks, largest, processors, place=against if name == BEFORE else "")
            stack.callback(contender.close)
            contenders.append(contender)
        yield contenders
