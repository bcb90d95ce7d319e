"""Which ranks have connections across hosts, and what they are called."""

from __future__ import annotations

import pytest

from engine.rendezvous.layout import Layout

from .meeting import LAYOUTS


@pytest.mark.parametrize("crews", LAYOUTS.values(), ids=LAYOUTS)
def test_every_rank_reaches_a_carrier_on_every_other_host(crews: list[list[int]]) -> None:
    layout = Layout.of(reversed(crews))
    assert layout.crews == crews
    for rank, own in enumerate(layout.hosts):
        for host, crew in enumerate(crews):
            if host != own:
                assert layout.carrier(rank, host) in layout.lanes(rank)
                assert layout.carrier(rank, host) == crew[crews[own].index(rank) % len(crew)]
        for other in layout.lanes(rank):  # a connection has two ends, and joins two hosts
            assert rank in layout.lanes(other)
            assert layout.hosts[other] != own
            carriers = layout.carrier(rank, layout.hosts[other]), layout.carrier(other, own)
            assert other == carriers[0] or rank == carriers[1]


def test_equal_hosts_are_connected_rank_by_rank() -> None:
    layout = Layout.of([[0, 1], [2, 3], [4, 5]])
    assert [layout.lanes(rank) for rank in range(6)] == [[2, 4], [3, 5], [0, 4], [1, 5], [0, 2], [1, 3]]


def test_hosts_are_numbered_by_their_lowest_ranks() -> None:
    assert Layout.of([[4, 5], [1, 2], [0, 3]]).hosts == (0, 1, 1, 0, 2, 2)


def test_cross_ranks_count_among_equal_local_ranks() -> None:
    layout = Layout.of([[0], [1, 2, 3], [4, 5]])
    assert [layout.cross(rank) for rank in range(6)] == [(0, 3), (1, 3), (0, 2), (0, 1), (2, 3), (1, 2)]
    assert not layout.homogeneous
    assert Layout.of([[0, 1], [2, 3]]).homogeneous
    assert Layout((0, 0, 0)).cross(2) == (0, 1)


def test_ranks_that_are_dealt_round_the_hosts_have_their_places() -> None:
    """Problem 19."""
    layout = Layout.of([[0, 3, 6], [1, 4], [2, 5]])
    assert [layout.place(rank) for rank in range(7)] == [0, 0, 0, 1, 1, 1, 2]
    assert [layout.cross(rank) for rank in range(7)] == [(0, 3), (1, 3), (2, 3), (0, 3), (1, 3), (2, 3), (0, 1)]
    assert not layout.homogeneous and Layout.of([[0, 2], [1, 3]]).homogeneous
