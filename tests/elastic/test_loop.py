"""`engine.elastic.loop` and states on real ranks: loaders with persistent workers, commits, and pending passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

import engine
import engine.elastic
import engine.torch
from engine.elastic.state import LoopProgress
from engine.elastic.worker.peers import WorldPeers
from engine.torch.elastic import TorchState

from ..on_ranks import on_ranks

pytestmark = on_ranks(2)

LENGTH, BATCH, EPOCHS = 24, 3, 2


class StopError(Exception):
    """Ends a loop in the middle, like a failure."""


def training() -> tuple[Any, Any, Any]:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state: Any = TorchState(model, optimizer, epoch=0, seen=[])
    state.sync()
    return model, optimizer, state


def run(state: Any, loader: Any, stop_at: int, **options: Any) -> int:
    """Train until batch `stop_at` raises, and return the number of batches."""
    count = 0
    try:
        for batch in engine.elastic.loop(state, loader, EPOCHS, **options):
            count += 1
            if count == stop_at:
                raise StopError
            state.seen += np.asarray(batch).reshape(-1).tolist()
    except StopError:
        state.restore()
    return count


@pytest.mark.sample(2)
@pytest.mark.parametrize("stop_at", [1, 2, 4, 5, 8])
def test_a_loop_that_is_left_and_begun_again_gives_every_sample_once_in_an_epoch(stop_at: int) -> None:
    """The loader is real, and reads ahead in persistent processes."""
    _, _, state = training()
    loader = DataLoader(range(LENGTH), BATCH, shuffle=True, num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    run(state, loader, stop_at, commit_every=2)
    run(state, loader, 0, commit_every=2)
    every = sorted(sample for seen in engine.allgather_object(state.seen) for sample in seen)
    assert every == sorted([*range(LENGTH)] * EPOCHS) and state.epoch == EPOCHS


@pytest.mark.parametrize("kind", ["array", "arrays", "function", "whole batches"])
def test_arrays_and_functions_are_cut_alike(kind: str) -> None:
    _, _, state = training()
    rows = np.arange(LENGTH)
    options: dict[str, Any] = {"batch_size": BATCH}
    loader: Any = rows
    if kind == "arrays":
        loader = (rows[:, None], rows[:, None])
    elif kind == "function":
        options["sampler"] = engine.elastic.ElasticSampler(rows)
        loader = lambda sampler: (rows[part] for part in np.split(np.array([*sampler]), [2, 5]))  # noqa: E731
        options["batch_size"] = 8
    elif kind == "whole batches":
        options = {"sampler": engine.elastic.ElasticBatchSampler(rows, 6)}
    ended: list[int] = []
    if kind != "function":
        run(state, loader, 3, commit_every=1, **options)
    run(state, loader, 0, on_epoch=ended.append, **options)
    every = sorted(sample for seen in engine.allgather_object(state.seen) for sample in seen)
    assert every == sorted([*range(LENGTH)] * EPOCHS * (2 if kind == "arrays" else 1))
    assert ended == [0, 1]


@pytest.mark.parametrize(("every", "expected", "last"), [(1, [0] * 4 + [1] * 4, 3), (6, [0] * 8, 2)])
def test_a_commit_waits_for_the_passes_of_a_wrapped_optimizer(every: int, expected: list[int], last: int) -> None:
    """A step has four passes, and each batch may end with a check; commits come only after whole steps."""
    model = torch.nn.Linear(1, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = engine.torch.DistributedOptimizer(plain, model.named_parameters(), backward_passes_per_step=4)
    state: Any = TorchState(model, optimizer, steps=0)
    state.sync()
    committed = []
    for number, _ in enumerate(engine.elastic.loop(state, np.arange(16), 1, batch_size=1, commit_every=every)):
        model(torch.ones(1, 1)).sum().backward()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
            state.steps += 1
        committed.append(state.committed)
    assert committed == expected and state.committed == last
    state.restore()
    assert state.steps == 2 and state.progress.epoch == 1


def test_a_loop_over_other_data_goes_on_where_the_first_has_ended() -> None:
    """Both loops may restart, and the first may have fewer samples than the second has done."""
    _, _, state = training()
    for attempt in range(2):
        for _ in engine.elastic.loop(state, np.arange(4), 1, batch_size=1):
            assert not attempt
        for number, _ in enumerate(engine.elastic.loop(state, np.arange(LENGTH), 2, batch_size=1, commit_every=4)):
            if not attempt and number == 6:
                break
        assert attempt or state.progress.done == 12
    assert state.epoch == 2


def test_nothing_is_read_of_an_epoch_of_which_nothing_is_left() -> None:
    """A reset comes after an epoch's last batch; the function cannot make batches of no samples."""
    _, _, state = training()
    sampler = engine.elastic.ElasticSampler(range(LENGTH))

    def batches(sampler: Any) -> Any:
        indices = [*sampler]
        return (batch for batch in np.split(np.array(indices), len(indices) // BATCH))

    state.progress = LoopProgress(0, LENGTH)
    count = run(state, batches, 0, batch_size=BATCH, sampler=sampler)
    assert count == LENGTH // BATCH // engine.size() and state.epoch == EPOCHS


class Stream(IterableDataset[int]):
    """Data without an order of their own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


ROWS: Any = range(LENGTH)
REFUSED = {
    "SubsetRandomSampler": lambda: DataLoader(ROWS, sampler=SubsetRandomSampler([0, 1])),
    "Stream": lambda: DataLoader(Stream()),
    "SequentialSampler without batches": lambda: DataLoader(ROWS, batch_size=None),
    "RandomSampler with replacement": lambda: DataLoader(ROWS, sampler=RandomSampler(ROWS, True)),
    "RandomSampler of 5 of 24 samples": lambda: DataLoader(ROWS, sampler=RandomSampler(ROWS, num_samples=5)),
    "SequentialSampler of 4 of 24 samples": lambda: DataLoader(ROWS, sampler=SequentialSampler(range(4))),
    "a list": lambda: DataLoader(ROWS, batch_sampler=[[1, 2], [3]]),
}


@pytest.mark.parametrize("told", REFUSED)
def test_a_loader_that_cannot_be_cut_is_refused_by_name(told: str) -> None:
    _, _, state = training()
    with pytest.raises(TypeError, match=rf"{told}.*ElasticSampler"):
        engine.elastic.loop(state, REFUSED[told](), 1)


def test_a_loader_of_batches_keeps_them_shuffled_and_of_one_size() -> None:
    _, _, state = training()
    loader = DataLoader(ROWS, batch_sampler=BatchSampler(RandomSampler(ROWS), BATCH, drop_last=False))
    batches = [batch.tolist() for batch in engine.elastic.loop(state, loader, 1)]
    seen = [sample for batch in batches for sample in batch]
    assert {len(batch) for batch in batches} == {BATCH} and seen != sorted(seen)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_distributed_sampler_keeps_its_seed_and_its_tail(drop_last: bool) -> None:
    _, _, state = training()
    sampler: Any = DistributedSampler(ROWS[:23], engine.size(), engine.rank(), seed=7, drop_last=drop_last)
    loader = DataLoader(ROWS[:23], BATCH, sampler=sampler)
    seen = [sample for batch in engine.elastic.loop(state, loader, 1) for sample in batch.tolist()]
    tail = "drop" if drop_last else "pad"
    assert seen == [*engine.elastic.ElasticSampler(ROWS[:23], seed=7, tail=tail)]


def test_what_is_no_loader_is_refused() -> None:
    _, _, state = training()
    with pytest.raises(TypeError, match=r"builtins\.range"):
        engine.elastic.loop(state, range(3), 1, batch_size=1)
    with pytest.raises(ValueError, match="batch_size"):
        engine.elastic.loop(state, np.arange(3), 1)


def test_a_loader_with_an_elastic_sampler_is_used_as_it_is() -> None:
    _, _, state = training()
    sampler = engine.elastic.ElasticSampler(range(LENGTH), seed=5)
    loader = DataLoader(range(LENGTH), BATCH, sampler=sampler)  # type: ignore[arg-type]
    run(state, loader, 0)
    assert sampler.epoch == EPOCHS and len(state.seen) == LENGTH * EPOCHS // engine.size()


def test_peers_go_with_a_world_that_begins_anew(rank: int, size: int) -> None:
    peers = WorldPeers()
    for _ in range(2):
        assert peers.rank == rank and list(peers.gather_values(rank)) == [*range(size)]
        assert peers.broadcast({"from": rank}, size - 1) == {"from": size - 1}
        memory = np.full(1000, rank, np.uint8)
        peers.broadcast_memory(memory, size - 1)
        assert (memory == size - 1).all()
        assert list(peers.reduce_maximum((rank, 5 - rank))) == [size - 1, 5]
        engine.shutdown()
        engine.init()
