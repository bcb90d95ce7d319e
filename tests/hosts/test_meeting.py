"""Rendezvous of ranks of several hosts: who comes, who does not, who must not."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from engine.config.hub_address import HubAddress
from engine.config.world import World
from engine.errors import IncompatibleRanksError, RendezvousError
from engine.host.network import Address
from engine.host.patience import Patience
from engine.net.connection import Connection
from engine.net.event_loop import Coroutine
from engine.net.rendezvous import Gathered, hub, hub_client, local_server
from engine.net.rendezvous.layout import Layout

from ..waiting import be_late, until
from .meeting import BUILD, LAYOUTS, meet, speak_through_lanes, worlds


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= before


def texts(results: dict[int, Any]) -> set[str]:
    """Distinct error texts of all ranks, each of which must have raised `RendezvousError`."""
    assert all(isinstance(result, RendezvousError) for result in results.values()), results
    return {f"{type(result).__name__}: {result}" for result in results.values()}


@pytest.mark.parametrize(
    ("crews", "sockets"), list(zip(LAYOUTS.values(), (1, 2, 1, 1, 8, 3), strict=True)), ids=LAYOUTS
)
def test_all_ranks_meet(crews: list[list[int]], sockets: int) -> None:
    job = worlds(crews)
    layout = Layout.from_crews(crews)

    def look(results: dict[int, Any]) -> None:
        assert all(isinstance(result, Gathered) for result in results.values()), results
        memory = {rank: os.fstat(each.control).st_ino for rank, each in results.items()}
        for crew in crews:
            assert len({memory[rank] for rank in crew}) == 1
        assert len(set(memory.values())) == len(crews)
        for rank, each in results.items():
            own = crews[layout.hosts[rank]]
            assert each.hosts == layout.hosts and each.crew == own and each.host == layout.hosts[rank]
            assert [peer >= 0 for peer in each.peers] == [other in own for other in range(len(results))]
            assert sorted(each.lanes) == layout.lane_ranks(rank)
            assert {len(lane) for lane in each.lanes.values()} == {sockets}
            assert sorted(each.trunks) == layout.trunk_ranks(rank)
            assert each.pids == [os.getpid()] * len(results)
            descriptors = [*each.trunks.values(), *chain(*each.lanes.values())]
            assert not any(os.get_inheritable(fd) or os.get_blocking(fd) for fd in descriptors)
        speak_through_lanes(results)

    assert len(meet(list(job.values()), look=look, sockets=lambda world: sockets)) == len(job)


def test_ranks_meet_over_ipv6() -> None:
    job = worlds(LAYOUTS["2x2"], host="::1")
    results = meet(list(job.values()), look=speak_through_lanes)
    assert all(isinstance(result, Gathered) for result in results.values()), results


def test_rank_0_listens_itself_if_its_launcher_does_not() -> None:
    job = worlds(LAYOUTS["2x2"])
    place = job[0].hub
    assert place is not None and place.descriptor is not None
    os.close(place.descriptor)  # as in the second world of a process
    results = meet([replace(world, hub=replace(place, host="localhost")) for world in job.values()])
    assert all(isinstance(result, Gathered) for result in results.values()), results


def test_a_port_that_is_taken_is_named_by_rank_0() -> None:
    job = worlds([[0], [1]])
    place = job[0].hub
    assert place is not None and place.descriptor is not None
    with socket.socket(fileno=place.descriptor):
        results = meet([replace(job[0], hub=replace(place, descriptor=None))])
    assert f"rank 0 cannot listen on port {place.port}" in str(results[0])
    assert "ENGINE_HUB" in str(results[0])


def test_hosts_with_other_processors_use_the_best_kernels_of_all() -> None:
    """The hosts support different kernels; all ranks use the best that every host supports."""
    have = {0: ["plain", "avx2", "avx512"], 1: ["plain", "avx2", "avx512"], 2: ["plain", "avx2"], 3: ["plain", "avx2"]}
    results = meet(
        list(worlds(LAYOUTS["2x2"]).values()),
        builds=lambda world: {**BUILD, "kernels": have[world.rank][-1]},
        levels=lambda world: have[world.rank],
    )
    assert [result.kernels for result in results.values()] == ["avx2"] * 4


def test_equal_hosts_keep_their_kernels() -> None:
    results = meet(list(worlds(LAYOUTS["2x2"]).values()), levels=lambda world: ["plain", "avx2"])
    assert [result.kernels for result in results.values()] == [None] * 4


def test_all_differences_of_all_hosts_are_told_to_all_ranks() -> None:
    """One error lists the differences of layout, protocol and kernels, with the ranks and hosts concerned."""

    def builds(world: World) -> dict[str, str | int]:
        return {**BUILD, **{1: {"layout": "xyz"}, 3: {"protocol": 2}, 2: {"kernels": "plain"}}.get(world.rank, {})}

    told = texts(meet(list(worlds(LAYOUTS["2x2"]).values()), builds=builds))
    assert len(told) == 1
    text = told.pop()
    assert text.startswith(f"{IncompatibleRanksError.__name__}: the ranks cannot work together")
    assert "rank 1 on" in text
    assert "has layout xyz, rank 0 has layout abc: their engines are built from different sources" in text
    assert "has protocol 2, rank 0 has protocol 1" in text
    assert "has kernels plain, rank 0 has kernels avx2: set the same ENGINE_KERNELS" in text


def test_a_rank_on_two_hosts_is_refused() -> None:
    job = worlds([[0, 3], [1, 2]])
    ranks = [*(job[rank] for rank in (0, 3, 1)), replace(job[2], rank=3)]
    told = texts(meet(ranks))
    assert len(told) == 1
    assert "two processes say they are rank 3: pid" in told.pop()


def test_two_leaders_of_one_rank_are_refused() -> None:
    job = worlds([[0], [1], [2]])
    told = texts(meet([job[0], job[1], replace(job[1], host="other")]))
    assert len(told) == 1
    assert "two processes say they are rank 1: pid" in told.pop()


def test_worlds_of_different_size_are_refused() -> None:
    job = worlds([[0], [1]])
    told = texts(meet([job[0], replace(job[1], size=3)]))
    assert len(told) == 1
    assert "belongs to a world of 3, rank 0 to one of 2" in told.pop()


def test_a_launcher_that_does_not_count_local_ranks_by_ranks_is_refused() -> None:
    job = worlds([[0], [2, 1]])
    told = texts(meet(list(job.values())))
    assert len(told) == 1
    text = told.pop()
    assert "rank 2 says it is the first on" in text and "where rank 1 is too" in text


def test_messages_call_a_host_as_the_user_does() -> None:
    named = [
        [replace(world, host_name=f"pod-{world.rank}") for world in worlds(crews).values()]
        for crews in ([[0], [2, 1]], [[0, 1], [2, 3]])
    ]
    assert "rank 2 says it is the first on pod-2 (local rank 0)" in texts(meet(named[0])).pop()
    (text,) = texts(meet(named[1][:3], timeout=2.0))
    assert "rank 3 did not come within 2 s" in text and f"on {socket.gethostname()}" not in text and "pod-2" in text


def test_whoever_does_not_come_is_named_with_the_host_that_waits_for_it() -> None:
    job = worlds([[0, 1], [2, 3], [4]])
    told = texts(meet([job[rank] for rank in (0, 1, 2, 4)], timeout=3.0))
    assert len(told) == 1
    text = told.pop()
    assert "rank 3 did not come within 3 s (ENGINE_START_TIMEOUT)" in text
    assert "rank 2 came, 1 of its 2 processes did not" in text


@pytest.mark.parametrize(
    ("present", "missing", "others"),
    [((0, 1), "ranks 2-4", "the other hosts"), ((0, 1, 2, 3), "rank 4", "the remaining hosts")],
)
def test_hosts_that_do_not_come_are_named_by_their_ranks(present: tuple[int, ...], missing: str, others: str) -> None:
    job = worlds([[0, 1], [2, 3], [4]])
    told = texts(meet([job[rank] for rank in present], timeout=2.0))
    assert len(told) == 1
    text = told.pop()
    assert f"{missing} did not come within 2 s" in text
    why = f"nobody from {others} has called: they are still importing, or the network keeps them from"
    assert why in text and f"at 127.0.0.1:{job[0].hub.port}, where" in text


def test_without_rank_0_a_host_says_where_it_looked() -> None:
    job = worlds([[0], [1, 2]])
    place = job[0].hub
    assert place is not None and place.descriptor is not None
    os.close(place.descriptor)
    told = texts(meet([job[1], job[2]], timeout=2.0))
    assert len(told) == 1
    text = told.pop()
    assert "rank 0 did not come within 2 s" in text and "rank 1 on" in text
    assert f"127.0.0.1:{place.port}, on the loopback of this host: Connection refused" in text


def test_a_host_name_that_nobody_knows_is_named() -> None:
    job = worlds([[0], [1]])
    assert job[0].hub is not None and job[0].hub.descriptor is not None
    os.close(job[0].hub.descriptor)
    told = texts(meet([replace(job[1], hub=replace(job[0].hub, host="no.such.host.invalid"))], timeout=0.3))
    assert "no.such.host.invalid: no such host" in told.pop()


def test_a_rank_0_that_is_not_reached_is_told_soon(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub_client, "_SOON", 0.2)
    job = worlds([[0], [1]])
    assert job[0].hub is not None and job[0].hub.descriptor is not None
    os.close(job[0].hub.descriptor)
    meet([replace(job[1], hub=replace(job[0].hub, host="no.such.host.invalid"))], timeout=1.0)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "has not reached rank 0 at no.such.host.invalid" in told[0] and "may take 1 s" in told[0]
    assert told[0].endswith("\n  no.such.host.invalid: no such host (Name or service not known)")


@pytest.mark.parametrize("change", [{"secret": "t"}, {"job": "another"}], ids=["secret", "job"])
def test_who_does_not_know_the_secret_is_refused_and_named(
    change: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    job = worlds([[0], [1]])
    results = meet([job[0], replace(job[1], **change)], timeout=3.0)
    early = [record for record in caplog.records if "does not know this job's secret" in record.getMessage()]
    assert len(early) == 1 and early[0].created < time.time() - 0.5, "it is said at once, not when time is over"
    assert "does not know this job's secret" in str(results[1])
    assert "rank 1 did not come within 3 s" in str(results[0])
    assert "somebody at 127.0.0.1 does not know this job's secret" in str(results[0])
    assert "has called" not in str(results[0])


def test_a_hub_that_is_slow_to_answer_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    welcome = hub.Hub._handle_connection

    def slow(self: hub.Hub, link: Connection, greeting: dict[str, Any]) -> Coroutine[None] | None:
        be_late(0.5)
        return welcome(self, link, greeting)

    monkeypatch.setattr(hub_client, "GRACE", 0.1)
    monkeypatch.setattr(hub.Hub, "_handle_connection", slow)
    results = meet(list(worlds([[0], [1], [2]]).values()))
    assert all(isinstance(result, Gathered) for result in results.values()), results


def test_a_stranger_who_says_nothing_costs_seconds_however_late_rank_0_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round tries each address, and gives none of them longer than 20 s."""
    asked: list[tuple[str, float]] = []

    def call(address: Address, *arguments: Any) -> Coroutine[None]:
        asked.append((address.host, arguments[-1].seconds_left()))
        raise TimeoutError
        yield

    monkeypatch.setattr(hub_client, "connect", call)
    world = World(1, 2, 0, 1, "key", "s", "test", HubAddress("127.0.0.2", 9, others=("127.0.0.1",)), "1")
    made = hub_client.HubClient(world, Patience(600.0), 600.0, None, 1)
    steps = made._reach_hub()
    for _ in range(10):
        next(steps)
    made.close()
    assert [host for host, _ in asked] == ["127.0.0.2", "127.0.0.1"] * 10
    assert 5.0 < max(seconds for _, seconds in asked) <= 20.0


@pytest.mark.parametrize("late", [False, True], ids=["", "calls_a_closed_door"])
def test_memory_that_one_host_cannot_make_is_told_to_all(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader gets the error too if it connects to the failing host late, before the hub has told it the reason."""
    agree, open_lane = local_server.LocalServer._make_memory, hub_client.HubClient._open_lane

    def without_memory(self: local_server.LocalServer, hellos: Any) -> tuple[int, int]:
        def create() -> tuple[int, int]:
            raise RendezvousError("rank 2 cannot make the memory")

        if self.world.rank == 2:
            self.options = replace(self.options, create=create)
        return agree(self, hellos)

    def opens_late(self: hub_client.HubClient, *args: Any) -> Coroutine[None]:
        be_late(0.3)
        yield from open_lane(self, *args)

    monkeypatch.setattr(local_server.LocalServer, "_make_memory", without_memory)
    if late:
        monkeypatch.setattr(hub_client.HubClient, "_open_lane", opens_late)
    told = texts(meet(list(worlds([[0, 1], [2, 3], [4]]).values())))
    assert told == {"RendezvousError: rank 2 cannot make the memory"}


def test_an_interface_that_this_host_has_not_is_named_by_all_its_ranks() -> None:
    job = worlds([[0], [1]])
    results = meet([job[1]], interface="nosuch0", timeout=3.0)
    assert "ENGINE_INTERFACE: this host has no interface nosuch0; it has lo (127.0.0.1)" in str(results[1])
    assert job[0].hub is not None and job[0].hub.descriptor is not None
    os.close(job[0].hub.descriptor)


def test_ranks_that_want_lanes_of_different_width_are_refused() -> None:
    results = meet(list(worlds([[0, 1], [2]]).values()), sockets=lambda world: 2 if world.rank == 1 else 4)
    for error in results.values():
        assert "has sockets_per_lane 2, rank 0 has sockets_per_lane 4: set the same ENGINE_SOCKETS_PER_LANE" in str(
            error
        )


def test_an_interface_may_be_chosen() -> None:
    results = meet(list(worlds(LAYOUTS["2x2"]).values()), interface="lo", look=speak_through_lanes)
    assert all(isinstance(result, Gathered) for result in results.values()), results


def strangers(address: tuple[str, int], stop: threading.Event, junk: bytes, seen: list[None]) -> None:
    """Connect over and over, send some bytes, and stay for a while."""
    held: list[socket.socket] = []
    while not stop.is_set():
        stranger = socket.socket()
        stranger.settimeout(1.0)
        try:
            stranger.connect(address)
            stranger.sendall(junk)
        except OSError:
            stranger.close()
            stop.wait(0.001)
            continue
        held.append(stranger)
        if len(held) > 100:
            held.pop(0).close()
        seen.append(None)
    for stranger in held:
        stranger.close()


@pytest.mark.slow
def test_thousands_of_strangers_neither_break_nor_stall_the_others() -> None:
    """Strangers send junk, silence or half a message, before the last leader comes and while it does."""
    job = worlds([[0, 1], [2, 3]])
    place = job[0].hub
    assert place is not None
    stop = threading.Event()
    seen: list[None] = []
    junk = (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\x40half", b"\xff" * 5000)
    threads = [threading.Thread(target=strangers, args=((place.host, place.port), stop, text, seen)) for text in junk]
    results: dict[int, Any] = {}
    waiting = threading.Thread(
        target=lambda: results.update(meet([job[rank] for rank in range(4) if rank != 2], timeout=60.0))
    )
    waiting.start()
    for thread in threads:
        thread.start()
    until(lambda: len(seen) > 2000, "thousands of strangers have connected", 120.0)
    results.update(meet([job[2]], timeout=60.0))
    waiting.join()
    stop.set()
    for thread in threads:
        thread.join()
    assert all(isinstance(result, Gathered) for result in results.values()), results
