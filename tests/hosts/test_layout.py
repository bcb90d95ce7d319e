"""Layout of ranks on hosts: which ranks have connections to other hosts, and the names of places."""

from __future__ import annotations

import pytest

from engine.net.rendezvous.layout import Layout

from .meeting import LAYOUTS

MANY = [[0, 1, 2], *([rank] for rank in range(3, 13))]  # more hosts than rank 0 has trunks


@pytest.mark.parametrize("crews", LAYOUTS.values(), ids=LAYOUTS)
def test_every_rank_reaches_a_carrier_on_every_other_host(crews: list[list[int]]) -> None:
    layout = Layout.from_crews(reversed(crews))
    assert layout.crews == crews
    for rank, own in enumerate(layout.hosts):
        for host, crew in enumerate(crews):
            if host != own:
                assert layout.carrier_rank(rank, host) in layout.lane_ranks(rank)
                assert layout.carrier_rank(rank, host) == crew[crews[own].index(rank) % len(crew)]
        for other in layout.lane_ranks(rank):  # both ends see a connection, which joins two hosts
            assert rank in layout.lane_ranks(other)
            assert layout.hosts[other] != own
            carriers = layout.carrier_rank(rank, layout.hosts[other]), layout.carrier_rank(other, own)
            assert other == carriers[0] or rank == carriers[1]


@pytest.mark.parametrize("crews", [*LAYOUTS.values(), MANY])
def test_every_leader_has_one_trunk_to_the_first_host(crews: list[list[int]]) -> None:
    layout = Layout.from_crews(crews)
    for crew in crews[1:]:
        (keeper,) = layout.trunk_ranks(crew[0])
        assert layout.hosts[keeper] == 0 and crew[0] in layout.trunk_ranks(keeper)
        assert all(layout.trunk_ranks(rank) == [] for rank in crew[1:])
    assert sorted(leader for rank in crews[0] for leader in layout.trunk_ranks(rank)) == [crew[0] for crew in crews[1:]]


def test_of_many_hosts_rank_0_has_no_trunk_if_others_of_its_host_can_have_them() -> None:
    layout = Layout.from_crews(MANY)
    assert [layout.trunk_ranks(rank) for rank in range(4)] == [[], [4, 6, 8, 10, 12], [3, 5, 7, 9, 11], [2]]
    assert Layout.from_crews(MANY[:9]).trunk_ranks(0) == list(range(3, 11))
    assert Layout.from_crews([[rank] for rank in range(20)]).trunk_ranks(0) == list(range(1, 20))


def test_equal_hosts_are_connected_rank_by_rank() -> None:
    layout = Layout.from_crews([[0, 1], [2, 3], [4, 5]])
    assert [layout.lane_ranks(rank) for rank in range(6)] == [[2, 4], [3, 5], [0, 4], [1, 5], [0, 2], [1, 3]]


def test_hosts_are_numbered_by_their_lowest_ranks() -> None:
    assert Layout.from_crews([[4, 5], [1, 2], [0, 3]]).hosts == (0, 1, 1, 0, 2, 2)


def test_cross_ranks_count_among_equal_local_ranks() -> None:
    layout = Layout.from_crews([[0], [1, 2, 3], [4, 5]])
    assert [layout.cross_rank(rank) for rank in range(6)] == [(0, 3), (1, 3), (0, 2), (0, 1), (2, 3), (1, 2)]
    assert not layout.homogeneous
    assert Layout.from_crews([[0, 1], [2, 3]]).homogeneous
    assert Layout((0, 0, 0)).cross_rank(2) == (0, 1)


def test_ranks_that_are_dealt_round_the_hosts_have_their_places() -> None:
    """Places and cross ranks are right although no host has consecutive ranks."""
    layout = Layout.from_crews([[0, 3, 6], [1, 4], [2, 5]])
    assert [layout.local_rank(rank) for rank in range(7)] == [0, 0, 0, 1, 1, 1, 2]
    assert [layout.cross_rank(rank) for rank in range(7)] == [(0, 3), (1, 3), (2, 3), (0, 3), (1, 3), (2, 3), (0, 1)]
    assert not layout.homogeneous and Layout.from_crews([[0, 2], [1, 3]]).homogeneous
