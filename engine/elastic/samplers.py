"""Samplers that continue after the trained samples, in a world of any size. They serve a fixed world, too.

`torch.utils.data.DataLoader` takes both, and neither needs a framework. Each counts the samples that were trained,
which the program reports with `record_batch`, and not those that were fetched, since a loader reads ahead.

An epoch is over on a rank when the rank's own share is recorded. If this program has finished the epoch, the next
iteration begins it again, as does `set_epoch` with the same number. If a state was loaded in which the epoch is over,
its samples count as trained; then the first iteration yields nothing and warns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import numpy as np
import numpy.typing as npt

from ..session import topology
from ..text import logs
from .sampling import PAD, Cut, GlobalBatches, check_indices, permute_samples

_BEHIND = (
    "batch {} is behind the last one of this iteration, which has {}: batch_idx counts from 0 in each iteration, as "
    "enumerate(loader) does, also in one that resumes; else samples count as trained that were not"
)


class _Sampler:
    """Base class of both samplers: an epoch, how much of it is done, and a rank in the world."""

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
        self._taken = 0  # recorded part of this rank's share since the last cut, in the unit of `len(self)`
        self._resumed = False  # whether samples were done at the last reset, and no iteration has begun since
        self._order = permute_samples(self._length, seed, 0, shuffle)

    @property
    def done(self) -> int:
        """Number of samples of the epoch that were trained, on all ranks together."""
        return self._done

    @property
    def processed_num(self) -> int:
        """Same as `done`, under the name of Horovod's sampler."""
        return self._done

    @property
    def processed_indices(self) -> set[int]:
        """Indices of the samples of the epoch that were trained, on all ranks together."""
        return set(self._order[: self._done].tolist())

    def __len__(self) -> int:
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; another number than before gives another order.

        The number of the present, unfinished epoch has no effect: its trained samples stay trained. The number of an
        epoch that is over begins it again.
        """
        if epoch != self.epoch or self._is_over():
            self._begin_epoch(epoch, 0)

    def _is_over(self) -> bool:
        """Return whether this program has finished the epoch: this rank's whole share of it is recorded."""
        return not self._resumed and self._taken >= len(self)

    def _start_iteration(self) -> None:
        """Cut the rest of the epoch for an iteration, or begin the same epoch again if it is over."""
        if self._is_over():
            self._begin_epoch(self.epoch, 0)
        self._resumed = False
        self._divide_rest()
        if not self._has_samples_left():
            logs.logger.warning(
                "%s: this iteration yields nothing, as nothing is left of epoch %d: %d of %d samples count as trained. "
                "Call set_epoch() with the number of the next epoch; one more iteration begins this one again",
                type(self).__name__,
                self.epoch,
                self._done,
                self._length,
            )

    def _has_samples_left(self) -> bool:
        """Return whether any rank has samples of the epoch left; with the tail `"uneven"`, this one may have none."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, int]:
        """Return the state from which another rank, or a later run, goes on, including what determines the order."""
        order = {"seed": self.seed, "shuffle": self.shuffle}
        return {"epoch": self.epoch, "done": self._done, "length": self._length, **order}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a state, with the present rank and size of this process; ValueError if its data set is another.

        The order is that of the state, whatever this sampler's own seed: with another order, some samples would be
        skipped that were not trained. For a state without an order, this sampler's is used.
        """
        if state["length"] != self._length or not 0 <= state["done"] <= self._length:
            raise ValueError(
                f"the state is that of {state['length']} samples, {state['done']} of them done, and the data set has "
                f"{self._length}: a sampler goes on with the data set that it began with"
            )
        self.seed, self.shuffle = state.get("seed", self.seed), bool(state.get("shuffle", self.shuffle))
        self._begin_epoch(state["epoch"], state["done"])

    def _begin_epoch(self, epoch: int, done: int) -> None:
        self._order = permute_samples(self._length, self.seed, epoch, self.shuffle)
        self.epoch, self._done = epoch, done
        self.reset()

    def reset(self) -> None:
        """Cut the rest of the epoch again, for the present rank and size of this process."""
        self.rank, self.size = self._given or (topology.rank(), topology.size())
        self._resumed = self._done > 0
        self._divide_rest()

    def _divide_rest(self) -> None:
        raise NotImplementedError


class ElasticSampler(_Sampler):
    """Sampler of this rank's samples of the rest of the epoch, compatible with Horovod's `ElasticSampler`.

    Parameters
    ----------
    dataset : Sized
        Any object with a length.
    shuffle : bool
        Whether each epoch has an order of its own.
    seed : int
        Seed of these orders; equal on all ranks.
    tail : str
        Treatment of samples that do not divide evenly among ranks. `"pad"` repeats some at the end of the epoch, fewer
        than ranks. `"uneven"` gives some ranks one more; it needs `join`, and commits only in steps of all ranks.
        `"drop"` leaves them out.
    rank, size : int, optional
        This process's rank and the number of ranks. Default: those in the engine's world, at each `reset`.

    Attributes
    ----------
    padded : int
        Number of samples that are repeated in this epoch, in the present world.

    Raises
    ------
    ValueError
        Parameters are invalid.
    NotInitializedError
        `rank` and `size` were not given, and the engine does not run.
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

    def _divide_rest(self) -> None:
        self._rest = Cut(self._length, self._done, self.size, self.tail)
        self._mine: npt.NDArray[np.int64] = self._order[self._rest.list_positions(self.rank)]
        self._taken = 0
        self._batch = 0

    @property
    def padded(self) -> int:
        """Number of samples that are repeated in this epoch, in the present world."""
        return self._rest.padded

    def __len__(self) -> int:
        return self._rest.count_samples(self.rank)

    def _has_samples_left(self) -> bool:
        return self._rest.most > 0

    def __iter__(self) -> Iterator[int]:
        """Iterate over this rank's samples that were not trained, starting after those recorded before.

        After an epoch that is over, it yields all samples again, in the same order.
        """
        self._start_iteration()
        return iter(self._mine.tolist())

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that a batch was trained, and all before it in this iteration.

        Parameters
        ----------
        batch_idx : int
            Number of the batch, from 0 in each iteration, also in one that resumes, as in `enumerate(loader)`.
        batch_size : int
            Batch size of the loader. For a smaller last batch, its own size will do, except with the tail `"uneven"`:
            there it does not determine the sizes on other ranks.

        Raises
        ------
        ValueError
            A number is impossible, such as that of a batch after the last one of this iteration.
        """
        if batch_idx < 0 or batch_size < 1:
            raise ValueError(f"batch {batch_idx} of {batch_size} samples cannot be")
        largest = max(self._batch, batch_size)
        if batch_idx and batch_idx * largest >= len(self._mine):
            raise ValueError(_BEHIND.format(batch_idx, f"{len(self._mine)} samples, {largest} in a batch"))
        self.count_batch(batch_idx, batch_size)

    def count_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record a batch like `record_batch`, for a number that is known to count the batches of this iteration."""
        self._batch = max(self._batch, batch_size)
        self._record((batch_idx + 1) * self._batch)

    def record_indices(self, indices: Sequence[int]) -> None:
        """Record that the next samples of this rank were trained.

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
        self._done = self._rest.count_done(taken)


class ElasticBatchSampler(_Sampler):
    """Sampler of batches with one size for all ranks together, so that steps are the same for any number of ranks.

    The ranks' parts of a batch differ by at most one sample. A loss must therefore be a sum divided by `global_batch`,
    and gradients must be added up over ranks, not averaged. Use it as `DataLoader(batch_sampler=...)`.

    Parameters
    ----------
    dataset : Sized
        Any object with a length.
    global_batch : int
        Number of samples of all ranks together in a step; at least the number of ranks.
    shuffle : bool
        Whether each epoch has an order of its own.
    seed : int
        Seed of these orders; equal on all ranks.
    tail : str
        Treatment of an incomplete last batch. `"pad"` fills it with the first samples of the epoch. `"uneven"` leaves
        it small: ranks without a sample in it have one step less, which needs `join`, and commits only in steps of all
        ranks. `"drop"` leaves it out.
    rank, size : int, optional
        This process's rank and the number of ranks. Default: those in the engine's world, at each `reset`.

    Raises
    ------
    ValueError
        Parameters are invalid, or a batch has fewer samples than there are ranks, also at a `reset`.
    NotInitializedError
        `rank` and `size` were not given, and the engine does not run.
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

    def _divide_rest(self) -> None:
        if self.global_batch < self.size:
            raise ValueError(f"a global batch of {self.global_batch} samples is too small for {self.size} ranks")
        self._first = self._done
        self._taken = 0

    @property
    def padded(self) -> int:
        """Number of samples that are repeated at the end of the epoch."""
        return self._batches.padded

    def __len__(self) -> int:
        batches = self._batches.count_left(self._first)
        return batches - bool(batches and not self._select_indices(batches - 1))  # only a rank's last part may be empty

    def _has_samples_left(self) -> bool:
        return self._batches.count_left(self._first) > 0

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over this rank's parts of the batches that were not trained, starting after those recorded before.

        After an epoch that is over, it yields all batches again, in the same order.
        """
        self._start_iteration()
        return iter([*map(self._select_indices, range(len(self)))])

    def _select_indices(self, step: int) -> list[int]:
        indices: list[int] = self._order[self._batches.list_positions(self._first, step, self.rank, self.size)].tolist()
        return indices

    def record_batch(self, batch_idx: int, batch_size: Any = None) -> None:
        """Record that a batch was trained, and all before it in this iteration.

        Parameters
        ----------
        batch_idx : int
            Number of the batch, from 0 in each iteration, also in one that resumes, as in `enumerate(loader)`.
        batch_size : optional
            Ignored; for loops that are written for `ElasticSampler`.

        Raises
        ------
        ValueError
            The number is below 0, or that of a batch after the last one of this iteration.
        """
        if batch_idx < 0:
            raise ValueError(f"batch {batch_idx} cannot be; they count from 0")
        left = self._batches.count_left(self._first)
        if batch_idx and batch_idx >= left:
            raise ValueError(_BEHIND.format(batch_idx, f"{left} batches"))
        self.count_batch(batch_idx)

    def count_batch(self, batch_idx: int, batch_size: Any = None) -> None:
        """Record a batch like `record_batch`, for a number that is known to count the batches of this iteration."""
        self._taken = batch_idx + 1
        self._done = self._batches.count_done(self._first, batch_idx + 1)
