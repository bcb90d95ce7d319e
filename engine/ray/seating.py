"""Which rank is where: from what the processes say of themselves to a place for each, told to all of them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from .. import readable
from ..compat.modules import installed
from ..launch.errors import LaunchError
from ..launch.plan import Crew, Job
from ..rendezvous.layout import Layout
from .actor import Standing, open_door, take_place

Ask = Callable[..., "ray.ObjectRef[Any]"]
"""Called with a rank, a function and its arguments, which the process of that rank then calls."""


def answers(refs: Sequence[ray.ObjectRef[Any]], seconds: float, doing: str) -> list[Any]:
    """What all ranks answer, within a time.

    Parameters
    ----------
    refs : sequence of ObjectRef
        By rank.
    seconds : float
    doing : str
        What they were asked to do, for messages.

    Raises
    ------
    LaunchError
        Some did not answer in time, or failed.
    """
    end = time.monotonic() + seconds
    pending = list(refs)
    while pending:
        done, pending = ray.wait(pending, timeout=max(0.0, end - time.monotonic()))
        if not done:
            late = ", ".join(str(number) for number, ref in enumerate(refs) if ref in pending)
            raise LaunchError(
                f"{len(pending)} of {len(refs)} processes did not {doing} within {seconds:g} s (number {late}). Their "
                "nodes may be busy, lost, or have no room for them: `ray status` shows what is free"
            )
        for ref in done:
            try:
                ray.get(ref)
            except RayError as error:
                raise LaunchError(
                    f"process {refs.index(ref)} of {len(refs)} failed to {doing}: {readable.exception_text(error)}"
                ) from error
    return list(ray.get(list(refs)))


def seat(
    ask: Ask,
    standings: Sequence[Standing],
    seconds: float,
    settings: Mapping[str, str],
    variables: Mapping[str, str],
    interfaces: str = "",
    share_gpus: bool = True,
) -> None:
    """Decide where each rank belongs, and tell it.

    Parameters
    ----------
    ask : callable
        See `Ask`.
    standings : sequence of Standing
        By rank.
    seconds : float
        Longest that the ranks may take to answer.
    settings, variables : mapping of str to str
        Of the environment: of the engine, and the user's, which go before them.
    interfaces : str
        Names of network interfaces with commas between them; empty: none is chosen.
    share_gpus : bool
        Whether the ranks of a host are to see the GPUs of all of them, each its own at the number of its local rank.

    Raises
    ------
    LaunchError
        As of `answers`.
    """
    layout = layout_of(standings)
    several = len(layout.crews) > 1
    ((address, port, hub),) = answers([ask(0, open_door, several, interfaces)], seconds, "tell where ranks can meet")
    job = Job(
        size=len(standings),
        name=f"ray-{secrets.token_hex(8)}",
        secret=secrets.token_hex(32),
        port=port,
        directory=Path(),
        settings=settings,
        horovod=installed(),
        address=address,
        hub=hub,
        interface=interfaces,
    )
    told = []
    for rank, standing in enumerate(standings):
        crew = layout.crews[layout.hosts[rank]]
        devices = _devices([standings[other] for other in crew]) if share_gpus else ()
        host = layout.hosts[rank]
        place = Crew(host, tuple(map(len, layout.crews)), tuple(crew), standing.address) if several else None
        told.append(ask(rank, take_place, replace(job, devices=devices), place, rank, variables))
    answers(told, seconds, "take its place")


def layout_of(standings: Sequence[Standing]) -> Layout:
    """How ranks lie on hosts: those share one that can share memory."""
    crews: dict[tuple[str, int, int], list[int]] = {}
    for rank, standing in enumerate(standings):
        crews.setdefault(standing.machine, []).append(rank)
    return Layout.of(crews.values())


def in_order(standings: Sequence[Standing]) -> list[int]:
    """The processes in the order in which they become ranks: hosts as they first occur, on them nodes likewise."""
    hosts = {machine: number for number, machine in enumerate(dict.fromkeys(each.machine for each in standings))}
    nodes = {node: number for number, node in enumerate(dict.fromkeys(each.node for each in standings))}
    return sorted(range(len(standings)), key=lambda each: (hosts[standings[each].machine], nodes[standings[each].node]))


def visible(gpus: Sequence[Sequence[str]]) -> str:
    """CUDA_VISIBLE_DEVICES for all ranks of a host, from the GPUs that each has.

    Scripts choose their device by the local rank: so the first GPU of each comes first, then what some have besides.
    """
    return ",".join(dict.fromkeys(gpu for turn in zip_longest(*gpus) for gpu in turn if gpu is not None))


def _devices(crew: Sequence[Standing]) -> tuple[str, ...]:
    """CUDA_VISIBLE_DEVICES of each rank of a host; none if Ray has given it no GPU."""
    gpus = visible([standing.gpus for standing in crew])
    return (gpus,) * len(crew) if gpus else ()
