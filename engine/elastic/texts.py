"""Texts that the driver's state machine shows to people."""

from __future__ import annotations

from collections.abc import Iterable

from .hosts import HostRegistry
from .limits import JobLimits
from .roster import Roster, Worker, WorkerState

_SHOWN = 5  # most workers that one line names


def describe_late_worker(worker: Worker, gathers: bool, limits: JobLimits) -> str:
    """Describe what a worker failed to do before its deadline."""
    if worker.state is WorkerState.STARTING:
        return f"did not come to elastic.run within {limits.start_timeout:g} s of its start"
    if worker.state is WorkerState.ENDING:
        return f"was told to end, and ran on for {limits.end_grace:g} s"
    if gathers:
        return f"did not meet the other members of world {worker.world} within {limits.meeting:g} s"
    return f"did not come back in time from world {worker.world}, which is over: it stands still, or computes for long"


def describe_too_few(roster: Roster, limits: JobLimits) -> str:
    """Describe that there were too few workers for a world for too long."""
    return (
        f"for {limits.elastic_timeout:g} s there were too few workers for a world of at least {limits.min_size}: "
        f"{len(roster.list_workers(WorkerState.GATE))} were ready"
    )


def describe_wait(roster: Roster, limits: JobLimits, hosts: HostRegistry, now: float) -> str:
    """Describe which workers or events the job waits for."""
    if computing := roster.list_computing():
        compute = "computes" if len(computing) == 1 else "compute"
        return (
            f"world {computing[0].world} is over; waiting for {_name_workers(computing)} to come back, which {compute} "
            f"in Python perhaps. {_describe_deadline(computing, now)}"
        )
    if unfenced := roster.list_unfenced():
        return f"waiting until {_name_workers(unfenced)} cannot run any more. {_describe_deadline(unfenced, now)}"
    ready, starting = len(roster.list_workers(WorkerState.GATE)), len(roster.list_workers(WorkerState.STARTING))
    out = hosts.describe_blacklist(now)
    return (
        f"waiting for workers of a world of at least {limits.min_size}: {ready} ready, {starting} starting"
        f"{'; blacklisted: ' + ', '.join(out) if out else ''}"
    )


def _name_workers(workers: list[Worker]) -> str:
    more = [f"{len(workers) - _SHOWN} more"] if len(workers) > _SHOWN else []
    return ", ".join([*map(str, workers[:_SHOWN]), *more])


def _describe_deadline(workers: Iterable[Worker], now: float) -> str:
    left = max((worker.until - now for worker in workers if worker.until is not None), default=0.0)
    return f"That ends in {left:.0f} s at the latest"
