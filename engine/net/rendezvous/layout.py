"""Distribution of a job's ranks over its hosts, and the pairs of ranks that are connected between hosts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

SPOKEN_TO = 8
"""Most hosts to which rank 0 itself has trunks. With more, other ranks of its host take them all, because rank 0 runs
the coordinator."""


@dataclass(frozen=True)
class Layout:
    """Distribution of a job's ranks over its hosts.

    Hosts are numbered in the order of their lowest ranks, so rank 0 is on host 0. The ranks of a host need not be
    contiguous, and hosts may have different numbers of ranks.
    """

    hosts: tuple[int, ...]  # host number of each rank

    @classmethod
    def from_crews(cls, crews: Iterable[Iterable[int]]) -> Layout:
        """Make a layout of the rank lists of its hosts, which may come in any order."""
        numbered = enumerate(sorted(sorted(crew) for crew in crews))
        of_rank = {rank: host for host, crew in numbered for rank in crew}
        return cls(tuple(of_rank[rank] for rank in range(len(of_rank))))

    @cached_property
    def crews(self) -> list[list[int]]:
        """Ranks of each host, ascending; the first of them is its leader."""
        crews: list[list[int]] = [[] for _ in range(max(self.hosts) + 1)]
        for rank, host in enumerate(self.hosts):
            crews[host].append(rank)
        return crews

    def local_rank(self, rank: int) -> int:
        """Return the local rank of a rank: its index among the ranks of its host."""
        return self.crews[self.hosts[rank]].index(rank)

    def carrier_rank(self, rank: int, host: int) -> int:
        """Return the rank on another host with which `rank` exchanges data."""
        crew = self.crews[host]
        return crew[self.local_rank(rank) % len(crew)]

    def lane_ranks(self, rank: int) -> list[int]:
        """Return the ranks on other hosts to which `rank` has a lane: its carriers, and the ranks that it carries."""
        own = self.hosts[rank]
        others = [other for other in range(len(self.hosts)) if self.hosts[other] != own]
        return [
            other
            for other in others
            if self.carrier_rank(rank, self.hosts[other]) == other or self.carrier_rank(other, own) == rank
        ]

    def keeper_rank(self, host: int) -> int:
        """Return the rank on rank 0's host that has the trunk to another host's leader."""
        others = self.crews[0][1:]
        if not others or len(self.crews) - 1 <= SPOKEN_TO:
            return 0
        return others[host % len(others)]

    def trunk_ranks(self, rank: int) -> list[int]:
        """Return the ranks to which `rank` has a trunk.

        A keeper on rank 0's host has trunks to leaders of other hosts; such a leader has one to its keeper.
        """
        host = self.hosts[rank]
        if host == 0:
            return [crew[0] for other, crew in enumerate(self.crews) if other and self.keeper_rank(other) == rank]
        return [self.keeper_rank(host)] if rank == self.crews[host][0] else []

    def cross_rank(self, rank: int) -> tuple[int, int]:
        """Return the cross rank of a rank (its index among the ranks with its local rank) and the cross size."""
        place = self.local_rank(rank)
        alike = [host for host, crew in enumerate(self.crews) if len(crew) > place]
        return alike.index(self.hosts[rank]), len(alike)

    @property
    def homogeneous(self) -> bool:
        """True if all hosts have the same number of ranks."""
        return len({len(crew) for crew in self.crews}) == 1
