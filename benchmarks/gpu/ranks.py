"""Rank processes of a world for the parts, and the choice of GPUs for two ranks."""

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
"""First version of NCCL that supports several ranks on one GPU."""
LAST_LINES = 40
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}


class RankProcessError(RuntimeError):
    """Error of a rank that did not end normally."""


def allreduce(array: Any, output: Any, name: str | None = None, op: str = "sum", **more: Any) -> Any:
    """Submit an array of `driver.py` to the engine of this process, and return its handle.

    `prescale`, `postscale`, `blocking` and `wire` have the meaning of the native engine.
    """
    from engine.session import runtime

    given = {"prescale": 1.0, "postscale": 1.0, "blocking": False, "wire": None} | more
    return runtime.current_engine().allreduce(
        array, output, name, OPS[op], given["prescale"], given["postscale"], given["blocking"], given["wire"]
    )


def get_ordinal(rank: int, here: Mapping[str, Any]) -> int:
    """Return the device of a rank: its own if there are two."""
    return rank if len(here["cards"]) > 1 else 0


def find_placement(here: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return where two ranks can run, and the variables that they need; raise `Skipped` if they cannot run here."""
    if len(here["cards"]) > 1:
        return "on two GPUs", {}
    if here["nccl_version"] // 100 >= OLDEST_SHARING[0] * 100 + OLDEST_SHARING[1]:
        return "on one GPU", SHARED
    raise Skipped(f"two ranks need NCCL 2.30 or newer to share the one GPU that is here: NCCL is {here['nccl']}")


def list_worlds(
    here: Mapping[str, Any], sizes: Sequence[int], found: dict[str, Any]
) -> Iterator[tuple[int, str, dict[str, str]]]:
    """Yield the sizes of worlds that can run here, with the place of their ranks and the variables that they need.

    For a size that cannot run, `found` gets the reason.
    """
    for size in sizes:
        try:
            where, variables = ("", {}) if size == 1 else find_placement(here)
        except Skipped as error:
            found[str(size)] = {"skipped": str(error)}
        else:
            yield size, where, variables


class Ranks:
    """Rank processes of one world on this machine: `python -m module arguments`. They are killed at the block's end."""

    def __init__(
        self, module: str, size: int, arguments: Sequence[str] = (), variables: Mapping[str, str] | None = None
    ) -> None:
        job = secrets.token_hex(8)
        self.module = module
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env=os.environ | {"PYTHONFAULTHANDLER": "1"} | make_variables(job, rank, size) | dict(variables or {}),
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
        """Wait until all ranks have exited normally, or by SIGKILL if in `killed`.

        Raises `RankProcessError`, with the last lines of a rank, if one did not.
        """
        deadline = time.monotonic() + max(seconds, 1.0)
        for rank, process in enumerate(self.processes):
            try:
                said, _ = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                said = "\n".join(self._read_stacks())
                late = f"{self.module}: rank {rank} has not ended within {seconds:.0f} s"
                raise RankProcessError(f"{late}\n{said}") from None
            if process.returncode != (-signal.SIGKILL if rank in killed else 0):
                last = _get_tail(said)
                raise RankProcessError(f"{self.module}: rank {rank} ended with {process.returncode}\n{last}")

    def _read_stacks(self) -> list[str]:
        """Abort running ranks with SIGABRT, and return their last output, which has their threads' stacks."""
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
            told.append(f"rank {rank}: {_get_tail(said)}")
        return told


def _get_tail(said: str) -> str:
    """Return the last lines of a process's output."""
    return "\n".join(said.strip().splitlines()[-LAST_LINES:])


def make_variables(job: str, rank: int, size: int) -> dict[str, str]:
    """Return the variables of a rank of a world on this machine."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {name: str(value) for name, value in own.items()} | {"ENGINE_JOB": job}
