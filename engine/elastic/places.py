"""Which rank a worker is: hosts by age, on a host by slot, and ranks count through.

So wherever a host is full, `local_rank` is the number of the slot, and a process that lives on keeps it. With a hole
on the host `local_rank` is dense, since programs ask for local rank 0, and the slot is not: what belongs to a slot,
such as its GPU, its CPUs and its page of counters, goes by the slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class Slot(NamedTuple):
    """Where on a host a worker runs. It outlives workers."""

    host: str
    number: int

    def __str__(self) -> str:
        return f"slot {self.number} of {self.host}"


@dataclass(frozen=True)
class Place:
    """A worker's place in one world.

    Attributes
    ----------
    world : int
        The number of the world.
    rank, size : int
    local_rank, local_size : int
        Among the ranks of the host.
    cross_rank, cross_size : int
        Among the hosts that have this local rank.
    slot : Slot
    """

    world: int
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    slot: Slot


def assign(world: int, members: Mapping[int, Slot], age: Callable[[str], int]) -> dict[int, Place]:
    """Give each member of a world its place.

    Parameters
    ----------
    world : int
    members : mapping of int to Slot
        Of each worker, by its number.
    age : callable
        Of a host: a number that is smaller for one that was there earlier, and different for each.

    Returns
    -------
    dict of int to Place
        In the order of ranks.

    Raises
    ------
    ValueError
        Two workers in one slot.
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
        places[worker] = Place(
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


def moved(before: Mapping[int, Place], after: Mapping[int, Place]) -> list[int]:
    """The workers that are in both worlds, and have another local rank: a program may have chosen its GPU by that."""
    return [worker for worker in after if worker in before and before[worker].local_rank != after[worker].local_rank]
