"""Which samples of an epoch each rank takes, for any number of ranks that changes within the epoch.

A step covers a prefix of what is left of the epoch's permutation: sample i of the rest is rank i modulo ranks'. So what
is done is one number, the length of a prefix, which follows from where the world began, its ranks and what each has
taken; it is equal on all ranks without a word between them, and a world of another size goes on behind it.
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


def permutation(length: int, seed: int, epoch: int, shuffle: bool) -> npt.NDArray[np.int64]:
    """The order in which an epoch's samples are taken.

    Parameters
    ----------
    length : int
        Samples of the data set.
    seed, epoch : int
        From 0 to 2**32 - 1.
    shuffle : bool
        Otherwise they are taken in their own order.

    Returns
    -------
    ndarray of int64, shape (length,)
        The same with every version of NumPy, as hosts may have different ones: its old generator is kept as it was.

    Raises
    ------
    ValueError
        A seed or an epoch out of range.
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
    """How what is left of an epoch is cut for the ranks of one world.

    Parameters
    ----------
    length : int
        Samples of the epoch.
    done : int
        Of these, how many were done when the world began.
    ranks : int
    tail : str
        What becomes of samples that do not divide evenly: with `pad` the first ones of the rest are repeated, so that
        each rank has equally many; with `uneven` lower ranks have one more, and the others need `join`; with `drop`
        they are left out.

    Raises
    ------
    ValueError
        A tail of another name, or numbers that cannot be.
    """

    length: int
    done: int
    ranks: int
    tail: str = PAD

    def __post_init__(self) -> None:
        if self.tail not in TAILS:
            raise ValueError(f"tail is {self.tail!r}, and can be {', '.join(map(repr, TAILS))}")
        if not (0 <= self.done <= self.length and self.ranks >= 1):
            raise ValueError(f"{self.done} of {self.length} samples done, with {self.ranks} ranks, cannot be")

    @property
    def rest(self) -> int:
        """Samples that were not done."""
        return self.length - self.done

    @property
    def padded(self) -> int:
        """Samples that are repeated; fewer than ranks."""
        return -self.rest % self.ranks if self.tail == PAD else 0

    @property
    def most(self) -> int:
        """Samples of rank 0, who has as many as any."""
        return self.rest // self.ranks if self.tail == DROP else -(-self.rest // self.ranks)

    def count(self, rank: int) -> int:
        """Samples of a rank."""
        return len(range(rank, self.rest, self.ranks)) if self.tail == UNEVEN else self.most

    def positions(self, rank: int) -> npt.NDArray[np.int64]:
        """Where in the permutation a rank's samples stand, in the order in which it takes them."""
        behind = rank + self.ranks * np.arange(self.count(rank), dtype=np.int64)
        return self.done + (behind % self.rest if self.rest else behind)

    def after(self, taken: int) -> int:
        """How many samples of the epoch are done when each rank has taken so many, or all that it has."""
        return min(self.done + min(taken, self.most) * self.ranks, self.length)


def share(start: int, stop: int, rank: int, ranks: int) -> range:
    """The part of one global batch, of the positions from `start` to `stop`, that is a rank's: sizes differ by one."""
    return range(start + rank, stop, ranks)


@dataclass(frozen=True)
class GlobalBatches:
    """The batches of an epoch whose size is one number for all ranks together: the same batches for any ranks.

    Parameters
    ----------
    length : int
        Samples of the epoch.
    batch : int
        Samples of all ranks in a step.
    tail : str
        Of the last batch, if samples for a whole one are not left: `pad` fills it with the first ones of the epoch,
        `uneven` leaves it small, so that some ranks may have no sample in it, and `drop` leaves it out.

    Raises
    ------
    ValueError
        A tail of another name, or a batch without a sample.
    """

    length: int
    batch: int
    tail: str = PAD

    def __post_init__(self) -> None:
        if self.tail not in TAILS:
            raise ValueError(f"tail is {self.tail!r}, and can be {', '.join(map(repr, TAILS))}")
        if self.batch < 1:
            raise ValueError(f"the global batch has {self.batch} samples; it must have at least 1")

    @property
    def padded(self) -> int:
        """Samples that are repeated in the last batch."""
        return -self.length % self.batch if self.tail == PAD else 0

    def left(self, done: int) -> int:
        """How many batches follow when so many samples are done."""
        rest = self.length - done
        return rest // self.batch if self.tail == DROP else -(-rest // self.batch)

    def positions(self, done: int, step: int, rank: int, ranks: int) -> list[int]:
        """Where in the permutation a rank's samples of the `step`-th batch behind those done stand."""
        start = done + step * self.batch
        stop = start + self.batch if self.tail == PAD else min(start + self.batch, self.length)
        return [position % self.length for position in share(start, stop, rank, ranks)]

    def after(self, done: int, steps: int) -> int:
        """How many samples of the epoch are done after so many more batches."""
        return min(done + min(steps, self.left(done)) * self.batch, self.length)


def check_indices(taken: Sequence[int], expected: Sequence[int]) -> None:
    """Raise ValueError unless the samples taken are those that were to be taken next, in whatever order."""
    if sorted(taken) != sorted(expected):
        odd = sorted(set(taken) - set(expected))[:5]
        raise ValueError(
            f"{len(taken)} samples were recorded that are not the next ones of this rank"
            f"{f', such as {odd}' if odd else ''}: record samples in the order in which the sampler gives them"
        )
