"""Samplers that go on behind what was trained, in a world of whatever size. They serve a fixed world, too.

Both are what `torch.utils.data.DataLoader` takes, and need no framework. Each counts what was trained, which the
program tells with `record_batch`, and not what was fetched: a loader reads ahead.

An epoch is over on a rank when its own share is recorded. What follows depends on who finished it. If this program
did, the next iteration begins the epoch again, as does `set_epoch` with the same number. If a state was loaded in
which the epoch is over, the samples count as trained, and the first iteration yields nothing and warns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import logs, place
from .sampling import PAD, Cut, GlobalBatches, check_indices, permutation

_BEHIND = (
    "batch {} is behind the last one of this iteration, which has {}: batch_idx counts from 0 in each iteration, as "
    "enumerate(loader) does, also in one that resumes; else samples count as trained that were not"
)


class _Sampler:
    """What both samplers have: an epoch, how much of it is done, and a place in the world."""

    def __init__(self, dataset: Sized, shuffle: bool, seed: int, rank: int | None, size: int | None) -> None:
        if (rank is None) != (size is None):
            raise ValueError("rank and size: give both, or neither, and they are those of the engine")
        if rank is not None and size is not None and not 0 <= rank < size:
            raise ValueError(f"rank is {rank} of {size}; ranks count from 0")
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.rank = 0
        self.size = 1
        self._given = None if rank is None or size is None else (rank, size)
        self._length = len(dataset)
        self._done = 0
        self._taken = 0  # of this rank's share since the last cut, in the unit of `len(self)`
        self._resumed = False  # whether samples count as trained that no iteration since the last reset has yielded
        self._order = permutation(self._length, seed, 0, shuffle)

    @property
    def done(self) -> int:
        """Samples of the epoch that were trained, on all ranks together."""
        return self._done

    @property
    def processed_num(self) -> int:
        """`done`, by the name that Horovod's sampler has for it."""
        return self._done

    @property
    def processed_indices(self) -> set[int]:
        """Indices of the samples of the epoch that were trained, on all ranks together."""
        return set(self._order[: self._done].tolist())

    def __len__(self) -> int:
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. If it is the one that is under way, nothing happens: what was trained in it stays trained.

        Parameters
        ----------
        epoch : int
            Another number than before for another order. The same number begins an epoch again that is over.
        """
        if epoch != self.epoch or self._is_over():
            self._begin(epoch, 0)

    def _is_over(self) -> bool:
        """Whether the epoch ended in this program: this rank's whole share of it is recorded."""
        return not self._resumed and self._taken >= len(self)

    def _start_iteration(self) -> None:
        """Cut what is left for an iteration: of this epoch, or of the same one again if it is over."""
        if self._is_over():
            self._begin(self.epoch, 0)
        self._resumed = False
        self._cut()
        if not self._left():
            logs.logger.warning(
                "%s: this iteration yields nothing, as nothing is left of epoch %d: %d of %d samples count as trained. "
                "Call set_epoch() with the number of the next epoch; one more iteration begins this one again",
                type(self).__name__,
                self.epoch,
                self._done,
                self._length,
            )

    def _left(self) -> bool:
        """Whether any rank has samples of the epoch left: with the tail `"uneven"` this one may have none."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, int]:
        """What another rank, or a later run, needs to go on from here: the order of the epoch is part of it."""
        order = {"seed": self.seed, "shuffle": self.shuffle}
        return {"epoch": self.epoch, "done": self._done, "length": self._length, **order}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from where the state was taken, with the rank and size that this process has now.

        The order is that of the state, whatever seed this sampler was made with: another one would begin behind samples
        that were not trained. A state without an order goes by this sampler's.

        Raises
        ------
        ValueError
            A state of another data set.
        """
        if state["length"] != self._length or not 0 <= state["done"] <= self._length:
            raise ValueError(
                f"the state is that of {state['length']} samples, {state['done']} of them done, and the data set has "
                f"{self._length}: a sampler goes on with the data set that it began with"
            )
        self.seed, self.shuffle = state.get("seed", self.seed), bool(state.get("shuffle", self.shuffle))
        self._begin(state["epoch"], state["done"])

    def _begin(self, epoch: int, done: int) -> None:
        self._order = permutation(self._length, self.seed, epoch, self.shuffle)
        self.epoch, self._done = epoch, done
        self.reset()

    def reset(self) -> None:
        """Cut what is left of the epoch anew, for the rank and size that this process has now."""
        self.rank, self.size = self._given or (place.rank(), place.size())
        self._resumed = self._done > 0
        self._cut()

    def _cut(self) -> None:
        raise NotImplementedError


class ElasticSampler(_Sampler):
    """The samples of this rank, of what is left of the epoch: Horovod's `ElasticSampler` by name and meaning.

    Parameters
    ----------
    dataset : Sized
        Anything with a length.
    shuffle : bool
        Whether each epoch has an order of its own.
    seed : int
        Of these orders; equal on all ranks.
    tail : str
        Of samples that do not divide evenly among ranks. `"pad"` repeats some, fewer than ranks, at the end of the
        epoch; `"uneven"` gives some ranks one more, which needs `join`, and commits only in steps of all ranks;
        `"drop"` leaves them out.
    rank, size : int, optional
        This process's place; not given: that in the engine's world, at each `reset`.

    Attributes
    ----------
    padded : int
        Samples that are repeated in this epoch, as things stand.

    Raises
    ------
    ValueError
        Parameters that cannot be.
    NotInitializedError
        No place was given, and the engine does not run.
    """

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,
        seed: int = 0,
        tail: str = PAD,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        super().__init__(dataset, shuffle, seed, rank, size)
        self.tail = tail
        self.reset()

    def _cut(self) -> None:
        self._rest = Cut(self._length, self._done, self.size, self.tail)
        self._mine: npt.NDArray[np.int64] = self._order[self._rest.positions(self.rank)]
        self._taken = 0
        self._batch = 0

    @property
    def padded(self) -> int:
        """Samples that are repeated in this epoch, as things stand."""
        return self._rest.padded

    def __len__(self) -> int:
        return self._rest.count(self.rank)

    def _left(self) -> bool:
        return self._rest.most > 0

    def __iter__(self) -> Iterator[int]:
        """The samples of this rank that were not trained. An iteration begins behind what was recorded before.

        After an epoch that is over it yields all samples again, in the same order.
        """
        self._start_iteration()
        return iter(self._mine.tolist())

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that a batch was trained, and all before it in this iteration.

        Parameters
        ----------
        batch_idx : int
            From 0 in each iteration, also in one that resumes: as of `enumerate(loader)`.
        batch_size : int
            The loader's. Of a last batch that is smaller its own size will do, but not with the tail `"uneven"`, where
            it tells nothing of the other ranks'.

        Raises
        ------
        ValueError
            A number that cannot be, as of a batch behind the last one of this iteration.
        """
        if batch_idx < 0 or batch_size < 1:
            raise ValueError(f"batch {batch_idx} of {batch_size} samples cannot be")
        largest = max(self._batch, batch_size)
        if batch_idx and batch_idx * largest >= len(self._mine):
            raise ValueError(_BEHIND.format(batch_idx, f"{len(self._mine)} samples, {largest} in a batch"))
        self.count_batch(batch_idx, batch_size)

    def count_batch(self, batch_idx: int, batch_size: int) -> None:
        """As `record_batch`, of a number that is known to count the batches of this iteration."""
        self._batch = max(self._batch, batch_size)
        self._record((batch_idx + 1) * self._batch)

    def record_indices(self, indices: Sequence[int]) -> None:
        """Note that samples were trained: the next ones of this rank.

        Raises
        ------
        ValueError
            They are not the next ones.
        """
        taken = [int(index) for index in indices]
        check_indices(taken, self._mine[self._taken : self._taken + len(taken)].tolist())
        self._record(self._taken + len(taken))

    def _record(self, taken: int) -> None:
        self._taken = taken
        self._done = self._rest.after(taken)


class ElasticBatchSampler(_Sampler):
    """Batches of one size for all ranks together, so that steps are the same for any number of ranks.

    A rank's part of a batch differs from another's by one sample at most. A loss is therefore a sum divided by
    `global_batch`, and gradients are added up over ranks, not averaged. For `DataLoader(batch_sampler=...)`.

    Parameters
    ----------
    dataset : Sized
        Anything with a length.
    global_batch : int
        Samples of all ranks together in a step; at least as many as ranks.
    shuffle : bool
        Whether each epoch has an order of its own.
    seed : int
        Of these orders; equal on all ranks.
    tail : str
        Of the last batch, if samples for a whole one are not left. `"pad"` fills it with the first ones of the epoch;
        `"uneven"` leaves it small, so that ranks without a sample in it have one step less, which needs `join`, and
        commits only in steps of all ranks; `"drop"` leaves it out.
    rank, size : int, optional
        This process's place; not given: that in the engine's world, at each `reset`.

    Raises
    ------
    ValueError
        Parameters that cannot be; fewer samples in a batch than ranks, also at a `reset`.
    NotInitializedError
        No place was given, and the engine does not run.
    """

    def __init__(
        self,
        dataset: Sized,
        global_batch: int,
        shuffle: bool = True,
        seed: int = 0,
        tail: str = PAD,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        super().__init__(dataset, shuffle, seed, rank, size)
        self.global_batch = global_batch
        self.tail = tail
        self._batches = GlobalBatches(self._length, global_batch, tail)
        self.reset()

    def _cut(self) -> None:
        if self.global_batch < self.size:
            raise ValueError(f"a global batch of {self.global_batch} samples is too small for {self.size} ranks")
        self._first = self._done
        self._taken = 0

    @property
    def padded(self) -> int:
        """Samples that are repeated at the end of the epoch."""
        return self._batches.padded

    def __len__(self) -> int:
        batches = self._batches.left(self._first)
        return batches - bool(batches and not self._part(batches - 1))  # only the last part of a rank may be empty

    def _left(self) -> bool:
        return self._batches.left(self._first) > 0

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's parts of the batches that were not trained: it begins behind what was recorded before.

        After an epoch that is over it yields all batches again, in the same order.
        """
        self._start_iteration()
        return iter([*map(self._part, range(len(self)))])

    def _part(self, step: int) -> list[int]:
        indices: list[int] = self._order[self._batches.positions(self._first, step, self.rank, self.size)].tolist()
        return indices

    def record_batch(self, batch_idx: int, batch_size: Any = None) -> None:
        """Note that a batch was trained, and all before it in this iteration.

        Parameters
        ----------
        batch_idx : int
            From 0 in each iteration, also in one that resumes: as of `enumerate(loader)`.
        batch_size : optional
            Has no meaning here; for loops that are written for `ElasticSampler`.

        Raises
        ------
        ValueError
            A number below 0, or of a batch behind the last one of this iteration.
        """
        if batch_idx < 0:
            raise ValueError(f"batch {batch_idx} cannot be; they count from 0")
        left = self._batches.left(self._first)
        if batch_idx and batch_idx >= left:
            raise ValueError(_BEHIND.format(batch_idx, f"{left} batches"))
        self.count_batch(batch_idx)

    def count_batch(self, batch_idx: int, batch_size: Any = None) -> None:
        """As `record_batch`, of a number that is known to count the batches of this iteration."""
        self._taken = batch_idx + 1
        self._done = self._batches.after(self._first, batch_idx + 1)
