"""Texts that the driver's state machine shows to people."""

from __future__ import annotations

from collections.abc import Iterable

from .hosts import Hosts
from .limits import Limits
from .roster import At, Roster, Worker

_SHOWN = 5  # most workers that one line names


def late(worker: Worker, gathers: bool, limits: Limits) -> str:
    """Describe what a worker failed to do before its deadline."""
    if worker.at is At.STARTING:
        return f"did not come to elastic.run within {limits.start_timeout:g} s of its start"
    if worker.at is At.ENDING:
        return f"was told to end, and ran on for {limits.end_grace:g} s"
    if gathers:
        return f"did not meet the other members of world {worker.world} within {limits.meeting:g} s"
    return f"did not come back in time from world {worker.world}, which is over: it stands still, or computes for long"


def too_few(roster: Roster, limits: Limits) -> str:
    """Describe that there were too few workers for a world for too long."""
    return (
        f"for {limits.elastic_timeout:g} s there were too few workers for a world of at least {limits.min_size}: "
        f"{len(roster.at(At.GATE))} were ready"
    )


def waits_for(roster: Roster, limits: Limits, hosts: Hosts, now: float) -> str:
    """Describe which workers or events the job waits for."""
    if computing := roster.computing():
        return (
            f"world {computing[0].world} is over; waiting for {_named(computing)} to come back, which "
            f"{'computes' if len(computing) == 1 else 'compute'} in Python perhaps. {_limit(computing, now)}"
        )
    if unfenced := roster.unfenced():
        return f"waiting until {_named(unfenced)} cannot run any more. {_limit(unfenced, now)}"
    ready, starting = len(roster.at(At.GATE)), len(roster.at(At.STARTING))
    out = hosts.blacklisted(now)
    return (
        f"waiting for workers of a world of at least {limits.min_size}: {ready} ready, {starting} starting"
        f"{'; blacklisted: ' + ', '.join(out) if out else ''}"
    )


def _named(workers: list[Worker]) -> str:
    more = [f"{len(workers) - _SHOWN} more"] if len(workers) > _SHOWN else []
    return ", ".join([*map(str, workers[:_SHOWN]), *more])


def _limit(workers: Iterable[Worker], now: float) -> str:
    left = max((worker.until - now for worker in workers if worker.until is not None), default=0.0)
    return f"That ends in {left:.0f} s at the latest"
