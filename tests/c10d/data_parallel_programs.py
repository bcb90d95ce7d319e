"""Training with DistributedDataParallel and what goes with it; each returns the parameters of its rank."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from .small_models import Arrays, Perceptron, make_model, make_samples, measure_loss, read_arrays, read_state, train

SMALL = 0.001  # MiB of a bucket: some parameters each


def _wrap(bucket: float | None = SMALL, layers: int = 3, **options: Any) -> DistributedDataParallel:
    model = make_model(lambda: Perceptron(layers=layers))
    if "find_unused_parameters" not in options and "static_graph" not in options:
        model.seldom.requires_grad_(False)
    return DistributedDataParallel(model, bucket_cap_mb=bucket, **options)


def _train_wrapped(rank: int, **options: Any) -> Arrays:
    model = _wrap(**options)
    train(model, rank)
    return read_state(model)


def plain(rank: int, size: int) -> Arrays:
    return _train_wrapped(rank, bucket=None)


def small_buckets(rank: int, size: int) -> Arrays:
    return _train_wrapped(rank)


def buckets_as_gradients(rank: int, size: int) -> Arrays:
    return _train_wrapped(rank, gradient_as_bucket_view=True)


def static_graph(rank: int, size: int) -> Arrays:
    return _train_wrapped(rank, static_graph=True, gradient_as_bucket_view=True)


def without_buffers(rank: int, size: int) -> Arrays:
    return _train_wrapped(rank, broadcast_buffers=False)


def on_a_mesh(rank: int, size: int) -> Arrays:
    return _train_wrapped(rank, device_mesh=dist.init_device_mesh("cpu", (size,)))


def in_a_group(rank: int, size: int) -> Arrays:
    return _train_wrapped(rank, process_group=dist.new_group())


def unused_parameters(rank: int, size: int) -> Arrays:
    """Parameters that are used by all ranks, by one, and by none."""
    model = _wrap(find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(6):
        samples = make_samples(rank, step)
        measure_loss(model(samples, seldom=step % 3 == 0 or (step % 3 == 1 and rank == 0)), samples).backward()
        optimizer.step()
        optimizer.zero_grad()
    return read_state(model)


def accumulated(rank: int, size: int) -> Arrays:
    """Gradients of several backward passes, of which only the last reduces."""
    model = _wrap()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        with model.no_sync():
            measure_loss(model(make_samples(rank, 10 + step)), make_samples(rank, step)).backward()
        measure_loss(model(make_samples(rank, 20 + step)), make_samples(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return read_state(model)


def second_derivatives(rank: int, size: int) -> Arrays:
    """A penalty on the gradient of the samples: a backward pass through a backward pass."""
    model = _wrap(layers=2)
    model.eval()
    samples = make_samples(rank, 0).requires_grad_()
    loss = measure_loss(model(samples), samples.detach())
    (slope,) = torch.autograd.grad(loss, samples, create_graph=True)
    (loss + slope.square().sum()).backward()
    return read_arrays(each.grad for each in model.parameters() if each.grad is not None)


# ---- communication hooks


# A callback that starts collectives has them in a group of its bucket, or there is one bucket: else they overtake those
# that the backward pass starts, on one rank and not on the other. Gloo then ends the process, too.


def _train_hooked(
    rank: int, state: Any, hook: Any, layers: int = 3, steps: int = 4, bucket: float | None = SMALL
) -> Arrays:
    model = _wrap(bucket, layers)
    model.register_comm_hook(state, hook)
    train(model, rank, steps)
    return read_state(model)


def halved_by_hook(rank: int, size: int) -> Arrays:
    return _train_hooked(rank, None, default_hooks.fp16_compress_hook)


def halved_to_bfloat16(rank: int, size: int) -> Arrays:
    def halve(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return default_hooks.bf16_compress_hook(state, bucket)  # by its own name torch refuses it without NCCL

    return _train_hooked(rank, None, halve)


def wrapped_hook(rank: int, size: int) -> Arrays:
    return _train_hooked(rank, None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))


def no_hook(rank: int, size: int) -> Arrays:
    model = _wrap()
    DDPCommHookType.NOOP.value(model=model, state=None)
    train(model, rank)
    return read_state(model)


def low_rank_hook(rank: int, size: int) -> Arrays:
    """PowerSGD, whose callbacks wait for the sums of others."""
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    return _train_hooked(rank, state, powerSGD_hook.powerSGD_hook, steps=10, bucket=None)


def waiting_hook(rank: int, size: int) -> Arrays:
    """Callbacks of many buckets that wait for other futures: of the backward pass, and of their own collectives."""
    groups = [dist.new_group() for _ in range(40)]

    def reduce_bucket(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer, own = bucket.buffer().div_(size), groups[bucket.index()]
        largest = buffer.abs().max().reshape(1)
        maximum = dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True).get_future()

        def reduce_more(first: Any) -> torch.Tensor:
            count = torch.ones(1)
            dist.all_reduce(count, group=own, async_op=True).get_future().then(lambda done: count.div_(size)).wait()
            return first.value()[0].mul_(count / (1 + maximum.wait()[0]))

        return dist.all_reduce(buffer, async_op=True).get_future().then(reduce_more)

    return _train_hooked(rank, None, reduce_bucket, layers=30)


def gathering_hook(rank: int, size: int) -> Arrays:
    """A hook that gathers, and sums what it has gathered in a callback."""

    def gather_bucket(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        parts = [torch.empty_like(buffer) for _ in range(size)]
        future = dist.all_gather(parts, buffer, async_op=True).get_future()
        return future.then(lambda done: sum(parts[1:], parts[0]) / size)

    return _train_hooked(rank, None, gather_bucket)


def scattering_hook(rank: int, size: int) -> Arrays:
    """A hook that reduces a part on each rank, and gathers the parts."""

    def scatter_bucket(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer().div_(size)
        padded = torch.nn.functional.pad(buffer, (0, -buffer.numel() % size))
        part = padded.new_empty(padded.numel() // size)
        dist.reduce_scatter_tensor(part, padded)
        parts = [torch.empty_like(part) for _ in range(size)]
        future = dist.all_gather(parts, part, async_op=True).get_future()
        return future.then(lambda done: torch.cat(parts)[: buffer.numel()])

    return _train_hooked(rank, None, scatter_bucket)


def optimizer_in_hook(rank: int, size: int) -> Arrays:
    """The step of each bucket runs in the callback of its sum."""
    model = _wrap()
    model._register_fused_optim(torch.optim.SGD, lr=0.05, momentum=0.9)
    for step in range(4):
        samples = make_samples(rank, step)
        measure_loss(model(samples), samples).backward()
    return read_state(model)


def local_steps(rank: int, size: int) -> Arrays:
    """Post-local SGD: sums in groups of one rank, and parameters that are averaged from time to time."""
    own, _ = dist.new_subgroups(1)
    model = _wrap()
    state = local_sgd.PostLocalSGDState(process_group=None, subgroup=own, start_localSGD_iter=2)
    model.register_comm_hook(state, local_sgd.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), PeriodicModelAverager(period=2, warmup_steps=2)
    )
    train(model, rank, 7, optimizer)
    return read_arrays(model.parameters())


# ---- ranks with different numbers of samples, and optimizers in parts


def uneven_samples(rank: int, size: int) -> Arrays:
    """Ranks that run out of samples one after another."""
    model = _wrap()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Join([model]):
        for step in range(3 + 2 * rank):
            samples = make_samples(rank, step)
            measure_loss(model(samples), samples).backward()
            optimizer.step()
            optimizer.zero_grad()
    return read_state(model)


def uneven_samples_and_parts(rank: int, size: int) -> Arrays:
    model = _wrap()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05)
    with Join([model, optimizer], divide_by_initial_world_size=False):
        for step in range(3 + rank):
            samples = make_samples(rank, step)
            measure_loss(model(samples), samples).backward()
            optimizer.step()
            optimizer.zero_grad()
    return read_state(model)


def optimizer_in_parts(rank: int, size: int) -> Arrays:
    model = _wrap()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    train(model, rank, optimizer=optimizer)
    optimizer.consolidate_state_dict(to=0)
    moments: list[torch.Tensor] = []
    if rank == 0:
        state = optimizer.state_dict()["state"]
        moments = [value for key in sorted(state) for value in state[key].values() if torch.is_tensor(value)]
    return read_state(model) + read_arrays(moments)


def optimizer_in_parts_of_buckets(rank: int, size: int) -> Arrays:
    model = _wrap()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, parameters_as_bucket_view=True, lr=0.05, momentum=0.9
    )
    train(model, rank, optimizer=optimizer)
    return read_state(model)
