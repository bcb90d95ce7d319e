"""Training with parameters that lie in parts on the ranks: FSDP, tensor and pipeline parallelism, checkpoints.

Each program returns the parameters of the model, whole, or of the part that only its rank has.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from .small_models import WIDTH, Arrays, Block, Transformer, make_model, make_samples, measure_loss, read_arrays, train

SHAPE = (2, 8, WIDTH)  # of a rank's samples: sentences, words, features
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _line(size: int) -> DeviceMesh:
    return dist.init_device_mesh("cpu", (size,), mesh_dim_names=("data",))


def _grid(size: int, *names: str) -> DeviceMesh:
    return dist.init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=names)


# ---- FSDP


def _shard(mesh: DeviceMesh | None = None, **options: Any) -> Transformer:
    model = make_model(Transformer)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def _train_sharded(rank: int, model: nn.Module) -> Arrays:
    train(model, rank, shape=SHAPE)
    return read_arrays(model.parameters())


def sharded(rank: int, size: int) -> Arrays:
    return _train_sharded(rank, _shard())


def sharded_in_half_precision(rank: int, size: int) -> Arrays:
    return _train_sharded(rank, _shard(_line(size), mp_policy=HALF))


def sharded_with_half_sums(rank: int, size: int) -> Arrays:
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
    return _train_sharded(rank, _shard(mp_policy=policy))


def sharded_gathered_once(rank: int, size: int) -> Arrays:
    return _train_sharded(rank, _shard(reshard_after_forward=False))


def sharded_unevenly(rank: int, size: int) -> Arrays:
    """Parameters that do not divide by the number of ranks, some of them smaller."""
    model = make_model(lambda: nn.Sequential(nn.Linear(WIDTH, 7), nn.Linear(7, 1), nn.Linear(1, WIDTH)))
    for layer in model:
        fully_shard(layer)
    return _train_sharded(rank, fully_shard(model))


def sharded_and_accumulated(rank: int, size: int) -> Arrays:
    model: Any = _shard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(6):
        model.set_requires_gradient_sync(step % 2 == 1)
        samples = make_samples(rank, step, *SHAPE)
        measure_loss(model(samples), samples).backward()
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return read_arrays(model.parameters())


def sharded_on_a_grid(rank: int, size: int) -> Arrays:
    """Parameters in parts along one dimension of the mesh, and copies along the other."""
    return _train_sharded(rank, _shard(_grid(size, "copies", "parts")))


def sharded_and_tensor_parallel(rank: int, size: int) -> Arrays:
    mesh = dist.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "tensor"))
    model = make_model(Transformer)
    for block in model.blocks:
        _split_block(block, mesh["tensor"])
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return _train_sharded(mesh["data"].get_local_rank(), model)


def _wrap_old(strategy: ShardingStrategy, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(
        make_model(Transformer),
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
        **options,
    )


def _train_old(rank: int, model: nn.Module) -> Arrays:
    train(model, rank, shape=SHAPE)
    with FullyShardedDataParallel.summon_full_params(model):
        return read_arrays(model.parameters())


def old_full_shard(rank: int, size: int) -> Arrays:
    return _train_old(rank, _wrap_old(ShardingStrategy.FULL_SHARD))


def old_shard_of_gradients(rank: int, size: int) -> Arrays:
    return _train_old(rank, _wrap_old(ShardingStrategy.SHARD_GRAD_OP))


def old_without_shards(rank: int, size: int) -> Arrays:
    return _train_old(rank, _wrap_old(ShardingStrategy.NO_SHARD))


def old_in_half_precision(rank: int, size: int) -> Arrays:
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    return _train_old(rank, _wrap_old(ShardingStrategy.FULL_SHARD, mixed_precision=half))


def old_on_a_grid(rank: int, size: int) -> Arrays:
    mesh = _grid(size, "copies", "parts")
    return _train_old(rank, _wrap_old(ShardingStrategy.HYBRID_SHARD, device_mesh=mesh))


# ---- DTensor and tensor parallelism


def moved_tensors(rank: int, size: int) -> Arrays:
    """A tensor of several layouts, and products of such."""
    mesh = _line(size)
    whole = torch.arange(float(6 * size * 10)).reshape(6 * size, 10).sin()
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    copies = columns.redistribute(mesh, [Replicate()])
    uneven = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    drawn = torch.distributed.tensor.ones(size + 1, 3, device_mesh=mesh, placements=[Shard(0)])
    return read_arrays([rows, columns, copies, rows.T @ rows, columns.sum(), uneven.square(), drawn, uneven.mean()])


def _split_block(block: Block, mesh: DeviceMesh) -> None:
    plan = dict.fromkeys(("query", "key", "value", "wide"), ColwiseParallel())
    plan |= dict.fromkeys(("output", "narrow"), RowwiseParallel())
    parallelize_module(block, mesh, plan)


def tensor_parallel(rank: int, size: int) -> Arrays:
    mesh = _line(size)
    model = make_model(Transformer)
    for block in model.blocks:
        _split_block(block, mesh)
    train(model, 0, shape=SHAPE)
    return read_arrays(model.parameters())


def sequence_parallel(rank: int, size: int) -> Arrays:
    """Words in parts on the ranks between the blocks' layers."""
    mesh = _line(size)
    model = make_model(Transformer)
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(),
            "wide": ColwiseParallel(input_layouts=Shard(1)),
            "narrow": RowwiseParallel(output_layouts=Shard(1)),
        }
        plan |= {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("query", "key", "value")}
        parallelize_module(block, mesh, plan | {"output": RowwiseParallel(output_layouts=Shard(1))})
    first = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True)
    parallelize_module(model.blocks[0], mesh, first)
    parallelize_module(model, mesh, {"last": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())})
    train(model, 0, shape=SHAPE)
    return read_arrays(model.parameters())


def parallel_loss(rank: int, size: int) -> Arrays:
    """Embeddings in parts, and the cross-entropy of logits in parts."""
    mesh = _line(size)
    model = make_model(lambda: nn.Sequential(nn.Embedding(24, WIDTH), nn.Linear(WIDTH, 24)))
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate()),
        "1": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        tokens = make_samples(0, step, 30).mul(100).long() % 24
        with loss_parallel():
            nn.functional.cross_entropy(model(tokens), tokens.roll(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return read_arrays(model.parameters())


# ---- checkpoints


@contextmanager
def _common_directory() -> Iterator[str]:
    """Context with a directory of rank 0 that all ranks use."""
    with tempfile.TemporaryDirectory() as directory:
        told = [directory]
        dist.broadcast_object_list(told, 0)
        yield told[0]
        dist.barrier()


def _make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with state; its `eps` keeps it from enlarging the rounding of gradients that are nearly 0."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def _resume(rank: int, save: Any, size: int) -> Arrays:
    """Train, save, and train on with another model that was loaded."""
    model = _shard()
    optimizer = _make_optimizer(model)
    train(model, rank, 2, optimizer, SHAPE)
    with _common_directory() as directory:
        named, moments = get_state_dict(model, optimizer)
        save({"model": named, "optimizer": moments}, directory)
        other = _shard(_line(size))
        with torch.no_grad():
            for each in other.parameters():
                each.zero_()
        optimizer = _make_optimizer(other)
        named, moments = get_state_dict(other, optimizer)
        state = {"model": named, "optimizer": moments}
        checkpoints.load(state, checkpoint_id=directory)
        set_state_dict(other, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(other, rank, 2, optimizer, SHAPE)
    return read_arrays(other.parameters())


def resumed(rank: int, size: int) -> Arrays:
    return _resume(rank, lambda state, directory: checkpoints.save(state, checkpoint_id=directory), size)


def resumed_after_saving_aside(rank: int, size: int) -> Arrays:
    return _resume(rank, lambda state, directory: checkpoints.async_save(state, checkpoint_id=directory).result(), size)


# ---- pipelines


def _make_pipeline(rank: int, size: int, schedule: Any, parts: int = 1) -> Arrays:
    """Train with stages on the ranks, several on each for schedules with loops."""
    device = torch.device("cpu")
    blocks = make_model(lambda: nn.ModuleList(Block() for _ in range(size * parts)))
    own = [rank + part * size for part in range(parts)]
    stages = [PipelineStage(blocks[number], number, size * parts, device) for number in own]
    runner = schedule(stages if parts > 1 else stages[0], n_microbatches=4, loss_fn=measure_loss)
    parameters = [each for number in own for each in blocks[number].parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    for step in range(3):
        samples = make_samples(0, step, 8, 4, WIDTH)
        last = size * parts - 1 in own
        runner.step(*([samples] if rank == 0 else []), **({"target": samples, "losses": []} if last else {}))
        optimizer.step()
        optimizer.zero_grad()
    return read_arrays(parameters)


def pipeline_one_way(rank: int, size: int) -> Arrays:
    return _make_pipeline(rank, size, ScheduleGPipe)


def pipeline_both_ways(rank: int, size: int) -> Arrays:
    return _make_pipeline(rank, size, Schedule1F1B)


def pipeline_with_loops(rank: int, size: int) -> Arrays:
    return _make_pipeline(rank, size, ScheduleInterleaved1F1B, parts=2)
