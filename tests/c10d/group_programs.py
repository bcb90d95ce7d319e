"""Groups made in ways that not every version of torch has: split, composed of several backends, met with a deadline."""

from __future__ import annotations

import gc
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

CPU = torch.device("cpu")


def sums(group: dist.ProcessGroup, size: int) -> None:
    """Check a reduction of ones in a group of `size` ranks, as a work that nobody polls."""
    tensor = torch.ones(5)
    dist.all_reduce(tensor, group=group)
    assert (tensor == size).all()


def monitored_barriers(rank: int, size: int) -> str:
    """A rank that does not come is named; torch up to 2.13 has no way here but the group's own method."""
    group = dist.group.WORLD
    group.monitored_barrier(timedelta(seconds=30))
    error = ""
    if rank != 1:
        try:
            group.monitored_barrier(timedelta(seconds=0.3), wait_all_ranks=True)
        except dist.DistBackendError as raised:
            error = str(raised)
    if rank == 0:  # no time at all, which torch's stores would take for all the time in the world
        with pytest.raises(dist.DistBackendError, match="waited 0 s"):
            group.monitored_barrier(timedelta(0))
    dist.barrier()
    return error


def split_groups(rank: int, size: int) -> None:
    world = dist.group.WORLD
    ranks = list(range(size - 1))
    part = world.split_group(ranks, timedelta(seconds=30), None, "a part", "of all but one")
    if rank == size - 1:
        assert part is None
        return
    gc.collect()
    assert (part.rank(), part.size(), part.group_name) == (rank, size - 1, "a part")
    tensor = torch.ones(3)
    part.allreduce([tensor]).wait()
    assert (tensor == size - 1).all()
    part.shutdown()


def refused_groups(rank: int, size: int) -> None:
    with pytest.raises(NotImplementedError, match="does not merge groups"):
        dist.group.WORLD.merge_remote_group(None, 1, timedelta(seconds=1))


def composed_calls(rank: int, size: int) -> None:
    assert type(dist.group.WORLD).__module__ == "torch.distributed.distributed_c10d"
    group = dist.new_group(list(range(size)))
    gc.collect()  # C++ alone holds the backend of the group
    for each in (dist.group.WORLD, group):
        assert type(each._get_backend(CPU)).__name__ == "DeviceBackend"
        sums(each, size)
    gathered = [None] * size
    dist.all_gather_object(gathered, rank)
    assert gathered == list(range(size))
    if rank < 2:
        tensor = torch.full((3,), rank)
        dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
        assert (tensor == 0).all()
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
    module(torch.full((3,), rank + 1.0)).sum().backward()
    assert (module.module.weight.grad == (size + 1) / 2).all()
    with pytest.raises((NotImplementedError, RuntimeError), match="split"):
        dist.group.WORLD.split_group([0], timedelta(seconds=30))
