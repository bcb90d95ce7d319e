"""How the ranks of a job lie on its hosts, and which of them have connections across."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

SPOKEN_TO = 8
"""Hosts to which rank 0 itself has trunks. Of more, the others of its host take all: it has the coordinator to run."""


@dataclass(frozen=True)
class Layout:
    """The ranks of a job on its hosts.

    Attributes
    ----------
    hosts : tuple of int
        By rank, the number of its host. Hosts are numbered by their lowest ranks, so that rank 0 is on host 0. Neither
        are the ranks of a host contiguous, nor have hosts equally many.
    """

    hosts: tuple[int, ...]

    @classmethod
    def of(cls, crews: Iterable[Iterable[int]]) -> Layout:
        """The layout of hosts that have these ranks, in any order."""
        numbered = enumerate(sorted(sorted(crew) for crew in crews))
        of_rank = {rank: host for host, crew in numbered for rank in crew}
        return cls(tuple(of_rank[rank] for rank in range(len(of_rank))))

    @cached_property
    def crews(self) -> list[list[int]]:
        """Each host's ranks, ascending; the first of them is its leader."""
        crews: list[list[int]] = [[] for _ in range(max(self.hosts) + 1)]
        for rank, host in enumerate(self.hosts):
            crews[host].append(rank)
        return crews

    def place(self, rank: int) -> int:
        """Where a rank comes among those of its host: its local rank."""
        return self.crews[self.hosts[rank]].index(rank)

    def carrier(self, rank: int, host: int) -> int:
        """The rank on another host with which `rank` exchanges data."""
        crew = self.crews[host]
        return crew[self.place(rank) % len(crew)]

    def lanes(self, rank: int) -> list[int]:
        """The ranks on other hosts to which `rank` has a connection: its carriers, and those whose carrier it is."""
        own = self.hosts[rank]
        others = [other for other in range(len(self.hosts)) if self.hosts[other] != own]
        return [
            other
            for other in others
            if self.carrier(rank, self.hosts[other]) == other or self.carrier(other, own) == rank
        ]

    def keeper(self, host: int) -> int:
        """The rank of rank 0's host that has the trunk to another host's leader."""
        others = self.crews[0][1:]
        if not others or len(self.crews) - 1 <= SPOKEN_TO:
            return 0
        return others[host % len(others)]

    def trunks(self, rank: int) -> list[int]:
        """The ranks to which `rank` has a trunk: leaders of other hosts, or of these the one that keeps it."""
        host = self.hosts[rank]
        if host == 0:
            return [crew[0] for other, crew in enumerate(self.crews) if other and self.keeper(other) == rank]
        return [self.keeper(host)] if rank == self.crews[host][0] else []

    def cross(self, rank: int) -> tuple[int, int]:
        """Where a rank comes among the ranks that have its local rank on their hosts, and how many these are."""
        place = self.place(rank)
        alike = [host for host, crew in enumerate(self.crews) if len(crew) > place]
        return alike.index(self.hosts[rank]), len(alike)

    @property
    def homogeneous(self) -> bool:
        """Whether every host has equally many ranks."""
        return len({len(crew) for crew in self.crews}) == 1
