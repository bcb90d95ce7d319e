"""Assignment of ranks to hosts: from the locations that processes report to a place for each."""

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

from ..compat.modules import is_installed
from ..errors.formatting import exception_text
from ..launch.errors import LaunchError
from ..launch.process.plan import Crew, Job
from ..net.rendezvous.layout import Layout
from .actor import Standing, open_door, take_place

Ask = Callable[..., "ray.ObjectRef[Any]"]
"""Takes a rank, a function and its arguments, and calls the function in the process of that rank."""


def collect_answers(refs: Sequence[ray.ObjectRef[Any]], seconds: float, doing: str) -> list[Any]:
    """Return the answers of all ranks, by rank; `doing` describes the task, for messages.

    Raises LaunchError if some ranks did not answer within `seconds`, or failed.
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
                    f"process {refs.index(ref)} of {len(refs)} failed to {doing}: {exception_text(error)}"
                ) from error
    return list(ray.get(list(refs)))


def assign_ranks(
    ask: Ask,
    standings: Sequence[Standing],
    seconds: float,
    settings: Mapping[str, str],
    variables: Mapping[str, str],
    interfaces: str = "",
    share_gpus: bool = True,
) -> None:
    """Assign each rank its place, and send it; raise LaunchError if some ranks do not answer within `seconds`, or fail.

    `standings` are by rank. `settings` are variables for the engine; the user's `variables` take precedence.
    `interfaces` are comma-separated names; empty: no choice. `share_gpus` lets each rank see the GPUs of all ranks of
    its host, its own at the number of its local rank.
    """
    layout = layout_of(standings)
    several = len(layout.crews) > 1
    ((address, port, hub),) = collect_answers(
        [ask(0, open_door, several, interfaces)], seconds, "tell where ranks can meet"
    )
    job = Job(
        size=len(standings),
        name=f"ray-{secrets.token_hex(8)}",
        secret=secrets.token_hex(32),
        port=port,
        directory=Path(),
        settings=settings,
        horovod=is_installed(),
        address=address,
        hub=hub,
        interface=interfaces,
    )
    told = []
    for rank, standing in enumerate(standings):
        crew = layout.crews[layout.hosts[rank]]
        devices = _assign_devices([standings[other] for other in crew]) if share_gpus else ()
        host = layout.hosts[rank]
        place = Crew(host, tuple(map(len, layout.crews)), tuple(crew), standing.address) if several else None
        told.append(ask(rank, take_place, replace(job, devices=devices), place, rank, variables))
    collect_answers(told, seconds, "take its place")


def layout_of(standings: Sequence[Standing]) -> Layout:
    """Return the layout of ranks on hosts: ranks that can share memory are on one host."""
    crews: dict[tuple[str, int, int], list[int]] = {}
    for rank, standing in enumerate(standings):
        crews.setdefault(standing.machine, []).append(rank)
    return Layout.from_crews(crews.values())


def in_order(standings: Sequence[Standing]) -> list[int]:
    """Return the processes in the order of their ranks: by host and then by node, both as they first occur."""
    hosts = {machine: number for number, machine in enumerate(dict.fromkeys(each.machine for each in standings))}
    nodes = {node: number for number, node in enumerate(dict.fromkeys(each.node for each in standings))}
    return sorted(range(len(standings)), key=lambda each: (hosts[standings[each].machine], nodes[standings[each].node]))


def join_visible_gpus(gpus: Sequence[Sequence[str]]) -> str:
    """Return CUDA_VISIBLE_DEVICES for all ranks of a host, from the GPUs of each.

    Scripts choose their device by the local rank. So the first GPU of each rank comes first, then the further ones.
    """
    return ",".join(dict.fromkeys(gpu for turn in zip_longest(*gpus) for gpu in turn if gpu is not None))


def _assign_devices(crew: Sequence[Standing]) -> tuple[str, ...]:
    """Return CUDA_VISIBLE_DEVICES of each rank of a host; empty if Ray has assigned it no GPU."""
    gpus = join_visible_gpus([standing.gpus for standing in crew])
    return (gpus,) * len(crew) if gpus else ()
