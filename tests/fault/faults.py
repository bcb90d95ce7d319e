"""Helpers for tests of failures: acting on ranks, and checking that all ranks were told."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..ranks import Finished, Job
from ..waiting import until

WITHIN = 2.0  # seconds within which every rank must be told


class LateError(AssertionError):
    """An event with a deadline came, but late: conftest.py repeats a test that raises this."""


def soon(seconds: float, limit: float, about: object = "") -> None:
    """Raise a `LateError` unless something took less than `limit` seconds: the machine may have been stopped."""
    if seconds >= limit:
        raise LateError(f"took {seconds:.2f} s, not less than {limit:g} s: {about}")


def abstract_sockets() -> set[str]:
    """Return the names of the engine's sockets on this machine, including those of other jobs."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {line.split()[-1] for line in lines if "@engine-" in line}


def ready(job: Job, *ranks: int) -> None:
    """Wait until ranks are where the program says they are ready."""
    job.wait_for(*(f"ready.{rank}" for rank in ranks or range(job.size)))


def send(job: Job, rank: int, signum: int) -> float:
    """Signal a rank; return the time, on the monotonic clock that all processes of a machine share."""
    at = time.monotonic()
    os.kill(job.pid(rank), signum)
    return at


def state(job: Job, rank: int) -> str:
    """Return the state of a rank's process, as one letter of ps."""
    return Path(f"/proc/{job.pid(rank)}/stat").read_text().rpartition(") ")[2][0]


def stop(job: Job, rank: int) -> float:
    """Stop a rank with all its threads; return the time."""
    at = send(job, rank, signal.SIGSTOP)
    until(lambda: state(job, rank) == "T", f"rank {rank} stopped")
    return at


def runs_engine_code(job: Job, rank: int, main: bool) -> bool:
    """Return whether a stopped rank's main thread, or another one, was in the native engine, not in the kernel."""
    process = Path(f"/proc/{job.pid(rank)}")
    counters = []
    for task in process.glob("task/*/syscall"):
        words = task.read_text().split()
        if words[0] == "-1" and main == (task.parent.name == process.name):
            counters.append(int(words[-1], 16))
    for line in process.joinpath("maps").read_text().splitlines():
        low, _, high = line.split()[0].partition("-")
        if "/engine_ext/" in line and any(int(low, 16) <= counter < int(high, 16) for counter in counters):
            return True
    return False


def request_records(job: Job, ranks: Iterable[int]) -> None:
    """Have ranks write their flight records anew, as a user asks for them."""
    paths = [job.output / f"rank.{rank}" / "flight.json" for rank in ranks]
    for path in paths:
        path.unlink(missing_ok=True)
    os.kill(job.process.pid, signal.SIGUSR1)
    until(lambda: all(path.exists() for path in paths), "the records are written")


def stop_in_the_middle(job: Job, rank: int, main: bool = True) -> float:
    """Stop a rank while its main thread, or another one, packs or reduces, retrying until it does; return the time."""
    at = 0.0

    def caught() -> bool:
        nonlocal at
        at = stop(job, rank)
        if runs_engine_code(job, rank, main):
            return True
        send(job, rank, signal.SIGCONT)
        return False

    until(caught, "the rank was stopped in the middle of an operation")
    return at


def named(
    finished: Finished,
    values: Mapping[int, Any] | Sequence[Any],
    culprits: int | Sequence[int],
    kind: str,
    since: float,
    within: float = WITHIN,
) -> None:
    """Check that every rank in `values` got `kind`, naming a culprit; raise a `LateError` if it came late."""
    allowed = [culprits] if isinstance(culprits, int) else list(culprits)
    items = values.items() if isinstance(values, Mapping) else enumerate(values)
    assert items
    for rank, value in items:
        assert value is not None, f"rank {rank} did not return\n{finished}"
        assert value["type"] == kind, f"rank {rank}: {value}\n{finished}"
        assert value["rank"] in allowed and f"rank {value['rank']}" in value["text"], f"rank {rank}: {value}"
        late = value["at"] - max(since, value["begun"])
        soon(late, within, f"rank {rank} was told\n{value}\n{finished}")


def others(finished: Finished, *culprits: int) -> dict[int, Any]:
    """Return the values of all ranks except the culprits."""
    return {rank: value for rank, value in enumerate(finished.values) if rank not in culprits}
