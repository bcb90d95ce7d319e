"""Processes that are the ranks of a world, which parts start and end; and where two ranks can be."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from benchmarks.gpu.part import Skipped

OPS = {"sum": 0, "average": 1, "min": 2, "max": 3, "product": 4}
OLDEST_SHARING = (2, 30)
"""The first NCCL that takes several ranks on one GPU."""
LAST_LINES = 40
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}


class RankFailedError(RuntimeError):
    """A rank did not end as it should."""


def allreduce(array: Any, output: Any, name: str | None = None, op: str = "sum", **more: Any) -> Any:
    """Submit an array of `driver.py` to the engine of this process; its handle.

    `prescale`, `postscale`, `blocking` and `wire` are as for the native engine.
    """
    from engine import runtime

    given = {"prescale": 1.0, "postscale": 1.0, "blocking": False, "wire": None} | more
    return runtime.engine().allreduce(
        array, output, name, OPS[op], given["prescale"], given["postscale"], given["blocking"], given["wire"]
    )


def ordinal(rank: int, here: Mapping[str, Any]) -> int:
    """The device of a rank: one of its own, if there are two."""
    return rank if len(here["cards"]) > 1 else 0


def together(here: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Where two ranks can be, and what has to be in their environment.

    Raises
    ------
    Skipped
        Nowhere.
    """
    if len(here["cards"]) > 1:
        return "on two GPUs", {}
    if here["nccl_version"] // 100 >= OLDEST_SHARING[0] * 100 + OLDEST_SHARING[1]:
        return "on one GPU", SHARED
    raise Skipped(f"two ranks need NCCL 2.30 or newer to share the one GPU that is here: NCCL is {here['nccl']}")


def worlds(
    here: Mapping[str, Any], sizes: Sequence[int], found: dict[str, Any]
) -> Iterator[tuple[int, str, dict[str, str]]]:
    """Sizes of worlds that can be here, each with where its ranks are and what has to be in their environment.

    Of one that cannot be, `found` gets under its size why it is skipped.
    """
    for size in sizes:
        try:
            where, variables = ("", {}) if size == 1 else together(here)
        except Skipped as error:
            found[str(size)] = {"skipped": str(error)}
        else:
            yield size, where, variables


class Ranks:
    """Processes of one world on this machine: `python -m module arguments`. They end with the block."""

    def __init__(
        self, module: str, size: int, arguments: Sequence[str] = (), variables: Mapping[str, str] | None = None
    ) -> None:
        job = secrets.token_hex(8)
        self.module = module
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env=os.environ | {"PYTHONFAULTHANDLER": "1"} | world(job, rank, size) | dict(variables or {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(size)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=5)

    def end(self, seconds: float, killed: Sequence[int] = ()) -> None:
        """Wait until all have ended well; those that are `killed`, by that.

        Raises
        ------
        RankFailedError
            With the last lines of the rank that did not.
        """
        deadline = time.monotonic() + max(seconds, 1.0)
        for rank, process in enumerate(self.processes):
            try:
                said, _ = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                said = "\n".join(self._stacks())
                late = f"{self.module}: rank {rank} has not ended within {seconds:.0f} s"
                raise RankFailedError(f"{late}\n{said}") from None
            if process.returncode != (-signal.SIGKILL if rank in killed else 0):
                last = _tail(said)
                raise RankFailedError(f"{self.module}: rank {rank} ended with {process.returncode}\n{last}")

    def _stacks(self) -> list[str]:
        """What each rank that has not ended said at last, and where its threads are. It ends by that."""
        for process in self.processes:
            process.send_signal(signal.SIGABRT)  # PYTHONFAULTHANDLER
        told = []
        for rank, process in enumerate(self.processes):
            try:
                said, _ = process.communicate(timeout=3)
            except subprocess.TimeoutExpired:
                said = "it does not end by SIGABRT"
            except ValueError:  # its output was read before
                continue
            told.append(f"rank {rank}: {_tail(said)}")
        return told


def _tail(said: str) -> str:
    """The last lines of what a process said."""
    return "\n".join(said.strip().splitlines()[-LAST_LINES:])


def world(job: str, rank: int, size: int) -> dict[str, str]:
    """The environment of a rank of a world on this machine."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {name: str(value) for name, value in own.items()} | {"ENGINE_JOB": job}
