"""Assignment of ranks to workers: ordered by the age of hosts, and on a host by slot.

On a full host, `local_rank` is therefore the number of the slot, and a surviving process keeps it. On a host with
unused slots the two differ: `local_rank` is dense, since programs ask for local rank 0, and the slot is not. Whatever
belongs to a slot, such as its GPU, its CPUs and its page of counters, is chosen by the slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class Slot(NamedTuple):
    """Slot of a host in which one worker runs at a time. It outlives workers."""

    host: str
    number: int

    def __str__(self) -> str:
        return f"slot {self.number} of {self.host}"


@dataclass(frozen=True)
class WorldPlace:
    """Place of a worker in one world."""

    world: int  # number of the world
    rank: int
    size: int
    local_rank: int  # rank among the ranks of the host; `local_size` is their number
    local_size: int
    cross_rank: int  # rank among the hosts that have this local rank; `cross_size` is their number
    cross_size: int
    slot: Slot


def assign_ranks(world: int, members: Mapping[int, Slot], age: Callable[[str], int]) -> dict[int, WorldPlace]:
    """Return the place of each member of a world by its worker's number, in the order of ranks.

    `age` takes a host's name, and returns a number that is unique, and smaller for a host that was there earlier. Two
    workers in one slot are a ValueError.
    """
    order = sorted(members, key=lambda worker: (age(members[worker].host), members[worker].number))
    for worker, following in pairwise(order):
        if members[worker] == members[following]:
            raise ValueError(f"workers {worker} and {following} are both in {members[worker]}")
    local_sizes = Counter(slot.host for slot in members.values())
    hosts_having = Counter(local_rank for size in local_sizes.values() for local_rank in range(size))
    on_host: Counter[str] = Counter()
    across: Counter[int] = Counter()
    places = {}
    for rank, worker in enumerate(order):
        slot = members[worker]
        local_rank = on_host[slot.host]
        places[worker] = WorldPlace(
            world,
            rank,
            len(order),
            local_rank,
            local_sizes[slot.host],
            across[local_rank],
            hosts_having[local_rank],
            slot,
        )
        on_host[slot.host] += 1
        across[local_rank] += 1
    return places
