"""A training whose parameters are the samples that were applied, over worlds that fail and change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from engine.elastic.copies import NUMPY, restore_values
from engine.elastic.samplers import ElasticBatchSampler, ElasticSampler
from engine.elastic.state import HostsUpdatedInterrupt, ObjectState

from .lockstep import Rank, together

EPOCHS = 2


class Worker:
    """A process: its sampler, its state, and samples whose gradients no step has applied yet."""

    def __init__(self, sampler: Any) -> None:
        self.peers = Rank()
        self.sampler = sampler
        self.in_hand: list[int] = []
        self.state = ObjectState(self.peers, sampler=sampler, epoch=0, applied=[[] for _ in range(EPOCHS)])
        self.state.register_in_hand(lambda: bool(self.in_hand))
        self.batches: Iterator[Any] = iter(())


class Training:
    """A training of random length, tail, batches and passes."""

    def __init__(self, below: Callable[[int], int]) -> None:
        self.below = below  # draws a number below a bound
        self.length = below(30)
        self.tail = ("pad", "uneven", "drop")[below(3)]
        self.whole = below(3) == 0  # whether a batch is shared by all ranks
        self.batch = 4 + below(5) if self.whole else 1 + below(4)
        self.passes = 1 + below(3)
        self.commit_every = 1 + below(3)
        self.troubles = 12
        self.resets = 0
        self.workers = [self.new() for _ in range(1 + below(4))]

    def new(self) -> Worker:
        data = range(self.length)
        if self.whole:
            return Worker(ElasticBatchSampler(data, self.batch, seed=3, tail=self.tail, rank=0, size=1))
        return Worker(ElasticSampler(data, seed=3, tail=self.tail, rank=0, size=1))

    def run(self) -> None:
        """Train to the end, and check which samples the parameters contain."""
        self.begin()
        while self.workers[0].state.epoch < EPOCHS:
            try:
                self.epoch()
            except _ResetError as reset:
                self.reset(reset)
        for worker in self.workers:
            for applied in worker.state.applied:
                self.check(applied)

    def check(self, applied: list[int]) -> None:
        """Check that every sample of the epoch is there once, apart from the tail."""
        counts = Counter(applied)
        missing = [sample for sample in range(self.length) if not counts[sample]]
        repeats = len(applied) - len(counts)
        most = self.batch if self.whole else 4  # ranks
        assert len(missing) < most if self.tail == "drop" else not missing, f"lost: {missing}"
        assert (repeats < max(most, 1) if self.tail == "pad" else not repeats) or self.length < most, f"twice: {counts}"

    def begin(self) -> None:
        """Begin a new world: assign ranks, and sync the state."""
        for rank, worker in enumerate(self.workers):
            worker.peers.number = rank
            worker.sampler._given = (rank, len(self.workers))
            worker.in_hand.clear()
            worker.state.enter(self.resets)
            worker.state.on_reset()
        held = [worker.state.committed for worker in self.workers]
        newest = max((number for number in held if number is not None), default=None)
        root = next((worker for worker in self.workers if worker.state.committed == newest), self.workers[0])
        expected = [list(each) for each in restore_values(root.state._held.values, NUMPY)["applied"]]
        errors = together([worker.peers for worker in self.workers], [worker.state.sync for worker in self.workers])
        assert errors == [None] * len(self.workers)
        for worker in self.workers:
            assert worker.state.applied == expected, "committed steps are lost"
            assert worker.state.committed == (0 if newest is None else newest)

    def epoch(self) -> None:
        """Train one epoch, or the rest of it."""
        epoch = self.workers[0].state.epoch
        for worker in self.workers:
            worker.sampler.set_epoch(epoch)
            worker.batches = self.loader(worker.sampler)
        for number in range(self.length + 1):
            parts = [next(worker.batches, None) for worker in self.workers]
            if all(part is None for part in parts):
                break
            self.backward(number, parts)
            if (number + 1) % self.passes == 0:
                self.step(epoch)
            self.trouble()
            if None not in parts:  # a rank without samples has joined, and does not commit
                whole = (number + 1) % self.commit_every == 0
                self.all(lambda state, whole=whole: state.commit() if whole else state.check_host_updates())
        self.step(epoch)
        for worker in self.workers:
            worker.state.epoch += 1
        self.all(lambda state: state.commit())

    def loader(self, sampler: Any) -> Iterator[list[int]]:
        """Return batches like a `DataLoader` that has read all of them before the first is trained."""
        samples = list(sampler)
        if self.whole:
            return iter(samples)
        return iter([samples[start : start + self.batch] for start in range(0, len(samples), self.batch)])

    def backward(self, number: int, parts: list[list[int] | None]) -> None:
        """Make a pass: reduce the gradients of all ranks' samples."""
        samples = [sample for part in parts for sample in part or ()]
        for worker, part in zip(self.workers, parts, strict=True):
            worker.in_hand += samples
            if part is not None:
                worker.sampler.record_batch(number, self.batch if self.tail == "uneven" else len(part))

    def step(self, epoch: int) -> None:
        for worker in self.workers:
            worker.state.applied[epoch] += worker.in_hand
            worker.in_hand.clear()

    def trouble(self) -> None:
        """Perhaps let a rank die, or the hosts change."""
        if self.troubles and self.below(5) == 0:
            self.troubles -= 1
            kind = self.below(3)
            if kind == 0:
                raise _ResetError(failed=True)
            if kind == 1:
                self.workers[self.below(len(self.workers))].state.on_hosts_updated(self.resets)

    def all(self, call: Callable[[ObjectState], None]) -> None:
        """Call a collective of all states, in which a rank may die: some states are then through, and others not."""
        late = set()
        if self.troubles and self.below(12) == 0:
            self.troubles -= 1
            late = {rank for rank in range(len(self.workers)) if self.below(2)}
        errors = together(
            [worker.peers for worker in self.workers],
            [lambda state=worker.state: call(state) for worker in self.workers],
            lambda rank, number: rank in late,
        )
        if late:
            raise _ResetError(failed=True)
        if any(isinstance(error, HostsUpdatedInterrupt) for error in errors):
            assert all(isinstance(error, HostsUpdatedInterrupt) for error in errors), "not all are interrupted"
            for worker in self.workers:
                worker.state.save()
            raise _ResetError(failed=False)
        assert errors == [None] * len(errors)

    def reset(self, reset: _ResetError) -> None:
        self.resets += 1
        if reset.failed:
            for worker in self.workers:
                worker.state.restore()
        leave = self.below(len(self.workers))
        survivors = self.workers[leave:]
        newcomers = [self.new() for _ in range(self.below(5 - len(survivors)))]
        self.workers = newcomers + survivors if self.below(2) else survivors + newcomers
        self.begin()


class _ResetError(Exception):
    def __init__(self, failed: bool) -> None:
        super().__init__()
        self.failed = failed
