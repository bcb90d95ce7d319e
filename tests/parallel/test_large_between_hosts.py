"""Large allreduces between hosts: the bits of one host, and chunks of the largest size."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

import engine

from .thread_world import ThreadWorld

LAYOUTS = [(0, 1), (0, 1, 2), (0, 1, 1), (0, 0, 1, 1), (0, 0, 1, 1, 2)]
layouts = pytest.mark.parametrize("hosts", LAYOUTS, ids=lambda hosts: "".join(map(str, hosts)))
COUNT = 3_000_000  # float32 elements of a tensor that spans many chunks


def results(rank: int) -> list[str]:
    """Digests of sums of large tensors: odd lengths, views, in place, groups, and casts on the way."""
    draw = np.random.default_rng(rank)
    found: list[Any] = []
    for dtype, count in (("float32", 2_500_001), ("float64", 300_001), ("float16", 700_003), ("int8", 900_001)):
        tensor = (draw.standard_normal(count) * 3).astype(dtype)
        found.append(engine.allreduce(tensor, engine.Sum, f"whole {dtype}"))
        view = tensor[3:-2]  # not at a multiple of a cache line
        engine.allreduce_(view, engine.Average, f"view {dtype}")
        found.append(tensor)
    vectors = [draw.standard_normal(count).astype(np.float32) for count in (70_000, 5, 4096, 4097, 300_000, 12_345)]
    vectors += [draw.standard_normal(50_000)]
    found += engine.grouped_allreduce(vectors, engine.Average, "group")
    handles = [engine.allreduce_async(each, engine.Max, f"fused {k}") for k, each in enumerate(vectors)]
    found += [handle.wait() for handle in handles]
    found.append(engine.allreduce(vectors[4], engine.Sum, "scaled", prescale_factor=0.5, postscale_factor=3.0))
    found.append(engine.allreduce(vectors[4], engine.Sum, "halves", compression=engine.Compression.fp16))
    return [hashlib.sha256(np.ascontiguousarray(each).tobytes()).hexdigest() for each in found]


@layouts
def test_large_sums_between_hosts_have_the_bits_of_one_host(hosts: tuple[int, ...]) -> None:
    with ThreadWorld(len(hosts)) as world:
        expected = world.run(results)
    for settings in ({}, {"chunk_bytes": 1 << 20, "sockets_per_lane": 3}, {"fusion_threshold": 0}):
        with ThreadWorld(len(hosts), hosts, **settings) as world:
            assert world.run(results) == expected


def test_a_rank_without_a_tensor_gets_results_in_chunks_of_the_largest_size() -> None:
    """A slot has room for the identity in place of a rank's own part, if a rank is absent."""

    def work(rank: int) -> None:
        if rank == 2:
            engine.join()
            return
        total = engine.allreduce(np.full(COUNT, rank + 1.0, np.float32), engine.Sum, "large")
        assert (total == 1 + 2 + 4).all()
        engine.join()

    for hosts in ((0, 0, 1, 1), (0, 1, 2, 3)):
        with ThreadWorld(4, hosts) as world:
            world.run(work)
