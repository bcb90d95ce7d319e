"""Assignment of an epoch's samples to ranks, for a number of ranks that changes within the epoch.

A step covers a prefix of the rest of the epoch's permutation: sample i of the rest belongs to rank i modulo the number
of ranks. So one number, the length of a prefix, says how much is done. It follows from where the world began, its
number of ranks and how many samples each rank has taken. It is equal on all ranks without communication, and a world of
another size continues after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PAD = "pad"
UNEVEN = "uneven"
DROP = "drop"
TAILS = (PAD, UNEVEN, DROP)
LARGEST_BATCH = 2**31 - 1  # samples, whose positions a rank lists at once


def permute_samples(length: int, seed: int, epoch: int, shuffle: bool) -> npt.NDArray[np.int64]:
    """Return the order in which an epoch's samples are taken, int64[length]: shuffled, or that of the data set.

    It is the same with every version of NumPy, since hosts may have different ones: NumPy keeps its legacy generator
    stable. Seed and epoch are from 0 to 2**32 - 1; others are a ValueError.
    """
    for name, value in (("seed", seed), ("epoch", epoch)):
        if not 0 <= value < 2**32:
            raise ValueError(f"{name} is {value}; it must be from 0 to 2**32 - 1")
    order = np.arange(length, dtype=np.int64)
    if shuffle:
        np.random.RandomState(np.array([seed, epoch], np.uint32)).shuffle(order)
    return order


@dataclass(frozen=True)
class Cut:
    """Partition of the rest of an epoch among the ranks of one world.

    `tail` says how samples that do not divide evenly are treated. `pad` repeats the first samples of the rest, so that
    each rank has equally many. `uneven` gives lower ranks one sample more; the other ranks need `join`. `drop` leaves
    them out. An unknown tail and impossible numbers are a ValueError.
    """

    length: int  # number of samples of the epoch
    done: int  # number of samples that were done when the world began
    ranks: int  # number of ranks of the world
    tail: str = PAD

    def __post_init__(self) -> None:
        if self.tail not in TAILS:
            raise ValueError(f"tail is {self.tail!r}, and can be {', '.join(map(repr, TAILS))}")
        if not (0 <= self.done <= self.length and self.ranks >= 1):
            raise ValueError(f"{self.done} of {self.length} samples done, with {self.ranks} ranks, cannot be")

    @property
    def rest(self) -> int:
        """Number of samples that were not done when the world began."""
        return self.length - self.done

    @property
    def padded(self) -> int:
        """Number of samples that are repeated; fewer than ranks."""
        return -self.rest % self.ranks if self.tail == PAD else 0

    @property
    def most(self) -> int:
        """Number of samples of rank 0, the maximum over all ranks."""
        return self.rest // self.ranks if self.tail == DROP else -(-self.rest // self.ranks)

    def count_samples(self, rank: int) -> int:
        """Return the number of samples of a rank."""
        return len(range(rank, self.rest, self.ranks)) if self.tail == UNEVEN else self.most

    def list_positions(self, rank: int) -> npt.NDArray[np.int64]:
        """Return the positions of a rank's samples in the permutation, in the order in which it takes them."""
        behind = rank + self.ranks * np.arange(self.count_samples(rank), dtype=np.int64)
        return self.done + (behind % self.rest if self.rest else behind)

    def count_done(self, taken: int) -> int:
        """Return how many samples of the epoch are done once each rank has taken `taken` samples or all of its own."""
        return min(self.done + min(taken, self.most) * self.ranks, self.length)


@dataclass(frozen=True)
class GlobalBatches:
    """Batches of an epoch, with one size for all ranks together: the same batches for any number of ranks.

    `tail` says how an incomplete last batch is treated. `pad` fills it with the first samples of the epoch. `uneven`
    leaves it small, so that some ranks may have no sample in it. `drop` leaves it out. An unknown tail, and a batch
    without a sample or with too many, are a ValueError.
    """

    length: int  # number of samples of the epoch
    batch: int  # number of samples of all ranks together in a step
    tail: str = PAD

    def __post_init__(self) -> None:
        if self.tail not in TAILS:
            raise ValueError(f"tail is {self.tail!r}, and can be {', '.join(map(repr, TAILS))}")
        if not 1 <= self.batch <= LARGEST_BATCH:
            raise ValueError(f"the global batch has {self.batch} samples; it must have 1 to {LARGEST_BATCH}")

    @property
    def padded(self) -> int:
        """Number of samples that are repeated in the last batch."""
        return -self.length % self.batch if self.tail == PAD else 0

    def count_left(self, done: int) -> int:
        """Return how many batches are left when `done` samples are done."""
        rest = self.length - done
        return rest // self.batch if self.tail == DROP else -(-rest // self.batch)

    def list_positions(self, done: int, step: int, rank: int, ranks: int) -> list[int]:
        """Return the positions in the permutation of a rank's samples of batch `step`, counted after `done` samples."""
        start = done + step * self.batch
        stop = start + self.batch if self.tail == PAD else min(start + self.batch, self.length)
        return [position % self.length for position in range(start + rank, stop, ranks)]

    def count_done(self, done: int, steps: int) -> int:
        """Return how many samples of the epoch are done after `steps` more batches."""
        return min(done + min(steps, self.count_left(done)) * self.batch, self.length)


def check_indices(taken: Sequence[int], expected: Sequence[int]) -> None:
    """Raise ValueError unless the samples taken are the expected ones, in any order."""
    if sorted(taken) != sorted(expected):
        odd = sorted(set(taken) - set(expected))[:5]
        raise ValueError(
            f"{len(taken)} samples were recorded that are not the next ones of this rank"
            f"{f', such as {odd}' if odd else ''}: record samples in the order in which the sampler gives them"
        )
