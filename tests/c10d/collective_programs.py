"""Calls of torch.distributed's collectives, each checked on every rank against what it has to give."""

from __future__ import annotations

import gc
import os
import sys
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine.c10d.work import EngineWork

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.int8,
)
COUNTS = (0, 1, 1000, 70_001)


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return small whole numbers, other ones on each rank."""
    return (torch.arange(count) * (rank + 1) % 5 + 1).to(dtype)


def all_values(size: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.stack([values(rank, count, dtype) for rank in range(size)])


def all_reductions(rank: int, size: int) -> None:
    for dtype in DTYPES:
        for count in COUNTS:
            each = all_values(size, count, dtype)
            wide = each.double()
            for op, expected in (
                (dist.ReduceOp.SUM, wide.sum(0)),
                (dist.ReduceOp.PRODUCT, wide.prod(0)),
                (dist.ReduceOp.MIN, wide.amin(0) if count else wide.sum(0)),
                (dist.ReduceOp.MAX, wide.amax(0) if count else wide.sum(0)),
            ):
                tensor = values(rank, count, dtype)
                dist.all_reduce(tensor, op)
                assert torch.equal(tensor, expected.to(dtype)), (dtype, count, op)


def average_and_factors(rank: int, size: int) -> None:
    tensor = torch.full((7,), rank + 1.0)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert torch.equal(tensor, torch.full((7,), (size + 1) / 2))
    tensor = torch.full((7,), 2.0)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(3.0))
    assert torch.equal(tensor, torch.full((7,), 6.0 * size))


def bitwise_reductions(rank: int, size: int) -> None:
    for dtype in (torch.int32, torch.uint8, torch.bool):
        each = torch.stack([(torch.arange(100) >> r & 3).to(dtype) for r in range(size)])
        for op, function in (
            (dist.ReduceOp.BAND, torch.bitwise_and),
            (dist.ReduceOp.BOR, torch.bitwise_or),
            (dist.ReduceOp.BXOR, torch.bitwise_xor),
        ):
            expected = each[0]
            for other in each[1:]:
                expected = function(expected, other)
            tensor = each[rank].clone()
            dist.all_reduce(tensor, op)
            assert torch.equal(tensor, expected), (dtype, op)


def complex_and_sparse(rank: int, size: int) -> None:
    tensor = torch.full((3,), complex(rank, 1.0))
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((3,), complex(size * (size - 1) / 2, size)))
    sparse = torch.sparse_coo_tensor([[rank, size]], [1.0, 2.0], (size + 1,))
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [1.0] * size + [2.0 * size]


def strided_tensors(rank: int, size: int) -> None:
    """Views that are not contiguous, of which the elements between are untouched."""
    whole = torch.zeros(6, 8)
    view = whole[::2, 1::3]
    view.fill_(rank + 1.0)
    dist.all_reduce(view)
    assert (view == size * (size + 1) / 2).all()
    assert whole.sum() == view.sum()
    dist.broadcast(view, 0)
    target = torch.zeros(2 * size, 4)[:, ::2]
    dist.all_gather_into_tensor(target, torch.full((2, 2), rank + 1.0))
    assert torch.equal(target, torch.arange(1.0, size + 1).repeat_interleave(2)[:, None].expand(-1, 2))
    weights = torch.nn.Parameter(torch.full((2, 3, 4, 4), rank + 1.0).contiguous(memory_format=torch.channels_last))
    dist.broadcast(weights, size - 1)
    assert (weights == size).all()


def all_gathers(rank: int, size: int) -> None:
    for dtype in (*DTYPES, torch.bool, torch.complex64):
        for count in COUNTS:
            each = [values(r, count, dtype) for r in range(size)]
            parts = [torch.empty(count, dtype=dtype) for _ in range(size)]
            dist.all_gather(parts, each[rank])
            assert all(map(torch.equal, parts, each)), (dtype, count)
            whole = torch.empty(count * size, dtype=dtype)
            dist.all_gather_into_tensor(whole, each[rank])
            assert torch.equal(whole, torch.cat(each)), (dtype, count)
    uneven = [torch.empty(r + 1) for r in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
    assert [part.tolist() for part in uneven] == [[float(r)] * (r + 1) for r in range(size)]
    whole = torch.zeros(size, 5)
    whole[rank] = rank
    dist.all_gather_into_tensor(whole, whole[rank])
    assert torch.equal(whole, torch.arange(float(size))[:, None].expand(-1, 5))
    shifted = torch.zeros(size * 4)
    shifted[1:5] = rank
    dist.all_gather_into_tensor(shifted, shifted[1:5])
    assert torch.equal(shifted, torch.arange(float(size)).repeat_interleave(4))


def reduce_scatters(rank: int, size: int) -> None:
    total = size * (size + 1) / 2
    for count in (1, 1000, 70_001):
        output = torch.empty(count)
        whole = torch.arange(float(size)).repeat_interleave(count) + rank + 1
        dist.reduce_scatter_tensor(output, whole)
        assert torch.equal(output, torch.full((count,), total + rank * size))
        dist.reduce_scatter(output, list(whole.view(size, count)), dist.ReduceOp.MAX)
        assert torch.equal(output, torch.full((count,), rank + float(size)))
    parts = [torch.full((r + 1,), rank + 1.0) for r in range(size)]
    output = torch.empty(rank + 1)
    dist.reduce_scatter(output, parts)
    assert torch.equal(output, torch.full((rank + 1,), total))
    inside = torch.full((size, 3), rank + 1.0)
    dist.reduce_scatter_tensor(inside[rank], inside)
    assert torch.equal(inside[rank], torch.full((3,), total))


def all_to_alls(rank: int, size: int) -> None:
    source = torch.arange(size * 3.0) + 100 * rank
    output = torch.empty(size * 3)
    dist.all_to_all_single(output, source)
    assert torch.equal(output.view(size, 3), torch.stack([100 * r + torch.arange(3.0) + 3 * rank for r in range(size)]))
    sent, received = [rank + to for to in range(size)], [rank + r for r in range(size)]
    output = torch.empty(sum(received), 2)
    dist.all_to_all_single(output, torch.full((sum(sent), 2), float(rank)), received, sent)
    assert output[:, 0].tolist() == [float(r) for r in range(size) for _ in range(received[r])]
    outputs = [torch.empty(received[r]) for r in range(size)]
    dist.all_to_all(outputs, [torch.full((each,), float(rank)) for each in sent])
    assert [each.tolist() for each in outputs] == [[float(r)] * received[r] for r in range(size)]


def rooted_calls(rank: int, size: int) -> None:
    for root in range(size):
        tensor = torch.full((4,), rank + 1.0)
        dist.reduce(tensor, root)
        assert torch.equal(tensor, torch.full((4,), size * (size + 1) / 2 if rank == root else rank + 1.0))
        parts = [torch.empty(3) for _ in range(size)] if rank == root else None
        dist.gather(torch.full((3,), float(rank)), parts, root)
        assert parts is None or torch.equal(torch.stack(parts)[:, 0], torch.arange(float(size)))
        output = torch.empty(2)
        dist.scatter(output, [torch.full((2,), 10.0 * r) for r in range(size)] if rank == root else None, root)
        assert torch.equal(output, torch.full((2,), 10.0 * rank))
        tensor = torch.full((5,), float(rank))
        dist.broadcast(tensor, root)
        assert (tensor == root).all()


def object_calls(rank: int, size: int) -> None:
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * 1000 * rank})
    assert [each["rank"] for each in gathered] == list(range(size))
    told = ["from 0", {1: 2}] if rank == 0 else [None, None]
    dist.broadcast_object_list(told, 0)
    assert told == ["from 0", {1: 2}]
    received: list[Any] = [None]
    dist.scatter_object_list(received, list(range(size)) if rank == 0 else None, 0)
    assert received == [rank]


def async_works(rank: int, size: int) -> None:
    """Polls, futures and chains; results of works that nobody keeps are there after a barrier."""
    tensors = [torch.full((1000,), rank + 1.0) for _ in range(600)]
    works = [dist.all_reduce(each, async_op=True) for each in tensors]
    for work in works:
        work.wait()
        assert work.is_completed() and work.is_success()
    assert all((each == size * (size + 1) / 2).all() for each in tensors)
    one = torch.ones(1000)
    future = dist.all_reduce(one, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    assert (future.wait() == 2 * size).all()

    def reduce_again(done: Any) -> Any:
        return dist.all_reduce(done.value()[0], async_op=True).get_future().wait()[0]

    tensor = torch.ones(10)
    assert (dist.all_reduce(tensor, async_op=True).get_future().then(reduce_again).wait() == size * size).all()
    parts = [torch.empty(50_000) for _ in range(size)]
    dist.all_gather(parts, torch.full((50_000,), float(rank)), async_op=True)
    gc.collect()
    dist.barrier()
    assert torch.equal(torch.stack(parts)[:, 0], torch.arange(float(size)))


def future_before_others_come(rank: int, size: int) -> None:
    """Ask for a future, which is there though other ranks call only later, which they learn in the store."""
    store = dist.distributed_c10d._get_default_store()
    for number in range(3):
        tensor = torch.ones(10)
        if rank == 0:
            future = dist.all_reduce(tensor, async_op=True).get_future()
            assert not future.done()
            store.set(f"future {number}", "")
            assert (future.wait()[0] == size).all()
        else:
            store.get(f"future {number}")
            dist.all_reduce(tensor)


def callbacks_that_ask_for_a_barrier(rank: int, size: int) -> None:
    """A callback of a work that a barrier waits for asks whether the barrier is over, and meets at another."""
    store = dist.distributed_c10d._get_default_store()
    parts = [torch.zeros(4) for _ in range(size)]
    mine, asked, waited = torch.full((4,), float(rank)), threading.Event(), threading.Event()
    if rank:  # the barrier's operation ends before the work's
        barrier = dist.barrier(async_op=True)
        store.get("barrier is waited for")
        dist.all_gather(parts, mine)
        barrier.wait()
    else:
        work = dist.all_gather(parts, mine, async_op=True)
        barrier = dist.barrier(async_op=True)

        def ask(_: Any) -> None:
            barrier.is_completed()
            dist.barrier()
            asked.set()

        def wait() -> None:
            barrier.wait()
            waited.set()

        work.get_future().then(ask)
        barrier._operations[0].wait()
        assert barrier.is_completed() and barrier.get_future().done() and not work.is_completed()
        threading.Thread(target=wait, daemon=True).start()
        threading.Timer(0.2, store.set, ("barrier is waited for", "")).start()
        assert waited.wait(30.0) and asked.wait(30.0)
    if rank:
        dist.barrier()
    assert [part[0].item() for part in parts] == list(range(size))


def threads_that_store_results(rank: int, size: int) -> None:
    """A thread of the engine stores the result of a call that returns before it is there, and of no other."""
    watched = 0
    watch_end = EngineWork.watch_end

    def count_watched(work: EngineWork) -> None:
        nonlocal watched
        watched += 1
        watch_end(work)

    source, column = torch.full((4 * size,), rank + 1.0), torch.ones(4, 2)[:, 0]
    parts = list(source.chunk(size))
    outputs = [torch.empty(4) for _ in range(size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineWork, "watch_end", count_watched)
        dist.all_reduce(column)
        dist.broadcast(column, 0)
        dist.reduce(column, 0)
        dist.all_gather(outputs, parts[0])
        assert [each[0].item() for each in outputs] == [other + 1.0 for other in range(size)]
        dist.all_to_all(outputs, parts)
        dist.reduce_scatter(outputs[0], parts)
        dist.gather(parts[0], outputs if rank == 0 else None)
        dist.scatter(outputs[0], parts if rank == 0 else None)
        assert (outputs[0] == 1.0).all()
        assert watched == 0
        dist.all_gather(outputs, parts[0], async_op=True).wait()
        assert watched == 1


def dropped_sparse_work(rank: int, size: int) -> None:
    """A work on sparse tensors, whose bytes torch does not tell, can be left alone."""
    refused: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", refused.append)
        sparse = torch.sparse_coo_tensor([[rank]], [1.0], (size,))
        dist.all_reduce(sparse, async_op=True)
        gc.collect()
    dist.barrier()
    assert not refused


def coalesced_calls(rank: int, size: int) -> None:
    tensors = [torch.full((count,), rank + 1.0) for count in (3, 0, 1000)]
    dist.all_reduce_coalesced(tensors)
    assert all((each == size * (size + 1) / 2).all() for each in tensors)
    with dist._coalescing_manager(async_ops=True) as manager:
        outputs = [torch.empty(size * 4) for _ in range(3)]
        for number, output in enumerate(outputs):
            dist.all_gather_into_tensor(output, torch.full((4,), rank + 10.0 * number))
    manager.wait()
    for number, output in enumerate(outputs):
        assert torch.equal(output, torch.arange(float(size)).repeat_interleave(4) + 10 * number)


def ring_messages(rank: int, size: int) -> None:
    """Sends in a ring, before receives; tags out of order; sizes on both sides of what is sent at once."""
    for count in (0, 1, 1000, 300_000):
        target = torch.zeros(count)
        work = dist.isend(torch.full((count,), float(rank)), (rank + 1) % size)
        assert dist.recv(target, (rank - 1) % size) == (rank - 1) % size
        work.wait()
        assert (target == (rank - 1) % size).all()
    if rank == 0:
        for tag in (5, 3, 4):
            dist.send(torch.full((2,), float(tag)), 1, tag=tag)
    elif rank == 1:
        for tag in (3, 4, 5):
            target = torch.zeros(2)
            dist.recv(target, 0, tag=tag)
            assert (target == tag).all()
    target = torch.zeros(100_000)
    calls = [
        dist.P2POp(dist.isend, torch.full((100_000,), float(rank)), (rank + 1) % size),
        dist.P2POp(dist.irecv, target, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    assert (target == (rank - 1) % size).all()


def messages_from_any(rank: int, size: int) -> None:
    if rank == 0:
        senders = []
        for _ in range(2 * (size - 1)):
            target = torch.zeros(3)
            sender = dist.recv(target)
            assert (target == sender).all()
            senders.append(sender)
        assert sorted(senders) == sorted(2 * list(range(1, size)))
        target = torch.zeros(1)
        dist.recv(target, size - 1, tag=1)
        assert target.item() == 7
        target = torch.zeros(2)
        future = dist.irecv(target, tag=2).get_future()
        assert not future.done()
        dist.send(torch.zeros(1), size - 1, tag=3)
        future.wait()
        assert (target == 8).all()
    else:
        for _ in range(2):
            dist.send(torch.full((3,), float(rank)), 0)
        if rank == size - 1:
            dist.send(torch.tensor([7.0]), 0, tag=1)
            dist.recv(torch.zeros(1), 0, tag=3)
            dist.send(torch.full((2,), 8.0), 0, tag=2)


def count_threads_and_files() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def many_groups(rank: int, size: int) -> None:
    """Dozens of groups, several of the same ranks, with garbage collected between. None costs a thread or a file."""
    before = count_threads_and_files()
    made = [dist.new_group(list(range(size))) for _ in range(20)]
    pairs = [dist.new_group([first, first + 1]) for first in range(size - 1)]
    gc.collect()
    works = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for group in made]
    for work in works:
        work.wait()
    more = [now - then for now, then in zip(count_threads_and_files(), before, strict=True)]
    assert max(more) < 5, more  # those that finish works, but none for each group
    for number, group in reversed(list(enumerate(made))):
        tensor = torch.full((3,), float(number))
        dist.all_reduce(tensor, group=group)
        assert (tensor == number * size).all()
    for first, group in enumerate(pairs):
        if rank in (first, first + 1):
            tensor = torch.full((2,), rank + 1.0)
            dist.all_reduce(tensor, group=group)
            assert (tensor == 2 * first + 3).all()
            dist.broadcast(tensor, first + 1, group=group)
            assert dist.get_rank(group) == rank - first
    for group in made[::2]:
        dist.destroy_process_group(group)
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=made[1])
    assert tensor.item() == size


def local_groups(rank: int, size: int) -> None:
    """Groups that only their members make. Torch names them by how many a rank has, so each makes as many."""
    wanted = [(0, 1), *((other,) for other in range(2, size)), tuple(range(size))]
    made = {
        ranks: dist.new_group(list(ranks), use_local_synchronization=True, group_desc=str(ranks))
        for ranks in wanted
        if rank in ranks
    }
    for key, group in sorted(made.items()):
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == len(key)


def subgroup_of_an_enumeration(rank: int, size: int) -> None:
    own, every = dist.new_subgroups(1)
    assert dist.get_world_size(own) == 1 and len(every) == size
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=own)
    assert (tensor == 1).all()


def threads_and_groups(rank: int, size: int) -> None:
    """Groups that are used by threads at the same time."""
    made = [dist.new_group() for _ in range(4)]
    errors: list[BaseException] = []

    def use_group(group: Any) -> None:
        try:
            for _ in range(50):
                tensor = torch.ones(1000)
                dist.all_reduce(tensor, group=group)
                assert (tensor == size).all()
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=use_group, args=(group,)) for group in made]
    for each in running:
        each.start()
    for each in running:
        each.join()
    assert not errors


def refused_calls(rank: int, size: int) -> list[str]:
    """Make calls that one rank gets wrong: an error of all, after which the next call works."""
    told = []
    for wrong in ("shape", "output", "dtype"):
        try:
            if wrong == "output":
                count = size * 3 + (rank == 1)
                dist.all_gather_into_tensor(torch.empty(count), torch.ones(3))
            else:
                tensor = torch.ones(3 + (wrong == "shape" and rank == 1))
                dist.all_reduce(tensor.double() if wrong == "dtype" and rank == 1 else tensor)
            told.append("")
        except (RuntimeError, ValueError) as error:
            told.append(str(error))
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert (tensor == size).all()
    return told


def bucket_that_fails(rank: int, size: int) -> str:
    """Let the reducer of DDP, which is C++, meet a rank that sends something else; the next call works."""
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    loss = module(torch.ones(3)).sum()
    text = ""
    try:
        if rank == 1:
            dist.all_reduce(torch.ones(7))
        else:
            loss.backward()
    except RuntimeError as error:
        text = str(error)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert (tensor == size).all()
    return text


def deadline_of_one_wait(rank: int, size: int) -> str:
    text = ""
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        try:
            work.wait(timedelta(seconds=0.3))
        except RuntimeError as error:
            text = str(error)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("waited", "yes")
        work.wait()
    else:
        store.get("waited")
        dist.all_reduce(torch.ones(3))
    return text


def other_devices(rank: int, size: int) -> None:
    tensor = torch.empty(3, device="meta")
    calls = (
        lambda: dist.all_reduce(tensor),
        lambda: dist.broadcast(tensor, 0),
        lambda: dist.all_gather([torch.empty(3) for _ in range(size)], tensor),
        lambda: dist.all_to_all([torch.empty(3) for _ in range(size)], [tensor] * size),
        lambda: dist.send(tensor, (rank + 1) % size),
    )
    for call in calls:
        with pytest.raises((RuntimeError, ValueError), match="a tensor is on meta"):
            call()
    dist.barrier()


def with_the_engines_own_calls(rank: int, size: int) -> None:
    import engine

    assert (engine.rank(), engine.size()) == (rank, size)
    tensor = torch.full((3,), rank + 1.0)
    assert (engine.allreduce(tensor, engine.Sum) == size * (size + 1) / 2).all()
    dist.all_reduce(tensor)
    assert (tensor == size * (size + 1) / 2).all()


def every_name() -> list[str]:
    """Return the names of the programs that return nothing."""
    return (
        "all_reductions average_and_factors bitwise_reductions complex_and_sparse strided_tensors all_gathers "
        "reduce_scatters all_to_alls rooted_calls object_calls async_works future_before_others_come "
        "callbacks_that_ask_for_a_barrier threads_that_store_results dropped_sparse_work coalesced_calls ring_messages "
        "messages_from_any local_groups many_groups subgroup_of_an_enumeration threads_and_groups "
        "other_devices with_the_engines_own_calls"
    ).split()
