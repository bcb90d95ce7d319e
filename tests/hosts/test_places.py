"""A rank's place among several hosts."""

from __future__ import annotations

import pytest

import engine
from engine.config.hub_address import HubAddress
from engine.config.world import World
from engine.errors import NotInitializedError
from engine.net.rendezvous import Gathered
from engine.net.rendezvous.layout import Layout
from engine.session import runtime, session, startup, topology

LAYOUT = Layout.from_crews([[0, 3], [1, 4], [2]])


@pytest.mark.parametrize(
    ("rank", "local", "local_size", "cross", "cross_size"),
    [(0, 0, 2, 0, 3), (3, 1, 2, 0, 2), (1, 0, 2, 1, 3), (4, 1, 2, 1, 2), (2, 0, 1, 2, 3)],
)
def test_cross_ranks_are_those_of_horovod(
    monkeypatch: pytest.MonkeyPatch, rank: int, local: int, local_size: int, cross: int, cross_size: int
) -> None:
    world = World(rank, 5, local, local_size, "job", "s", "test", HubAddress("node0", 1))
    inside = object.__new__(session.EngineSession)  # without an engine
    inside.world, inside.layout = world, LAYOUT
    monkeypatch.setattr(runtime, "current_or_pending", lambda: inside)
    assert (engine.rank(), engine.size()) == (rank, 5)
    assert (engine.local_rank(), engine.local_size()) == (local, local_size)
    assert (engine.cross_rank(), engine.cross_size()) == (cross, cross_size)
    assert not engine.is_homogeneous()


def test_a_worker_process_is_told_that_it_cannot_know_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(3, 5, 1, 2, "job", "s", "test", HubAddress("node0", 1))
    monkeypatch.setattr(topology, "_find_world", lambda: world)
    with pytest.raises(NotInitializedError, match=r"engine\.cross_rank\(\) .* as arguments"):
        engine.cross_rank()


def test_the_processors_of_other_hosts_do_not_count() -> None:
    hosts = (0, 0, 1, 1)
    shared = Gathered(-1, -1, [-1] * 4, [1, 2, 3, 4], [[0], [0], [0], [1]], hosts, 0)
    apart = Gathered(-1, -1, [-1] * 4, [1, 2, 3, 4], [[0], [0], [0], [1]], hosts, 1)
    assert shared.crew == [0, 1]
    assert apart.crew == [2, 3]
    assert (startup.spin_us(shared), startup.yield_us(shared)) == (0.0, startup.DEFAULT_YIELD_US)
    assert startup.yield_us(apart) == 0.0


def test_an_engine_is_told_of_other_hosts_only_if_there_are_any() -> None:
    alone = Gathered(-1, -1, [-1] * 2, [1, 2], [[0], [1]])
    assert startup._make_host_options(alone) == {}
    several = Gathered(-1, -1, [-1] * 2, [1, 2], [[0], [1]], (0, 1), 0, None, {1: 7}, {1: [8, 9]})
    assert startup._make_host_options(several) == {"hosts": (0, 1), "trunks": {1: 7}, "lanes": {1: [8, 9]}}
