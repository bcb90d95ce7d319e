"""Process sets and join with torch: optimizers of some ranks, gradients through sets, uneven data."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import torch

import engine
import engine.torch as hvd

from ..on_ranks import on_ranks, spare
from ..waiting import until
from . import toy
from .wrapping import Wrap

pytestmark = on_ranks(1, spare(2), 3, spare(4))


def halves() -> list[hvd.ProcessSet]:
    """Yield sets of the even and the odd ranks, unless these are all ranks."""
    size = engine.size()
    return [engine.add_process_set(range(start, size, 2)) for start in (0, 1) if size > 1]


def test_each_half_trains_a_model_of_its_own() -> None:
    sets = halves()
    rank = engine.rank()
    mine = next((each for each in sets if each.included()), hvd.global_process_set)
    if engine.size() > 2:
        sets.append(engine.add_process_set([0]))
        if rank == 0:  # one optimizer more than the other ranks of its half
            hvd.DistributedOptimizer(torch.optim.SGD(toy.mlp().parameters(), lr=0.1), process_set=sets[-1]).unwrap()
    model, alone = toy.mlp(), toy.mlp()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), process_set=mine
    )
    hvd.broadcast_parameters(model.state_dict(), mine.ranks[0], mine)
    for step in range(4):
        toy.train(model, optimizer, [toy.whole_batch(step)[rank :: engine.size()]])
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(4):
        toy.train(alone, plain, [torch.cat([toy.whole_batch(step)[each :: engine.size()] for each in mine.ranks])])
    engine.check_consistency(dict(model.named_parameters()), process_set=mine)
    for each in sets:
        engine.remove_process_set(each)
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))


def test_who_is_not_in_the_set_trains_alone() -> None:
    if engine.size() == 1:
        return
    first = engine.add_process_set([0])
    model, alone = toy.mlp(), toy.mlp()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), process_set=first)
    batches = [toy.shard(toy.whole_batch(step)) for step in range(3)]
    toy.train(model, optimizer, batches)
    optimizer.synchronize()
    toy.train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), batches)
    optimizer.unwrap()
    engine.remove_process_set(first)
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))
    text = toy.raises(
        ValueError,
        lambda: hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), process_set=first, gradient_as_bucket_view=True
        ),
    )
    assert "needs the global process set" in text


def test_gradients_flow_through_the_ranks_of_a_set() -> None:
    size, rank = engine.size(), engine.rank()
    if size < 2:
        return
    part = engine.add_process_set([0, size - 1]) if size > 2 else hvd.global_process_set
    for mathematical in (True, False) if part.included() else ():
        place, count = part.rank(), part.size()
        x = torch.full((3,), rank + 1.0, dtype=torch.float64, requires_grad=True)
        with hvd.mathematical_gradients(mathematical):
            total = hvd.allreduce(x, op=hvd.Average, process_set=part)
            rows = hvd.allgather(x, process_set=part)
            root = hvd.broadcast(x, part.ranks[-1], process_set=part)
            sent = hvd.alltoall(x[:count], process_set=part)
            kept = hvd.reducescatter(x[:count], op=hvd.Sum, process_set=part)
            (grouped,) = hvd.grouped_allreduce([x], op=hvd.Sum, process_set=part)
        factor = place + 1.0
        sum((factor * each).sum() for each in (total, rows, root, sent, kept, grouped)).backward()
        asked = sum(range(1, count + 1))  # sum of the ranks' factors
        of_all = asked if mathematical else asked / count  # Horovod's gradient is the average over the set's ranks
        expected = torch.full((3,), asked / count + of_all + asked, dtype=torch.float64)
        expected += of_all if place == count - 1 else 0.0  # gradient of the broadcast
        # Gradient of what went to each rank, by the all-to-all and by the reduce-scatter.
        expected[:count] += (2 if mathematical else 1 + count) * torch.arange(1.0, count + 1)
        assert torch.equal(x.grad, expected), (x.grad, expected)
    if part is not hvd.global_process_set:
        engine.remove_process_set(part)


def test_ranks_with_fewer_batches_join(wrap: Wrap) -> None:
    size, rank = engine.size(), engine.rank()
    model, alone = toy.mlp(), toy.mlp()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(2 + size):
        plain.zero_grad()
        for each in range(size):
            if step < 2 + each:
                (toy.loss_of(alone, toy.whole_batch(step)[each::size]) / size).backward()
        plain.step()
    toy.train(model, optimizer, [toy.shard(toy.whole_batch(step)) for step in range(2 + rank)])
    last = hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))
    toy.train(model, optimizer, [toy.shard(toy.whole_batch(9))])
    toy.check_same_everywhere(toy.parameters_of(model))
    assert last == size - 1
    optimizer.unwrap()


def test_an_operation_after_join_is_refused() -> None:
    if engine.size() == 1:
        return
    with tempfile.TemporaryDirectory() as own:
        refused = Path(engine.broadcast_object(own)) / "refused"
        if engine.rank() == 0:
            thread = threading.Thread(target=hvd.join)
            thread.start()
            until(lambda: engine.session.runtime.current_engine().joined, "the other thread has joined")
            late = toy.raises(engine.errors.EngineError, lambda: hvd.allreduce_async(torch.ones(1), name="late"))
            twice = toy.raises(engine.errors.EngineError, hvd.join)
            refused.touch()
            thread.join()
            assert "rank 0 submitted 'late' after join()" in late and "after join()" in twice
        else:
            meanwhile = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="meanwhile")
            until(refused.exists, "rank 0 was refused")
            hvd.join()
            assert meanwhile.item() == engine.size() - 1
