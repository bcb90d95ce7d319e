"""Samplers and states on real ranks in a world that does not change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import engine
from engine.elastic.samplers import ElasticBatchSampler, ElasticSampler
from engine.elastic.state import HostsUpdatedInterrupt, ObjectState

from ..on_ranks import on_ranks

pytestmark = on_ranks(2)

LENGTH, BATCH, GLOBAL_BATCH = 23, 2, 5


class EnginePeers:
    """Peers of a state that are the engine's ranks."""

    @property
    def rank(self) -> int:
        return engine.rank()

    def gather_values(self, value: Any) -> Sequence[Any]:
        return engine.allgather_object(value)

    def broadcast(self, value: Any, root: int) -> Any:
        return engine.broadcast_object(value, root)

    def reduce_maximum(self, values: Sequence[int]) -> Sequence[int]:
        largest = engine.allreduce(np.array(values, np.int64), op=engine.Max, name="engine.elastic.check")
        return [int(value) for value in largest]


@pytest.mark.sample(1)
@pytest.mark.parametrize("whole", [False, True])
def test_a_loader_gives_every_sample_once(whole: bool, size: int) -> None:
    from torch.utils.data import DataLoader

    data = [10 * number for number in range(LENGTH)]
    if whole:
        batches: Any = ElasticBatchSampler(data, GLOBAL_BATCH, tail="drop")
        loader = DataLoader(data, batch_sampler=batches)
    else:
        batches = ElasticSampler(data, tail="drop")
        loader = DataLoader(data, batch_size=BATCH, sampler=batches)
    seen, done = [], []
    for number, batch in enumerate(loader):
        seen += batch.tolist()
        batches.record_batch(number, BATCH)
        done.append(batches.done)
    every = [sample for part in engine.allgather_object(seen) for sample in part]
    counted = LENGTH - LENGTH % (GLOBAL_BATCH if whole else size)
    assert len(every) == len(set(every)) == done[-1] == counted and set(every) <= set(data)
    assert engine.allgather_object(done) == [done] * size


def test_a_state_is_made_equal_and_committed(rank: int, size: int) -> None:
    state = ObjectState(EnginePeers(), epoch=rank, seen=[rank], sampler=ElasticSampler(range(LENGTH)))
    state.sync()
    assert (state.epoch, state.seen, state.committed) == (0, [0], 0)
    state.sampler.record_batch(0, BATCH)
    state.seen.append(1)
    state.commit()
    state.sampler.record_batch(1, BATCH)
    state.seen.append(2)
    state.restore()
    assert (state.seen, state.sampler.done, state.committed) == ([0, 1], BATCH * size, 1)


def test_the_newest_commit_is_that_of_all(rank: int, size: int) -> None:
    state = ObjectState(EnginePeers(), epoch=0)
    state.sync()
    if rank == size - 1:
        state.epoch = 7
        state.save()
    state.sync()
    assert (state.epoch, state.committed) == (7, 1)


def test_news_of_one_rank_interrupt_all(rank: int, size: int) -> None:
    state = ObjectState(EnginePeers(), epoch=0)
    state.sync()
    state.check_host_updates()
    if rank == size - 1:
        state.on_hosts_updated(state.world)
    with pytest.raises(HostsUpdatedInterrupt):
        state.commit()
    assert state.committed == 1
