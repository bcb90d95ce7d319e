"""Room for ranks in a Ray cluster: their placement group, and the error text if there is no room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import get_current_placement_group
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from ..launch.errors import LaunchError


class NoRoomError(LaunchError, TimeoutError):
    """Ray has not found room in time. It is a `TimeoutError`, too, like that of Horovod's executor."""


_ANY = -1  # any bundle with room


@dataclass(frozen=True)
class Request:
    """Request for room."""

    ranks: int
    per_rank: dict[str, float]  # resources of each rank: `CPU`, and `GPU` if it needs any
    # Nodes over which to spread the ranks evenly; None: wherever there is room, close together
    hosts: int | None = None

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Bundles of the placement group: one for each host, or for each rank."""
        if self.hosts is None:
            return [dict(self.per_rank) for _ in range(self.ranks)]
        ranks = self.ranks // self.hosts
        return [{name: amount * ranks for name, amount in self.per_rank.items()} for _ in range(self.hosts)]

    def __str__(self) -> str:
        bundle = _format_resources(self.bundles[0])
        if self.hosts is None:
            return f"{self.ranks} ranks, each with {bundle}"
        return f"{self.ranks} ranks on {self.hosts} nodes, each with {bundle} free"


@dataclass(frozen=True)
class Room:
    """Placement group with room for ranks."""

    group: PlacementGroup
    bundles: Sequence[int]  # bundle of each rank, by rank
    ours: bool  # whether the group was made for these ranks, and is removed with them

    def give_back(self) -> None:
        """Remove the group, if it was made for these ranks."""
        if self.ours:
            remove_placement_group(self.group)


def connect() -> None:
    """Connect to a cluster, unless this process is connected. Most of Ray's functions do that, but not all."""
    if not ray.is_initialized():
        ray.init()


def find_room(request: Request, seconds: float, use_current: bool) -> Room:
    """Find room, or make it, within `seconds`; raise NoRoomError with what was requested and what the cluster has.

    `use_current` puts ranks into the placement group that the caller runs in, if any.
    """
    current = get_current_placement_group() if use_current and request.hosts is None else None
    if current is not None:
        return Room(current, [_ANY] * request.ranks, ours=False)
    group = placement_group(request.bundles, strategy="PACK" if request.hosts is None else "STRICT_SPREAD")
    try:
        there = group.wait(seconds)
    except BaseException:
        remove_placement_group(group)
        raise
    if not there:
        text = describe_lack(request, seconds, ray.nodes(), ray.available_resources())
        remove_placement_group(group)
        raise NoRoomError(text)
    per_bundle = 1 if request.hosts is None else request.ranks // request.hosts
    return Room(group, [rank // per_bundle for rank in range(request.ranks)], ours=True)


def describe_lack(
    request: Request,
    seconds: float,
    nodes: Sequence[dict[str, Any]],
    free: dict[str, float],
    name: str = "placement_group_timeout_s",
) -> str:
    """Describe what was requested, and what the cluster has.

    `nodes` and `free` are results of `ray.nodes()` and `ray.available_resources()`. `name` is the setting that limits
    the time to `seconds`.
    """
    names = list(request.per_rank)
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    kinds = Counter(_format_resources({kind: have.get(kind, 0) for kind in names}) for have in alive)
    have = ", ".join(f"{count} with {kind}" for kind, count in sorted(kinds.items(), reverse=True))
    unused = _format_resources({kind: free.get(kind, 0) for kind in names})
    return (
        f"Ray found no room within {seconds:g} s ({name}) for {request}. The cluster has "
        f"{len(alive)} {'node' if len(alive) == 1 else 'nodes'}: {have}; free in all: {unused}. Ask for fewer, end "
        "what holds the rest (`ray status`), or add nodes"
    )


def _format_resources(amounts: dict[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in amounts.items())
