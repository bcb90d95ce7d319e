"""Training with torch.compile, whose collectives are operators of its graphs; each returns parameters or results."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from .small_models import WIDTH, Arrays, Transformer, make_model, make_samples, read_arrays, train

SHAPE = (2, 8, WIDTH)


def functional_collectives(rank: int, size: int) -> Arrays:
    group: Any = dist.group.WORLD

    @torch.compile(fullgraph=True)
    def compute(given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = functional.all_reduce(given * 2, "sum", group)
        largest = functional.all_reduce(given.abs(), "max", group)
        whole = functional.all_gather_tensor(given + 1, 0, group)
        part = functional.reduce_scatter_tensor(whole * total.mean(), "avg", 0, group)
        turned = functional.all_to_all_single(given * 3, None, None, group)
        return total - 1, largest, whole.sin(), part + 1, turned * 2, functional.broadcast(given, 0, group) + 1

    return read_arrays(compute(make_samples(rank, 0, 2 * size, 3)))


def collectives_in_a_graph(rank: int, size: int) -> Arrays:
    """The calls of torch.distributed, which torch.compile takes into its graph."""

    @torch.compile(fullgraph=True)
    def compute(given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = given * 2
        dist.all_reduce(given)
        whole = torch.empty(size * given.shape[0], given.shape[1])
        dist.all_gather_into_tensor(whole, given + 1)
        return given.cos(), whole * 2

    return read_arrays(compute(make_samples(rank, 0, 2, 3)))


def overlapping_collectives(rank: int, size: int) -> Arrays:
    """Collectives of the same size in flight together, without torch.compile."""
    group: Any = dist.group.WORLD
    given = [make_samples(rank, step, 1000) for step in range(20)]
    started = [functional.all_reduce(each, "avg", group) for each in given]
    coalesced = functional.all_reduce_coalesced(given, "sum", group)
    gathered = functional.all_gather_into_tensor_coalesced(given[:3], group)
    return read_arrays([each + 0 for each in (*started, *coalesced, *gathered)])


def compiled_data_parallel(rank: int, size: int) -> Arrays:
    """Graphs that are split where buckets end, of which the first has a MiB."""
    widths = (WIDTH, 512, 512, 512, WIDTH)
    model = make_model(lambda: nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(widths))))
    model = DistributedDataParallel(model, bucket_cap_mb=1)
    train(torch.compile(model), rank)
    return read_arrays(model.parameters())


def data_parallel_of_compiled(rank: int, size: int) -> Arrays:
    model = make_model(Transformer)
    wrapped = DistributedDataParallel(torch.compile(model), static_graph=True, gradient_as_bucket_view=True)
    train(wrapped, rank, shape=SHAPE)
    return read_arrays(model.parameters())


def compiled_shards(rank: int, size: int) -> Arrays:
    model = make_model(Transformer)
    for block in model.blocks:
        block.compile()
        fully_shard(block)
    train(fully_shard(model), rank, shape=SHAPE)
    return read_arrays(model.parameters())


def compiled_tensor_parallel(rank: int, size: int) -> Arrays:
    mesh = dist.init_device_mesh("cpu", (size,))
    model = make_model(lambda: nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(torch.compile(model), 0)
    return read_arrays(model.parameters())
