"""Reader of a rank's part of a data set: every row once an epoch, in any order, and evenly divided among ranks.

Seed and epoch determine an order of the row groups. The rows in that order are cut into equal ranges. So ranks differ
by at most one row, however many ranks and however few row groups there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .columns import to_arrays
from .manifest import TRAIN, DataError, Manifest
from .store import Store

Batch = dict[str, np.ndarray[Any, Any]]


class Reader:
    """Reader of the rows of one rank, from a data set at `path` below the store.

    Without `shuffle`, rows come in the order of the files, in every epoch. With `cache`, row groups stay in memory once
    they have been read. Raises DataError if there are fewer rows than ranks.
    """

    def __init__(
        self,
        store: Store,
        path: str,
        manifest: Manifest,
        columns: list[str],
        split: str = TRAIN,
        *,
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        cache: bool = False,
    ) -> None:
        self._store = store
        self._path = path
        self._columns = [*dict.fromkeys(columns)]
        self._groups = manifest.list_groups(split)
        self._rank, self._size = rank, size
        self._seed = seed
        self._shuffle = shuffle
        self._cache: dict[int, Batch] | None = {} if cache else None
        self.rows = sum(rows for _, _, rows in self._groups)
        if self.rows < size:
            raise DataError(f"{self.rows} {split} rows are too few for {size} ranks: each needs one")

    def count_steps(self, batch_size: int) -> int:
        """Return the number of batches of an epoch, which is equal on all ranks, so that none waits for another.

        A batch may have one row more than `batch_size` if ranks have unequally many rows.
        """
        most, least = -(-self.rows // self._size), self.rows // self._size
        return min(-(-most // batch_size), least)

    def read_batches(self, epoch: int, batch_size: int) -> Iterator[Batch]:
        """Yield the batches of an epoch, whose sizes differ by at most one row.

        A batch has an array for each column, [rows] or [rows, length].
        """
        begin, end = self._find_range()
        steps = self.count_steps(batch_size)
        bounds = [(end - begin) * step // steps for step in range(steps + 1)]
        held: list[Batch] = []
        there, step = 0, 0
        for part in self._read_parts(epoch, begin, end):
            held.append(part)
            there += len(part[self._columns[0]])
            while step < steps and there >= (wanted := bounds[step + 1] - bounds[step]):
                joined = _join_batches(held)
                yield {name: values[:wanted] for name, values in joined.items()}
                held = [{name: values[wanted:] for name, values in joined.items()}]
                there -= wanted
                step += 1

    def _find_range(self) -> tuple[int, int]:
        """Return the bounds of this rank's rows, counted through the row groups in the epoch's order."""
        return self._rank * self.rows // self._size, (self._rank + 1) * self.rows // self._size

    def _read_parts(self, epoch: int, begin: int, end: int) -> Iterator[Batch]:
        """Read the row groups that contain rows of this rank, and yield those rows."""
        order = np.arange(len(self._groups))
        if self._shuffle:
            np.random.default_rng((self._seed, epoch)).shuffle(order)
        at = 0
        for number in order:
            rows = self._groups[number][2]
            if at < end and at + rows > begin:
                group = self._read(int(number))
                if self._shuffle:  # identically on all ranks that share the group
                    mixed = np.random.default_rng((self._seed, epoch, int(number))).permutation(rows)
                    group = {name: values[mixed] for name, values in group.items()}
                yield {name: values[max(0, begin - at) : end - at] for name, values in group.items()}
            at += rows

    def _read(self, number: int) -> Batch:
        import pyarrow.parquet as pq

        if self._cache is not None and number in self._cache:
            return self._cache[number]
        name, group, _ = self._groups[number]
        with self._store.fs.open(self._store.get_full_path(f"{self._path}/{name}"), "rb") as file:
            found = to_arrays(pq.ParquetFile(file).read_row_group(group, columns=self._columns))
        if self._cache is not None:
            self._cache[number] = found
        return found


def _join_batches(parts: list[Batch]) -> Batch:
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
