"""Ranks on several hosts: each has its own control segment, and connections to the others.

Here hosts are segments in one process, and connections are socket pairs whose bytes a test can cut, block and forge.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import os
import random
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import engine
from engine.native import core, setup

from ..waiting import be_late, measured, until
from .thread_world import KNOBS, SETTINGS, ThreadWorld, connections

LAYOUTS = [(0, 1), (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 1), (0, 0, 1, 0, 2, 1, 0)]
layouts = pytest.mark.parametrize("hosts", LAYOUTS, ids=lambda hosts: "".join(map(str, hosts)))


HEAD = struct.Struct("=IHHiIQ")  # head of a frame: payload bytes, type, padding, rank, offset, position
LEFT, SLOT, PROGRESS, REQUESTS, SCHEDULE, WORDS, VERDICT = range(1, 8)  # types of frames
Forge = Callable[[list[int], bytearray], None]


class Cables:
    """Makes connected sockets, and keeps a second descriptor of each end.

    With `forge`, every frame passes through it, which may change the head's numbers and the payload.
    """

    def __init__(self, buffer: int | None = None, forge: Forge | None = None) -> None:
        self.buffer = buffer
        self.forge = forge
        self.ends: list[tuple[socket.socket, socket.socket]] = []
        self.pumps: list[threading.Thread] = []

    def __call__(self) -> tuple[socket.socket, socket.socket]:
        ends = socket.socketpair()
        if self.forge is not None:
            (one, here), (there, other) = ends, socket.socketpair()
            ends = one, other
            both = Pump(here, there, self.forge), Pump(there, here, self.forge)
            self.pumps += [threading.Thread(target=pump.run) for pump in both]
            for pump in self.pumps[-2:]:
                pump.start()
        for end in ends:
            if self.buffer is not None:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.buffer)
        self.ends.append((ends[0].dup(), ends[1].dup()))
        return ends

    def __enter__(self) -> Cables:
        return self

    def __exit__(self, *_: object) -> None:
        for end in itertools.chain(*self.ends):
            end.close()
        for pump in self.pumps:
            pump.join()


class Pump:
    """Forwards frames from one socket to another until the first ends."""

    def __init__(self, source: socket.socket, target: socket.socket, forge: Forge) -> None:
        self.source, self.target, self.forge = source, target, forge

    def read(self, nbytes: int) -> bytearray:
        data = bytearray()
        while len(data) < nbytes:
            came = self.source.recv(nbytes - len(data))
            if not came:
                raise EOFError
            data += came
        return data

    def run(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                head = list(HEAD.unpack(self.read(HEAD.size)))
                payload = self.read(head[0])
                self.forge(head, payload)
                self.target.sendall(HEAD.pack(*head) + payload)
        for end, how in ((self.source, socket.SHUT_RD), (self.target, socket.SHUT_WR)):
            with contextlib.suppress(OSError):
                end.shutdown(how)


def results(rank: int, size: int) -> list[str]:
    """Digests of the results of many operations."""
    generator = np.random.default_rng(rank)
    found: list[Any] = []
    for dtype in ("float16", "float32", "float64", "int8", "int64", "bool"):
        for op in (engine.Sum, engine.Average, engine.Max, engine.Product):
            if dtype == "bool" and op == engine.Average:
                continue
            for count in (1, 777, 70_000):
                tensor = (generator.standard_normal(count) * 3).astype(dtype)
                found.append(engine.allreduce(tensor, op, f"{dtype} {op} {count}"))
    vectors = [generator.standard_normal(count).astype(np.float32) for count in (3, 5000, 400_000)]
    found += engine.grouped_allreduce(vectors, engine.Average, "group")
    found += engine.synchronize(engine.grouped_allgather_async([vectors[0], vectors[1][: 10 * (rank + 1)]], "rows"))
    if size & (size - 1) == 0:
        found += [engine.allreduce(each, engine.Adasum, f"adasum {len(each)}") for each in vectors]
    found.append(engine.reducescatter(vectors[2], engine.Sum, "scatter"))
    splits = [(rank + k) % 3 * 1000 for k in range(size)]
    found += list(engine.alltoall(vectors[2][: sum(splits)], splits, "to all"))
    found += [engine.broadcast(vectors[2], root, f"from {root}") for root in range(size)]
    found.append(engine.sparse_allreduce(vectors[0]) if hasattr(engine, "sparse_allreduce") else vectors[0])
    return [hashlib.sha256(np.ascontiguousarray(each).tobytes()).hexdigest() for each in found]


@layouts
def test_bits_are_those_of_one_host(hosts: tuple[int, ...]) -> None:
    """Holds for any fusion threshold, chunk size and number of sockets; a host's ranks need not be consecutive."""
    size = len(hosts)
    with ThreadWorld(size) as world:
        expected = world.run(lambda rank: results(rank, size))
    for settings in (
        {},
        {"fusion_threshold": 0, "chunk_bytes": 4096, "sockets_per_lane": 2},
        {"cycle_time_ms": 0.0, "chunk_bytes": 1 << 20, "sockets_per_lane": 4},
        {"fusion_threshold": 333_333, "chunk_bytes": 100_001, "sockets_per_lane": 3},
    ):
        with ThreadWorld(size, hosts, **settings) as world:
            assert world.run(lambda rank: results(rank, size)) == expected


IN_ROW = [(0, 1), (0, 0, 1, 1), (0, 1, 1, 1), (0, 0, 0, 0, 1, 1, 2), (0, 1, 2, 3, 4, 5, 6, 7)]
in_row = pytest.mark.parametrize("hosts", IN_ROW, ids=lambda hosts: "".join(map(str, hosts)))


@pytest.mark.sample(2)
@in_row
def test_sums_that_pass_from_host_to_host_have_the_bits_of_one_host(hosts: tuple[int, ...]) -> None:
    """Neither fusion, chunks, nor the number of hosts and ranks change a bit."""
    size = len(hosts)
    with ThreadWorld(size) as world:
        expected = world.run(lambda rank: results(rank, size))
    for settings in ({"chunk_bytes": 100_001}, {"fusion_threshold": 0, "chunk_bytes": 4096}):
        with ThreadWorld(size, hosts, between_hosts="chain", **settings) as world:
            assert world.run(lambda rank: results(rank, size)) == expected
            algorithms = {row["algorithm"] for row in world.engines[0].history()}
            assert "chain" in algorithms and "two-shot" not in {
                row["algorithm"] for row in world.engines[0].history() if row["kind"] == "allreduce"
            }


@pytest.mark.sample(2)
@layouts
def test_a_chain_of_any_layout_has_bits_of_its_own_whatever_is_fused(hosts: tuple[int, ...]) -> None:
    size, found = len(hosts), []
    for settings in ({}, {"fusion_threshold": 77_777, "chunk_bytes": 65_537}):
        with ThreadWorld(size, hosts, between_hosts="chain", **settings) as world:
            found.append(world.run(lambda rank: results(rank, size)))
    assert found[0] == found[1]


@pytest.mark.sample(3)
@layouts
@pytest.mark.parametrize("between", ["chain", "ring"])
def test_sums_between_hosts_against_numpy(hosts: tuple[int, ...], between: str) -> None:
    """Sums that are exact in any order are exact; rounded ones are close. All ranks have equal bits."""
    size = len(hosts)
    counts = [8193, 16384, 65_537, 300_000]

    def work(rank: int) -> list[bytes]:
        found = []
        for count in counts:
            mine = [np.random.default_rng(100 * count + r).integers(-100, 100, count) for r in range(size)]
            for dtype in ("int8", "int32", "int64", "float16", "float32", "float64"):
                tensors = [each.astype(dtype) for each in mine]
                total = engine.allreduce(tensors[rank], engine.Sum, f"{dtype} {count}")
                with np.errstate(over="ignore"):
                    assert (total == np.sum(np.stack(tensors), 0, dtype=dtype)).all(), (dtype, count)
                mean = engine.allreduce(tensors[rank], engine.Average, f"mean {dtype} {count}")
                exact = np.sum(np.stack(mine), 0) / size
                want = np.trunc(exact) if np.dtype(dtype).kind == "i" else exact
                np.testing.assert_allclose(mean.astype(np.float64), want, rtol=1e-3, atol=0)
                assert (engine.allreduce(tensors[rank], engine.Max, f"max {dtype} {count}") == np.max(tensors, 0)).all()
                found.append(mean.tobytes())
            half = np.full(count, 60_000, np.float16)  # its sum exceeds float16's range
            assert (engine.allreduce(half, engine.Average, f"high {count}") == 60_000).all()
            flags = np.arange(count) % size == rank
            assert engine.allreduce(flags, engine.Sum, f"any {count}").all()
        return found

    with ThreadWorld(size, hosts, between_hosts=between) as world:
        found = world.run(work)
        assert between in {row["algorithm"] for row in world.engines[0].history()}
    assert all(each == found[0] for each in found)


def test_ranks_without_a_tensor_and_groups_in_a_chain() -> None:
    hosts = (0, 0, 1, 1, 1, 2)

    def work(rank: int) -> None:
        for turn in range(3):
            if rank == (turn + 4) % 6:
                engine.join()
                continue
            tensors = [
                np.full(count, rank + 1.0, dtype)
                for count in (5, 70_001)
                for dtype in (np.float16, np.float32, np.int8)
            ]
            want = 21 - ((turn + 4) % 6 + 1)
            for kinds in ((0, 1, 2, 3, 4, 5), (1, 4), (0, 3)):  # dtypes whose sums grow differently, and alike
                group = [tensors[k] for k in kinds]
                for total in engine.grouped_allreduce(group, engine.Sum, f"group {turn} {kinds}"):
                    assert (total == want).all()
            mixed = [engine.grouped_allreduce_async(tensors[k::3], engine.Sum, f"fused {turn} {k}") for k in range(3)]
            for handle in mixed:
                for total in engine.synchronize(handle):
                    assert (total == want).all()
            big = engine.allreduce(np.full(200_000, rank + 1.0), engine.Sum, f"big {turn}", prescale_factor=0.5)
            assert (big == want / 2).all()
            engine.join()

    for between in ("chain", "ring"):
        with ThreadWorld(len(hosts), hosts, between_hosts=between) as world:
            world.run(work)


def test_what_travels_how_is_decided_by_the_bytes_of_the_busiest_host() -> None:
    """Small entries travel directly; so do halves, whose sums are twice as large, and single ranks of each host."""

    def work(rank: int) -> None:
        for dtype, count in ((np.float32, 1 << 20), (np.float32, 1 << 16), (np.float16, 1 << 21)):
            engine.allreduce(np.ones(count, dtype), engine.Sum, f"{np.dtype(dtype)} {count}")

    expected = {
        (0, 0, 1, 1): ["chain", "two-shot", "two-shot"],
        (0, 0, 0, 0, 1, 1, 1, 1): ["chain", "two-shot", "chain"],
        (0, 1, 0, 1): ["two-shot"] * 3,
        (0, 1): ["two-shot"] * 3,
    }
    for hosts, algorithms in expected.items():
        with ThreadWorld(len(hosts), hosts) as world:
            world.run(work)
            rows = [row for row in world.engines[0].history() if row["name"].startswith("float")]
            assert [row["algorithm"] for row in rows if row["type"] == "batch"] == algorithms, hosts


@pytest.mark.sample(1)
@pytest.mark.parametrize(("buffer", "sockets"), [(1, 1), (20_000, 1), (1, 8), (20_000, 3)])
def test_connections_that_take_little_at_a_time(buffer: int, sockets: int) -> None:
    """Frame heads and payloads are sent and received in pieces."""

    def work(rank: int) -> list[str]:
        return results(rank, 3)

    with (
        Cables(buffer) as cables,
        ThreadWorld(3, (0, 1, 1), cables, sockets_per_lane=sockets) as world,
        ThreadWorld(3) as alone,
    ):
        assert world.run(work) == alone.run(work)


@pytest.mark.slow
def test_how_many_sockets_of_a_lane_are_used_changes_at_any_time() -> None:
    """The knob is turned while large entries run; different buffer sizes make a lane's connections diverge."""
    total = np.arange(1_500_000, dtype=np.float32) * 10

    def work(rank: int) -> None:
        mine = np.arange(1_500_000, dtype=np.float32) * (rank + 1)
        for turn in range(60):
            if rank == 0:
                engine.session.runtime.current_engine().set_knobs(sockets_per_lane=1 + turn * 5 % 8)
            handles = [engine.allreduce_async(mine, engine.Sum, f"large {k}") for k in range(2)]
            assert (engine.allreduce(np.full(9, rank), engine.Sum, "small") == 6).all()
            for handle in handles:
                assert (handle.wait() == total).all()
        assert engine.session.runtime.current_engine().knobs()["sockets_per_lane"] <= 8

    with Cables() as cables, ThreadWorld(4, (0, 1, 1, 0), cables, sockets_per_lane=6) as world:
        for number, ends in enumerate(cables.ends):
            for end in ends:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, (1, 1 << 20, 50_000)[number % 3])
        world.run(work)
        assert {native.sockets_per_lane for native in world.engines} == {6}


def test_process_sets_on_some_hosts() -> None:
    hosts = (0, 1, 0, 1, 2)
    sets = [(1, 3), (0, 1, 2), (3, 1, 4), (0, 1, 2, 3, 4), (2, 4)]

    def given(ranks: tuple[int, ...]) -> list[dict[str, Any]]:
        counted: dict[int, int] = {}
        places = [counted.setdefault(hosts[rank], len(counted)) for rank in ranks]
        return connections(places, socket.socketpair, 2) if len(counted) > 1 else [{} for _ in ranks]

    links = [given(ranks) for ranks in sets]

    def work(rank: int) -> None:
        native = engine.session.runtime.current_engine()
        for number, ranks in enumerate(sets):
            mine = links[number][ranks.index(rank)] if rank in ranks else {}
            part = native.form(ranks, 3000 + 10 * number + rank, mine.get("lanes"), mine.get("trunks"))
            if part is None:
                continue
            for count in (1, 1000, 300_000):
                tensor = np.full(count, rank + 1.0, np.float32)
                part.allreduce(tensor, tensor, f"of {count}", engine.Sum, 1.0, 1.0, True).wait()
                assert (tensor == sum(each + 1 for each in ranks)).all()
            assert part.join() in ranks
            part.close(5.0)
        native.barrier("the end", True).wait()

    with ThreadWorld(len(hosts), hosts) as world:
        world.run(work)


@pytest.mark.slow
def test_more_names_than_there_are_ids() -> None:

    def work(rank: int) -> None:
        for begin in range(0, 20_000, 1000):
            handles = [
                engine.allreduce_async(np.full(2, rank + k), engine.Sum, f"name {k}")
                for k in range(begin, begin + 1000)
            ]
            for k, handle in enumerate(handles, begin):
                assert (handle.wait() == 3 * k + 3).all()
            assert (engine.allreduce(np.full(2, rank), engine.Sum, "always") == 3).all()

    with ThreadWorld(3, (0, 1, 1)) as world:
        world.run(work)


@pytest.mark.slow
def test_ids_are_used_again_while_ranks_join_and_what_they_tell_comes_late() -> None:
    """A readiness bit still in transit when its ID is reset would stand for another tensor, too early.

    Each rank in turn submits fewer of the new names, which come in waves of more than there are IDs, and joins.
    """
    wave, waves = 3000, 7

    def work(rank: int) -> None:
        for turn in range(waves):
            left = turn % 3 == rank
            count = wave // 2 if left else wave
            for begin in range(0, count, 500):
                names = range(begin, begin + 500)
                handles = [engine.allreduce_async(np.full(2, k), engine.Sum, f"{turn} {k}") for k in names]
                for k, handle in zip(names, handles, strict=True):
                    got = handle.wait()
                    assert (got == (3 * k if left or k < wave // 2 else 2 * k)).all(), (turn, k, got)
            engine.join()

    with Cables(forge=delays(0.02, 0.005)) as cables, ThreadWorld(3, (0, 1, 1), cables) as world:
        world.run(work)


def test_what_a_rank_stood_in_for_is_not_taken_for_what_it_brings_behind_a_join() -> None:
    """Its bits are sent before the message that it has passed the join, however late they come."""

    def work(rank: int) -> None:
        for turn in range(60):
            left = turn % 3 == rank
            for k in range(0 if left else 8):
                assert engine.allreduce(np.ones(2), engine.Sum, f"again {k}")[0] == 2
            engine.join()
            if left:
                be_late(0.01)
            for k in range(8):
                assert engine.allreduce(np.ones(2), engine.Sum, f"again {k}")[0] == 3

    with Cables(forge=delays(0.3, 0.003)) as cables, ThreadWorld(3, (0, 1, 1), cables) as world:
        world.run(work)


def delays(share: float, seconds: float) -> Forge:
    """Delay a share of the frames that carry words of ranks' pages, and all frames behind them."""
    draw = random.Random(15)

    def forge(head: list[int], payload: bytearray) -> None:
        if head[1] == WORDS and draw.random() < share:
            be_late(seconds)

    return forge


def test_no_wake_up_is_late_on_several_hosts() -> None:
    """A sleeping rank is woken by data from another host, not only by its check at the next tick."""

    def late_wakes(rank: int) -> int:
        native = engine.session.runtime.current_engine()
        before = native.counters()["late_wakes"]
        for step in range(300):
            handles = [engine.allreduce_async(np.ones(size), engine.Sum, f"{size}") for size in (1, 5000, 200_000)]
            engine.barrier()
            assert all(handle.wait()[0] == 5 for handle in handles), step
        return native.counters()["late_wakes"] - before

    def measure() -> None:
        with ThreadWorld(5, (0, 0, 1, 1, 2)) as world:
            assert world.run(late_wakes) == [0] * 5

    # A rank suspended between a change and its ring has lost nothing, but this must be rare.
    measured(measure)


def test_ranks_join_at_different_times() -> None:
    def work(rank: int) -> int:
        for turn in range(3):
            for step in range(5 * (1 + (rank + turn) % 4)):
                got = engine.allreduce(np.ones(1000), engine.Sum, f"step {step % 7}")
                assert 1 <= got[0] <= 4
            last = engine.join()
        return last

    with ThreadWorld(4, (0, 1, 1, 2)) as world:
        assert len(set(world.run(work))) == 1


MANY = (0, 0, 0, *range(1, 11))  # more hosts than rank 0 has trunks to: ranks 1 and 2 share them


def test_of_many_hosts_other_ranks_than_the_coordinators_have_the_trunks() -> None:
    """Every rank's messages reach all hosts, whichever rank has the trunks to them: names, joins, errors, and waits."""
    size = len(MANY)

    def work(rank: int) -> list[int]:
        joined = []
        for turn in range(3):
            for step in range(2 + (rank + turn) % 4):
                got = engine.allreduce(np.ones(100), engine.Sum, f"step {step}")
                assert 1 <= got[0] <= size
            joined.append(engine.join())
        handles = [engine.allreduce_async(np.full(3, rank + k), engine.Sum, f"name {k}") for k in range(300)]
        for k, handle in enumerate(handles):
            assert (handle.wait() == size * k + 78).all()
        with pytest.raises(engine.errors.MismatchError, match="rank 7 sent"):
            engine.allreduce(np.ones(3 + (rank == 7)), engine.Sum, "uneven")
        big = engine.allreduce(np.full(100_000, rank, np.float32), engine.Sum, "big")
        assert (big == 78).all()
        return joined

    given = connections(MANY, socket.socketpair)
    assert [len(each["trunks"]) for each in given] == [0, 5, 5, *[1] * 10]
    for each in given:
        for descriptor in (*itertools.chain(*each["lanes"].values()), *each["trunks"].values()):
            os.close(descriptor)
    for cycle_time_ms in (0.0, 5.0):
        with ThreadWorld(size, MANY, cycle_time_ms=cycle_time_ms) as world:
            told = world.run(work)
        assert all(each == told[0] for each in told), told


@pytest.mark.slow
def test_more_requests_than_a_ring_holds_from_hosts_of_a_shared_trunk() -> None:
    """The rank that has the trunk reports that requests were read; rank 0, which reads them, wakes it."""

    def work(rank: int) -> None:
        handles = [engine.allreduce_async(np.ones(1), engine.Sum, f"{'long' * 50} {k}") for k in range(2000)]
        for handle in handles:
            assert handle.wait()[0] == len(MANY)

    with ThreadWorld(len(MANY), MANY) as world:
        world.run(work)


def test_a_mismatch_is_told_on_every_host() -> None:
    def work(rank: int) -> str:
        with pytest.raises(engine.errors.MismatchError) as caught:
            engine.allreduce(np.ones(3 + (rank == 2)), engine.Sum, "uneven")
        assert (engine.allreduce(np.ones(3), engine.Sum, "even") == 4).all()
        return str(caught.value)

    with ThreadWorld(4, (0, 1, 1, 0)) as world:
        assert len(set(world.run(work))) == 1


# ---- connections that fail


def until_it_ends(rank: int) -> str:
    tensor = np.ones(50_000, np.float32)
    for turn in range(1_000_000):
        try:
            engine.allreduce_(tensor, engine.Max, f"loop {turn // 3}")
        except engine.errors.CollectiveError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def told_after(
    hosts: tuple[int, ...],
    harm: Callable[[list[tuple[socket.socket, socket.socket]]], None],
    sockets: int = 1,
    forge: Forge | None = None,
) -> list[str]:
    """Error of each rank after `harm` is done to the cables of a working world."""
    with Cables(forge=forge) as cables:
        world = ThreadWorld(len(hosts), hosts, cables, sockets_per_lane=sockets)
        works = threading.Barrier(len(hosts) + 1, timeout=60)

        def work(rank: int) -> str:
            engine.allreduce_(np.ones(10), engine.Sum, "begins")
            works.wait()
            return until_it_ends(rank)

        def spoil() -> None:
            works.wait()
            harm(cables.ends)

        vandal = threading.Thread(target=spoil)
        vandal.start()
        try:
            return world.run(work)
        finally:
            vandal.join()
            world.run(lambda rank: world.engines[rank].close(1.0))
            for descriptor in world.pages:
                os.close(descriptor)


@pytest.mark.parametrize("cable", range(3))
def test_a_cut_cable_ends_the_world_on_every_host(cable: int) -> None:
    """Cables of hosts (0, 1, 1): the lanes of ranks 0 and 1, and 0 and 2, and the trunk of 0 and 1."""
    told = told_after((0, 1, 1), lambda ends: ends[cable][0].shutdown(socket.SHUT_RDWR))
    for text in told:
        assert text.startswith("RankDiedError: rank ") and "connection" in text, told


@pytest.mark.parametrize("host", [1, 10])
def test_a_cut_trunk_that_rank_0_has_not_is_told_by_who_has_it(host: int) -> None:
    told = told_after(MANY, lambda ends: ends[host - 11][0].shutdown(socket.SHUT_RDWR))
    keeper = 1 + host % 2
    texts = {text.split(": its connection")[0] for text in told}
    assert texts <= {f"RankDiedError: rank {keeper} died", f"RankDiedError: rank {host + 2} died"}, told


@pytest.mark.parametrize("cable", range(3))
def test_one_cut_socket_of_a_lane_is_a_cut_lane(cable: int) -> None:
    told = told_after((0, 1), lambda ends: ends[cable][0].shutdown(socket.SHUT_RDWR), sockets=3)
    for text in told:
        assert text.startswith("RankDiedError: rank ") and "connection ended" in text, told


@pytest.mark.sample(5)
@pytest.mark.parametrize("seed", range(30))
def test_nonsense_on_a_cable_ends_the_world_and_nothing_else(seed: int) -> None:
    """Covers frames that are too long, of no type, of another's page, beyond a slot, or stale; and other bytes."""
    draw = random.Random(seed)

    def lie(ends: list[tuple[socket.socket, socket.socket]]) -> None:
        end = draw.choice(draw.choice(ends))
        length = draw.choice([0, 8, 16, 24, 64, 1032, 1 << 20, 1 << 31])
        kind, offset = draw.choice([*range(9), 60_000]), draw.choice([0, 4, 8, 1 << 20, (1 << 32) - 8])
        rank, position = (
            draw.choice([-2, -1, 0, 1, 2, 3, 1 << 30]),
            draw.choice([0, 1, 1 << 20, 1 << 62, (1 << 64) - 8]),
        )
        frame = struct.pack("=IHHiIQ", length, kind, 0, rank, offset, position) + draw.randbytes(min(length, 4096))
        for data in (frame, draw.randbytes(4096)):
            with contextlib.suppress(OSError):  # The connection is full, or has ended already.
                end.send(data, socket.MSG_DONTWAIT)

    told = told_after((0, 1, 1), lie)
    assert all(text.startswith("Rank") for text in told), told


# ---- failures that are claimed on several hosts


def told_of(hosts: tuple[int, ...], fail: Callable[[int, core.Engine], None], *cut: int) -> list[str]:
    """Error of each rank of a world in which all call `fail` at once, after the cables `cut` have fallen silent.

    The last cables are the trunks.
    """
    with Cables() as cables:
        world = ThreadWorld(len(hosts), hosts, cables)
        works, silent = threading.Barrier(len(hosts), timeout=60), threading.Event()

        def work(rank: int) -> str:
            engine.allreduce_(np.ones(10), engine.Sum, "begins")
            if works.wait() == 0:
                for cable in cut:
                    clog(cables.ends[cable])
                silent.set()
            silent.wait(60)
            fail(rank, world.engines[rank])
            return until_it_ends(rank)

        try:
            return world.run(work)
        finally:
            world.run(lambda rank: world.engines[rank].close(1.0))
            for descriptor in world.pages:
                os.close(descriptor)


def clog(ends: tuple[socket.socket, socket.socket]) -> None:
    """Begin an unfinished frame on a trunk of host 1, in both directions, so that later data is taken for its rest."""
    for rank, end in enumerate(ends):
        end.send(struct.pack("=IHHiIQ", 1 << 16, 6, 0, rank, 0, 0), socket.MSG_DONTWAIT)


def raises(rank: int, native: core.Engine) -> None:
    native.abort(f"rank {rank} raised this")


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1, 1), (0, 1, 2, 1, 2), (0, 1, 2, 3, 3, 2, 1), MANY])
def test_of_failures_in_the_same_moment_one_is_told_everywhere(hosts: tuple[int, ...]) -> None:
    """All ranks raise at a barrier, and all get the same text."""
    for _ in range(10):
        told = told_of(hosts, raises)
        assert len({text.split(" (")[0] for text in told}) == 1, told
        culprit = told[0].removeprefix("RankRaisedError: rank ").split()[0]
        assert all(f"rank {culprit} failed: rank {culprit} raised this" in text for text in told), told


def test_a_host_that_is_not_answered_believes_itself() -> None:
    """The trunk of host 1 is silent at that moment: there are at most two texts, each true."""

    def fail(rank: int, native: core.Engine) -> None:
        if rank:
            raises(rank, native)

    told = told_of((0, 1, 2, 1), fail, -2)
    assert told[1] == told[3] and told[1].startswith(("RankRaisedError: rank 1 ", "RankRaisedError: rank 3 ")), told
    assert told[0] == told[2] and told[0].startswith("Rank"), told


# ---- what another host sends that cannot be

PAD, BATCH, DEFINE, EVICT, ERROR, SKIP, JOINED = range(7)
# Type of an entry (engine_entry, layout.h): a number's offset in it, its format, and an impossible value.
WRONG_ENTRIES = [
    (BATCH, 0, "I", 0), (BATCH, 0, "I", 31), (BATCH, 0, "I", 35), (BATCH, 0, "I", 1 << 31), (BATCH, 4, "B", 7),
    (BATCH, 4, "B", 255), (BATCH, 5, "B", 3), (BATCH, 6, "B", 99), (BATCH, 8, "I", 0), (BATCH, 8, "I", 4),
    (BATCH, 8, "I", 1 << 31), (BATCH, 64, "I", 0), (BATCH, 64, "I", (1 << 20) + 8), (BATCH, 104, "B", 200),
    (BATCH, 105, "B", 90), (BATCH, 106, "B", 7), (BATCH, 107, "B", 9), (BATCH, 136, "B", 255), (BATCH, 144, "I", 14),
    (BATCH, 256, "i", -1), (BATCH, 256, "i", 16384), (BATCH, 96, "Q", 4), (BATCH, 96, "Q", 4095),
    (DEFINE, 72, "i", -1), (DEFINE, 72, "i", 16384),
    (DEFINE, 76, "i", -5), (DEFINE, 76, "i", 1025), (DEFINE, 76, "i", 100), (DEFINE, 104, "B", 6),
    (DEFINE, 144, "I", 99),
]  # fmt: skip
# Likewise for requests (engine_request).
WRONG_REQUESTS = [
    (0, "I", 8), (0, "I", 1 << 30), (0, "I", 999), (4, "H", 1025), (4, "H", 60_000), (8, "q", -1), (24, "I", 8),
    (24, "I", 1 << 31), (32, "B", 6), (33, "B", 77), (34, "B", 7), (35, "B", 5), (64, "B", 100), (65, "B", 9),
    (72, "I", 14),
]  # fmt: skip


# Likewise for words of a rank's page (rank_page): offset, length and value.
WRONG_WORDS = [
    (20, 4, 1), (16, 8, 1 << 40), (16, 4, 0), (28, 4, 0), (40, 4, 1), (48, 4, 1), (48, 4, 1 << 31), (48, 8, 1),
    (64, 4, 1), (128, 4, 1), (136, 8, 1), (240, 8, 5), (240, 8, 8 << 56), (244, 4, 0), (512, 4, 1), (1 << 31, 8, 1),
]  # fmt: skip


def frames_forged(kind: int, change: Callable[[bytearray], bool]) -> list[str]:
    """Error of each rank after the first frame of a type that `change` accepts is changed, once the world works."""
    works = threading.Event()
    done = threading.Event()

    def forge(head: list[int], payload: bytearray) -> None:
        if works.is_set() and head[1] == kind and head[3] >= 0 and not done.is_set() and change(payload):
            done.set()

    told = told_after((0, 1, 1), lambda ends: works.set(), forge=forge)
    assert done.is_set()
    return told


@pytest.mark.parametrize(("kind", "at", "form", "value"), WRONG_ENTRIES)
def test_a_malformed_entry_ends_the_connection_before_anybody_reads_it(
    kind: int, at: int, form: str, value: int
) -> None:
    """A length, a type, an ID or a row of a table is out of bounds."""

    def change(payload: bytearray) -> bool:
        if payload[4] != kind:
            return False
        struct.pack_into(form, payload, at, value)
        return True

    for text in frames_forged(SCHEDULE, change):
        assert "it has sent what no rank can mean" in text or "its connection ended" in text, text


@pytest.mark.parametrize(("at", "form", "value"), WRONG_REQUESTS)
def test_a_malformed_request_ends_the_connection_before_anybody_reads_it(at: int, form: str, value: int) -> None:

    def change(payload: bytearray) -> bool:
        struct.pack_into(form, payload, at, value)
        return True

    for text in frames_forged(REQUESTS, change):
        assert "it has sent what no rank can mean" in text or "its connection ended" in text, text


@pytest.mark.parametrize(("at", "length", "value"), WRONG_WORDS)
def test_a_malformed_word_ends_the_connection_before_anybody_reads_it(at: int, length: int, value: int) -> None:
    """Half a word, a word that its rank does not own, or one used as an index or a length."""

    def change(payload: bytearray) -> bool:
        struct.pack_into("=IIQ", payload, 0, at, length, value)
        return True

    for text in frames_forged(WORDS, change):
        assert "it has sent what no rank can mean" in text or "its connection ended" in text, text


# ---- what a start that fails leaves


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_set_that_cannot_be_formed_closes_the_connections_it_was_given() -> None:
    with ThreadWorld(2, (0, 1)) as world:
        before = descriptors()
        world.run(lambda rank: engine.allreduce(np.ones(3), engine.Sum, "works"))
        given = connections((0, 1), socket.socketpair, 3)

        def work(rank: int) -> None:
            native = engine.session.runtime.current_engine()
            native.abort("enough")
            with pytest.raises(engine.errors.CollectiveError):
                native.form((0, 1), 4000 + rank, given[rank]["lanes"], given[rank]["trunks"])

        world.run(work)
        assert descriptors() == before


def test_an_engine_that_cannot_be_started_closes_the_connections_it_was_given() -> None:
    """Rank 0's segment is of another world, and rank 1 has unequal numbers of connections to the others."""
    gc.collect()
    before = descriptors()
    given = connections((0, 1, 1), socket.socketpair, 2)
    given[1]["lanes"][0].append(os.dup(0))
    given[1]["lanes"][2] = [os.dup(0)]
    for rank, size, error in ((0, 2, engine.errors.EngineError), (1, 3, ValueError)):
        peers = [os.pidfd_open(os.getpid()), -1, -1]
        about = {**SETTINGS, "knobs": KNOBS, **given[rank]}
        with pytest.raises(error):
            core.Engine(rank, 3, setup.create_segment(size, 1), setup.create_arena(), peers, **about)
    for descriptor in (*itertools.chain(*given[2]["lanes"].values()), *given[2]["trunks"].values()):
        os.close(descriptor)
    gc.collect()
    assert descriptors() == before


@pytest.mark.parametrize(("size", "error"), [(1025, engine.errors.EngineError), (3, ValueError), (1, ValueError)])
def test_an_engine_that_is_refused_closes_the_files_it_was_given(size: int, error: type[Exception]) -> None:
    """There are too many ranks, or their number is not that of their processes."""
    gc.collect()
    before = descriptors()
    peers = [os.pidfd_open(os.getpid()), os.pidfd_open(os.getpid())]
    with pytest.raises(error):
        core.Engine(0, size, setup.create_segment(2, 1), setup.create_arena(), peers, **{**SETTINGS, "knobs": KNOBS})
    gc.collect()
    assert descriptors() == before


@pytest.mark.parametrize("late", range(4))
def test_nobody_is_blamed_who_is_only_out_of_sight(late: int) -> None:
    """Rank 0's host knows of all ranks, another one of its own; so a report there names no other."""
    hosts = (0, 0, 1, 1)
    told: dict[int, dict[str, Any]] = {}
    seen = threading.Barrier(4)

    def look(rank: int) -> dict[str, Any] | None:
        (about,) = [
            entry for entry in engine.session.runtime.current_engine().pending() if entry["name"] == "late"
        ] or [None]
        return about

    def work(rank: int) -> None:
        for _ in range(2):  # gives it an ID, by which others see who has submitted it
            engine.allreduce(np.ones(3), engine.Sum, "late")
        if rank != late:
            handle = engine.allreduce_async(np.ones(3), engine.Sum, "late")
            waits = threading.Thread(target=handle.wait)  # an operation without a waiter is reported later
            waits.start()
            known = {r for r in range(4) if r != late and (hosts[rank] == 0 or hosts[r] == 1)}
            until(lambda: set((look(rank) or {"brought": ()})["brought"]) == known, "what others have submitted")
            told[rank] = look(rank) or {}
            seen.wait(60)
            waits.join()
        else:
            seen.wait(60)
            engine.allreduce(np.ones(3), engine.Sum, "late")
        engine.barrier()

    with ThreadWorld(4, hosts) as world:
        world.run(work)
    for rank, about in told.items():
        sees = hosts[rank] == 0 or hosts[late] == 1
        assert about["missing"] == ([late] if sees else None), (rank, about)


def test_sums_by_mpi_without_mpi_are_refused() -> None:
    with pytest.raises(engine.errors.EngineError, match="set lanes=mpi"):
        ThreadWorld(2, (0, 1), between_hosts="mpi").__enter__()
    with ThreadWorld(2, (0, 1)) as world:
        with pytest.raises(engine.errors.EngineError, match="set lanes=mpi"):
            world.engines[0].set_knobs(between_hosts="mpi")
        assert world.engines[0].set_knobs(between_hosts="chain")
    with ThreadWorld(2, between_hosts="mpi") as world:  # on one host nothing travels between hosts
        assert world.run(lambda rank: engine.allreduce(np.ones(100_000), engine.Sum)[0]) == [2.0, 2.0]
