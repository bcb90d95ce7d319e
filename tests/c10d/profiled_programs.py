"""Collectives and messages under torch's profiler."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from ..waiting import be_late

MOMENT = 0.3  # seconds for which rank 1 is late


def make_ones(count: int = 1000) -> torch.Tensor:
    return torch.ones(count, device="cpu")


def call_each(rank: int, size: int) -> None:
    """Call each operation once; one that returns a work is waited for."""
    parts = [make_ones() for _ in range(size)]
    dist.all_reduce(make_ones())
    dist.broadcast(make_ones(), 0, async_op=True).wait()
    dist.all_gather(parts, make_ones())
    dist.reduce_scatter(make_ones(), parts)
    dist.all_to_all(parts, [make_ones() for _ in range(size)])
    dist.reduce(make_ones(), 0)
    dist.gather(make_ones(), parts if rank == 0 else None)
    dist.scatter(make_ones(), parts if rank == 0 else None)
    dist.barrier()
    dist.send(make_ones(), 1) if rank == 0 else dist.recv(make_ones(), 0)


def events_of_calls(rank: int, size: int) -> Counter[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call_each(rank, size)
    call_each(rank, size)
    return Counter(event.name for event in profile.events() if event.name.startswith("engine:"))


def events_of_a_late_rank(rank: int, size: int) -> dict[str, list[float]]:
    """Return the seconds of an asynchronous reduction to which rank 1 comes later, and of a call that fails."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        if rank == 1:
            dist.recv(make_ones(), 0)
        work = dist.all_reduce(make_ones(), async_op=True)
        if rank == 0:
            be_late(MOMENT)
            dist.send(make_ones(), 1)
        work.wait()
        with pytest.raises(ValueError, match="output"):
            dist.all_gather_into_tensor(make_ones(1), make_ones())
        dist.barrier()
    lasted = {name: [] for name in ("engine:all_reduce", "engine:all_gather")}
    for event in profile.events():
        if event.name in lasted:
            lasted[event.name].append(event.time_range.elapsed_us() / 1e6)
    return lasted
