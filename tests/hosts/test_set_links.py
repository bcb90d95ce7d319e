"""Connections of a process set, made by threads of this process: all that are needed, and none left over."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest

from engine.errors import EngineError, RendezvousError
from engine.net.rendezvous import Gathered
from engine.net.rendezvous.layout import Layout
from engine.net.rendezvous.set_connections import Connections, SetConnector
from engine.net.unix_sockets import close_all
from engine.session.registry import ProcessSetRegistry

from .meeting import meet, worlds

CREWS = [[0, 1], [2, 3], [4]]
RANKS = (1, 2, 3, 4)
NAME = "a set"


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) == before


def on_all(use: Callable[[int, SetConnector, Callable[[bytes], list[bytes]]], Any], sockets: int = 2) -> dict[int, Any]:
    """Result or error of `use` on each rank of a world that has met; `use` gets the means for an exchange."""
    job = worlds(CREWS)
    results: dict[int, Any] = {}

    def look(gathered: dict[int, Gathered]) -> None:
        texts: dict[int, bytes] = {}
        barrier = threading.Barrier(len(job))

        def run(rank: int) -> None:
            def exchange(text: bytes) -> list[bytes]:
                texts[rank] = text
                barrier.wait(60)
                told = [texts[each] for each in RANKS]
                barrier.wait(60)
                return told

            links = SetConnector(job[rank], gathered[rank], 5.0)
            try:
                results[rank] = use(rank, links, exchange)
            except (OSError, RuntimeError) as error:
                results[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in job]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    meet(list(job.values()), look=look, sockets=lambda world: sockets)
    return results


def goes_on() -> bool:
    """Return False: the world has not ended."""
    return False


def test_a_set_has_as_wide_lanes_as_the_world() -> None:
    def use(rank: int, links: SetConnector, exchange: Callable[[bytes], list[bytes]]) -> None:
        lanes, trunks = links.open(RANKS, NAME, exchange, goes_on)
        close_all([*chain(*lanes.values()), *trunks.values()])
        layout = Layout((0, 1, 1, 2))
        me = RANKS.index(rank) if rank in RANKS else -1
        assert sorted(lanes) == (layout.lane_ranks(me) if me >= 0 else [])
        assert {len(lane) for lane in lanes.values()} <= {2}
        assert sorted(trunks) == {0: [1, 3], 1: [0], 3: [0]}.get(me, [])

    assert on_all(use) == dict.fromkeys(range(5))


def test_an_exchange_that_fails_leaves_no_descriptor() -> None:
    """The world ends while ranks exchange addresses."""

    def use(rank: int, links: SetConnector, exchange: Callable[[bytes], list[bytes]]) -> None:
        def failing(text: bytes) -> list[bytes]:
            exchange(text)
            raise RuntimeError("the world has ended")

        links.open(RANKS, NAME, failing, goes_on)

    assert all("the world has ended" in str(each) for each in on_all(use).values())


def test_nobody_waits_for_connections_when_the_world_has_ended() -> None:
    """A rank of the set is stopped, or its host is gone, and the others are told so."""

    def use(rank: int, links: SetConnector, exchange: Callable[[bytes], list[bytes]]) -> None:
        if rank == RANKS[-1]:
            exchange(b"null")
        else:
            links.open(RANKS, NAME, exchange, lambda: True)

    results = on_all(use)
    assert {str(results[rank]) for rank in RANKS[:-1]} == {"the world has ended"}


@pytest.mark.parametrize("when", ["connected", "formed"])
def test_a_set_that_is_not_formed_leaves_no_descriptor(when: str) -> None:
    """The world ends once all connections are made, or another rank lacks a connection."""

    class World:
        rank, numbers = 0, (0, 1)

        def form(self, *args: object) -> None:
            raise AssertionError("nobody is to get so far")

    class Links:
        def open(self, ranks: tuple[int, ...], name: str, exchange: object, ended: object) -> Connections:
            return {1: [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]}, {1: os.open(os.devnull, os.O_RDONLY)}

    class OfASet(ProcessSetRegistry):
        def _gather_texts(self, subject: str, text: bytes) -> list[bytes]:
            if when == "connected":
                raise RendezvousError("the world has ended")
            return [text, b"no lane to rank 0 of the set"]

    registry = OfASet(World(), 1.0, None, Links())  # type: ignore[arg-type]
    try:
        with pytest.raises(EngineError, match=r"the world has ended|rank 1 has no lane to rank 0"):
            registry._connect((0, 1))
    finally:
        registry.close()
