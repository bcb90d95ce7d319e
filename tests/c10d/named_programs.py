"""Groups with names and descriptions, which errors, timelines and flight records call as torch does."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from engine.metrics import page
from engine.metrics.page import GROUPS, GroupCounts
from engine.session import runtime


def make_ones(count: int = 1) -> torch.Tensor:
    return torch.ones(count, device="cpu")


def errors_in_groups(rank: int, size: int) -> list[str]:
    """Errors of a shape that differs and of a group that is gone, in a group of the first two ranks."""
    described = dist.new_group([0, 1], group_desc="tp")
    if rank > 1:
        return []
    texts = [repr(described)]
    try:
        dist.all_reduce(make_ones(1 + rank), group=described)
    except dist.DistBackendError as error:
        texts.append(str(error))
    dist.destroy_process_group(described)
    try:
        described.allreduce([make_ones()])
    except dist.DistBackendError as error:
        texts.append(str(error))
    return texts


def sums_in_groups(rank: int, size: int) -> list[str]:
    """Sum in groups, which ranks do not count alike: each forms those alone that it is in."""
    first = dist.new_group([0, 1], group_desc="tp")
    last = dist.new_group([size - 2, size - 1])
    whole = dist.new_group(group_desc="dp")
    for group in (first, whole, last):
        if isinstance(group, dist.ProcessGroup):
            for _ in range(3):
                dist.all_reduce(make_ones(100), group=group)
    return [group.group_name for group in (first, whole, last) if isinstance(group, dist.ProcessGroup)]


def counts_of_groups(rank: int, size: int) -> list[dict[str, GroupCounts]]:
    """Counts of the groups of this rank: with two of them, after the first is gone, and with more than have places."""
    import engine

    first, whole = dist.new_group([0, 1], group_desc="tp"), dist.new_group(group_desc="dp")
    added = engine.add_process_set([0, 1])
    for group in (first, whole, whole):
        if isinstance(group, dist.ProcessGroup):
            dist.all_reduce(make_ones(100), group=group)
    if added.included():
        engine.allreduce(make_ones(10), process_set=added)
    dist.barrier()
    read = [read_own_groups()]
    if isinstance(first, dist.ProcessGroup):
        dist.destroy_process_group(first)
    read.append(read_own_groups())
    more = [dist.new_group() for _ in range(GROUPS)]
    dist.all_reduce(make_ones(3), group=more[0])
    dist.all_reduce(make_ones(3), group=more[-1])
    dist.barrier()
    return [*read, read_own_groups()]


def read_own_groups() -> dict[str, GroupCounts]:
    found = page.read(runtime.current_session().page)
    return found.groups if found is not None else {}


def stall_in_a_group(rank: int, size: int) -> str:
    """Wait in one of two groups of equal ranks until its time-out has passed."""
    described = dist.new_group(timeout=timedelta(seconds=2), group_desc="tp")
    other = dist.new_group()
    dist.all_reduce(make_ones(), group=other)
    try:
        if rank == 0:
            dist.all_reduce(make_ones(), group=described)
        else:
            dist.recv(make_ones(), 0)
    except dist.DistBackendError as error:
        return str(error)
    return ""
