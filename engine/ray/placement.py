"""Room for ranks in a Ray cluster: which placement group they get, and what is said if there is no room."""

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
    """Ray has not found room in time, as Horovod's executor tells by a `TimeoutError`."""


_ANY = -1  # whichever bundle has room


@dataclass(frozen=True)
class Request:
    """What room is asked for.

    Attributes
    ----------
    ranks : int
    per_rank : dict of str to float
        What each rank needs: `CPU`, and `GPU` if it needs any.
    hosts : int or None
        Nodes over which to spread them evenly; None: wherever there is room, close together.
    """

    ranks: int
    per_rank: dict[str, float]
    hosts: int | None = None

    @property
    def bundles(self) -> list[dict[str, float]]:
        """One for each host, or for each rank."""
        if self.hosts is None:
            return [dict(self.per_rank) for _ in range(self.ranks)]
        ranks = self.ranks // self.hosts
        return [{name: amount * ranks for name, amount in self.per_rank.items()} for _ in range(self.hosts)]

    def __str__(self) -> str:
        bundle = _resources(self.bundles[0])
        if self.hosts is None:
            return f"{self.ranks} ranks, each with {bundle}"
        return f"{self.ranks} ranks on {self.hosts} nodes, each with {bundle} free"


@dataclass(frozen=True)
class Room:
    """A placement group with room for ranks.

    Attributes
    ----------
    group : PlacementGroup
    bundles : sequence of int
        By rank, the bundle that it belongs in.
    ours : bool
        Whether it was made for these ranks, and goes with them.
    """

    group: PlacementGroup
    bundles: Sequence[int]
    ours: bool

    def give_back(self) -> None:
        """Remove the group, if it was made for these ranks."""
        if self.ours:
            remove_placement_group(self.group)


def connect() -> None:
    """Connect to a cluster, if this process is not. Of Ray's own functions most do that, and some do not."""
    if not ray.is_initialized():
        ray.init()


def find(request: Request, seconds: float, use_current: bool) -> Room:
    """Find room, or make it.

    Parameters
    ----------
    request : Request
    seconds : float
        Longest that Ray may take.
    use_current : bool
        Whether ranks go into the placement group that the caller runs in, if it runs in one.

    Raises
    ------
    NoRoomError
        There was no room in time; the text says what was asked for, and what the cluster has.
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
        text = lack(request, seconds, ray.nodes(), ray.available_resources())
        remove_placement_group(group)
        raise NoRoomError(text)
    per_bundle = 1 if request.hosts is None else request.ranks // request.hosts
    return Room(group, [rank // per_bundle for rank in range(request.ranks)], ours=True)


def lack(
    request: Request,
    seconds: float,
    nodes: Sequence[dict[str, Any]],
    free: dict[str, float],
    name: str = "placement_group_timeout_s",
) -> str:
    """Say what was asked for, and what the cluster has.

    Parameters
    ----------
    request : Request
    seconds : float
        For which Ray was given time.
    nodes, free : sequence of dict, dict
        As `ray.nodes()` and `ray.available_resources()` tell.
    name : str
        Of the setting that has given that time.
    """
    names = list(request.per_rank)
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    kinds = Counter(_resources({kind: have.get(kind, 0) for kind in names}) for have in alive)
    have = ", ".join(f"{count} with {kind}" for kind, count in sorted(kinds.items(), reverse=True))
    unused = _resources({kind: free.get(kind, 0) for kind in names})
    return (
        f"Ray found no room within {seconds:g} s ({name}) for {request}. The cluster has "
        f"{len(alive)} {'node' if len(alive) == 1 else 'nodes'}: {have}; free in all: {unused}. Ask for fewer, end "
        "what holds the rest (`ray status`), or add nodes"
    )


def _resources(amounts: dict[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in amounts.items())
