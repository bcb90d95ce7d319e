"""Groups whose ranks do not ascend: what each rank gets, to be compared between backends."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

Results = list[np.ndarray]


def _orders(size: int) -> list[list[int]]:
    """Return orders of some or all ranks, none of which ascends."""
    everybody = list(range(size))
    return [everybody[::-1], everybody[1:] + everybody[:1], [size - 1, 0], [size - 1, *everybody[:-2]]]


def _in_each_group(rank: int, size: int, call: Callable[[dist.ProcessGroup, list[int]], Results]) -> Results:
    """Call a function in a group of each order that has this rank, and return all results."""
    found: Results = []
    for order in _orders(size):
        group = dist.new_group(order, sort_ranks=False)
        if rank in order:
            assert dist.get_process_group_ranks(group) == order
            assert (dist.get_rank(group), dist.get_world_size(group)) == (order.index(rank), len(order))
            found += [np.array([dist.get_rank(group)]), *call(group, order)]
            dist.barrier(group)  # a rank that leaves fails what others receive from it
            dist.destroy_process_group(group)
    return found


def _values(rank: int, count: int) -> torch.Tensor:
    """Return whole numbers that tell the rank and the place."""
    return torch.arange(float(count)) + 100.0 * rank


def gathered_in_order(rank: int, size: int) -> Results:
    def call(group: dist.ProcessGroup, order: list[int]) -> Results:
        parts = [torch.empty(4) for _ in order]
        dist.all_gather(parts, _values(rank, 4), group=group)
        whole = torch.empty(len(order) * 5)
        dist.all_gather_into_tensor(whole, _values(rank, 5), group=group)
        told: list[object] = [None] * len(order)
        dist.all_gather_object(told, rank, group=group)
        assert told == order
        return [*(each.numpy() for each in parts), whole.numpy()]

    return _in_each_group(rank, size, call)


def reduced_in_order(rank: int, size: int) -> Results:
    def call(group: dist.ProcessGroup, order: list[int]) -> Results:
        total = _values(rank, 7)
        dist.all_reduce(total, group=group)
        share = torch.empty(3)
        dist.reduce_scatter_tensor(share, _values(rank, 3 * len(order)), group=group)
        listed = torch.empty(3)
        dist.reduce_scatter(listed, list(_values(rank, 3 * len(order)).chunk(len(order))), group=group)
        bits = torch.tensor([1 << rank, 7])
        dist.all_reduce(bits, dist.ReduceOp.BOR, group=group)
        return [total.numpy(), share.numpy(), listed.numpy(), bits.numpy()]

    return _in_each_group(rank, size, call)


def exchanged_in_order(rank: int, size: int) -> Results:
    def call(group: dist.ProcessGroup, order: list[int]) -> Results:
        own, count = order.index(rank), len(order)
        output = torch.empty(sum(own + 1 for _ in order))
        dist.all_to_all_single(
            output, _values(rank, count * (count + 1) // 2), [own + 1] * count, list(range(1, count + 1)), group=group
        )
        return [output.numpy()]

    return _in_each_group(rank, size, call)


def rooted_in_order(rank: int, size: int) -> Results:
    """Roots as ranks of the world and as numbers in the group; each rank is the root once."""

    def call(group: dist.ProcessGroup, order: list[int]) -> Results:
        found: Results = []
        for place, root in enumerate(order):
            tensor, other = _values(rank, 4), _values(rank, 4)
            dist.broadcast(tensor, root, group=group)
            dist.broadcast(other, group_src=place, group=group)
            reduced = _values(rank, 4)
            dist.reduce(reduced, root, group=group)
            parts = [torch.empty(2) for _ in order] if rank == root else None
            dist.gather(_values(rank, 2), parts, root, group=group)
            share = torch.empty(2)
            dist.scatter(share, [_values(k, 2) for k in range(len(order))] if rank == root else None, root, group=group)
            found += [tensor.numpy(), other.numpy(), share.numpy(), *(each.numpy() for each in parts or [])]
            if rank == root:
                found.append(reduced.numpy())
        return found

    return _in_each_group(rank, size, call)


def messages_in_order(rank: int, size: int) -> Results:
    """A ring in the group's order, by numbers in the group and by ranks of the world, of small and large messages."""

    def call(group: dist.ProcessGroup, order: list[int]) -> Results:
        own, count = order.index(rank), len(order)
        found: Results = []
        for length in (3, 50_000):
            target, again = torch.empty(length), torch.empty(length)
            calls = [
                dist.P2POp(dist.isend, _values(rank, length), group=group, group_peer=(own + 1) % count),
                dist.P2POp(dist.irecv, target, group=group, group_peer=(own - 1) % count),
                dist.P2POp(dist.isend, _values(rank, length) + 1, order[own - 1], group, 5),
                dist.P2POp(dist.irecv, again, order[(own + 1) % count], group, 5),
            ]
            for work in dist.batch_isend_irecv(calls):
                work.wait()
            found += [target.numpy(), again.numpy()]
        if own == 0:
            senders = []
            for _ in range(count - 1):
                target = torch.empty(2)
                senders.append(dist.recv(target, group=group, tag=9))
                assert torch.equal(target, _values(senders[-1], 2))
            assert sorted(senders) == sorted(order[1:])
        else:
            dist.send(_values(rank, 2), order[0], group=group, tag=9)
        return found

    return _in_each_group(rank, size, call)


def mesh_in_order(rank: int, size: int) -> Results:
    """Shards of a tensor over meshes whose ranks do not ascend."""
    found: Results = []
    meshes = [torch.arange(size).flip(0), torch.arange(size).roll(1)]
    meshes += [torch.tensor([[3, 1], [0, 2]])] if size == 4 else []
    for ranks in meshes:
        mesh = DeviceMesh("cpu", ranks)
        whole = torch.arange(float(size * 6)).view(size * 2, 3)
        spread = distribute_tensor(whole, mesh, [Shard(0), *[Replicate()] * (ranks.dim() - 1)])
        found += [spread.to_local().numpy(), spread.full_tensor().numpy(), (spread * 2).sum().full_tensor().numpy()]
        found += [np.array(mesh.get_coordinate())]
    return found


def trained_in_order(rank: int, size: int) -> Results:
    """DDP over a group whose first rank, which gives the parameters, is not the lowest."""
    order = [size - 1, 0]
    group = dist.new_group(order, sort_ranks=False)
    if rank not in order:
        return [np.zeros(1)]
    torch.manual_seed(rank)
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 3), process_group=group)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        module(torch.full((4, 5), rank + step + 1.0)).square().mean().backward()
        optimizer.step()
    return [each.detach().numpy() for each in module.parameters()]


def split_in_order(rank: int, size: int) -> Results:
    """Split a group of the engine by numbers in it, twice; gloo has no such call."""
    first = dist.group.WORLD.split_group(list(range(size))[::-1], None, None, "turned", "turned")
    assert first.rank() == size - 1 - rank
    second = first.split_group([size - 1, 0], None, None, "ends", "ends")
    assert (second is None) == (rank not in (0, size - 1))
    found: Results = []
    for group in (first, second):
        if group is not None:
            target = torch.empty(group.size() * 2)
            group._allgather_base(target, _values(rank, 2)).wait()
            found.append(target.numpy())
    return found
