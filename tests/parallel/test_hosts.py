"""Ranks on several hosts: each has its own control segment, and connections to the others.

Here hosts are segments in one process, and connections are socket pairs that a test can cut, clog and lie on.
"""

from __future__ import annotations

import contextlib
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
from engine.native import core

from .thread_world import ThreadWorld, connections

LAYOUTS = [(0, 1), (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 1), (0, 0, 1, 0, 2, 1, 0)]
layouts = pytest.mark.parametrize("hosts", LAYOUTS, ids=lambda hosts: "".join(map(str, hosts)))


class Cables:
    """Makes connected sockets, and keeps a second descriptor of each end."""

    def __init__(self, buffer: int | None = None) -> None:
        self.buffer = buffer
        self.ends: list[tuple[socket.socket, socket.socket]] = []

    def __call__(self) -> tuple[socket.socket, socket.socket]:
        ends = socket.socketpair()
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


def results(rank: int, size: int) -> list[str]:
    """What many operations come to, as digests."""
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
    size = len(hosts)
    with ThreadWorld(size) as world:
        expected = world.run(lambda rank: results(rank, size))
    for settings in ({}, {"fusion_threshold": 0, "chunk_bytes": 4096}, {"cycle_time_ms": 0.0, "chunk_bytes": 1 << 20}):
        with ThreadWorld(size, hosts, **settings) as world:
            assert world.run(lambda rank: results(rank, size)) == expected


@pytest.mark.parametrize("buffer", [1, 20_000])
def test_connections_that_take_little_at_a_time(buffer: int) -> None:
    def work(rank: int) -> list[str]:
        return results(rank, 3)

    with Cables(buffer) as cables, ThreadWorld(3, (0, 1, 1), cables) as world, ThreadWorld(3) as alone:
        assert world.run(work) == alone.run(work)


def test_process_sets_on_some_hosts() -> None:
    hosts = (0, 1, 0, 1, 2)
    sets = [(1, 3), (0, 1, 2), (3, 1, 4), (0, 1, 2, 3, 4), (2, 4)]

    def given(ranks: tuple[int, ...]) -> list[dict[str, Any]]:
        counted: dict[int, int] = {}
        places = [counted.setdefault(hosts[rank], len(counted)) for rank in ranks]
        return connections(places, socket.socketpair) if len(counted) > 1 else [{} for _ in ranks]

    links = [given(ranks) for ranks in sets]

    def work(rank: int) -> None:
        native = engine.runtime.engine()
        for number, ranks in enumerate(sets):
            mine = links[number][ranks.index(rank)] if rank in ranks else {}
            part = native.form(ranks, 3000 + 10 * number + rank, mine.get("lanes"), mine.get("trunks"))
            if part is None:
                continue
            for count in (1, 1000, 300_000):
                tensor = np.full(count, rank + 1.0, np.float32)
                part.allreduce(tensor, tensor, f"of {count}", engine.Sum, 1.0, 1.0, True).wait()
                assert (tensor == sum(each + 1 for each in ranks)).all()
            part.close(5.0)
        native.barrier("the end", True).wait()

    with ThreadWorld(len(hosts), hosts) as world:
        world.run(work)


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
    for _ in range(1_000_000):
        try:
            engine.allreduce_(tensor, engine.Max, "loop")
        except engine.errors.CollectiveError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def told_after(hosts: tuple[int, ...], harm: Callable[[list[tuple[socket.socket, socket.socket]]], None]) -> list[str]:
    """What each rank is told when `harm` is done to the cables of a world that works."""
    with Cables() as cables:
        world = ThreadWorld(len(hosts), hosts, cables)
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
    """Of (0, 1, 1) these are the lanes of ranks 0 and 1, and 0 and 2, and the trunk of 0 and 1."""
    told = told_after((0, 1, 1), lambda ends: ends[cable][0].shutdown(socket.SHUT_RDWR))
    for text in told:
        assert text.startswith("RankDiedError: rank ") and "connection" in text, told


@pytest.mark.parametrize("seed", range(30))
def test_nonsense_on_a_cable_ends_the_world_and_nothing_else(seed: int) -> None:
    """Frames that are too long, of no type, of another's page, beyond a slot, of the past; or bytes of no frame."""
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
            with contextlib.suppress(OSError):  # It is full, or has ended already.
                end.send(data, socket.MSG_DONTWAIT)

    told = told_after((0, 1, 1), lie)
    assert all(text.startswith("Rank") for text in told), told


# ---- failures that are claimed on several hosts


def told_of(hosts: tuple[int, ...], fail: Callable[[int, core.Engine], None], *cut: int) -> list[str]:
    """What each rank is told of a world in which each does `fail` at the same moment, some cables having fallen silent;
    the last cables are the trunks."""
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
    """Begin a frame on a trunk of host 1, in both directions, whose rest never comes: what follows is taken for it."""
    for rank, end in enumerate(ends):
        end.send(struct.pack("=IHHiIQ", 1 << 16, 6, 0, rank, 0, 0), socket.MSG_DONTWAIT)


def raises(rank: int, native: core.Engine) -> None:
    native.abort(f"rank {rank} raised this")


@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1, 1), (0, 1, 2, 1, 2), (0, 1, 2, 3, 3, 2, 1)])
def test_of_failures_in_the_same_moment_one_is_told_everywhere(hosts: tuple[int, ...]) -> None:
    """Problem 9: all ranks raise at a barrier, and one text is what all are told."""
    for _ in range(10):
        told = told_of(hosts, raises)
        assert len({text.split(" (")[0] for text in told}) == 1, told
        culprit = told[0].removeprefix("RankRaisedError: rank ")[0]
        assert all(f"rank {culprit} failed: rank {culprit} raised this" in text for text in told), told


def test_a_host_that_is_not_answered_believes_itself() -> None:
    """Problem 9, with the trunk of host 1 silent at that moment: at most two texts, each true."""

    def fail(rank: int, native: core.Engine) -> None:
        if rank:
            raises(rank, native)

    told = told_of((0, 1, 2, 1), fail, -2)
    assert told[1] == told[3] and told[1].startswith(("RankRaisedError: rank 1 ", "RankRaisedError: rank 3 ")), told
    assert told[0] == told[2] and told[0].startswith("Rank"), told
