"""Instructions for the ranks that train an estimator's model, for any framework, and the files that they keep."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .manifest import TRAIN, VALIDATION, DataError, Manifest
from .reader import Batch, Reader
from .saved_pickles import load_pickle
from .store import Store

START, HISTORY = "start.pkl", "history.json"  # files below the run


@dataclass(frozen=True)
class Training:
    """Instructions for every rank."""

    store: Store
    run: str  # path of the run, below the store; the model is read and written there
    data: str  # path of the data set, below the store
    manifest: Manifest
    features: tuple[str, ...]
    labels: tuple[str, ...]
    shapes: tuple[tuple[int, ...] | None, ...]  # shape of each feature, without the rows; None: that of the data
    # Shape of each label, without the rows; None: that of the model's output
    label_shapes: tuple[tuple[int, ...] | None, ...]
    batch_size: int
    val_batch_size: int
    epochs: int
    steps: int | None  # maximum number of batches of an epoch; None: all
    val_steps: int | None  # same for validation
    shuffle: bool
    seed: int
    # Further arguments of the binding's `DistributedOptimizer`, including `backward_passes_per_step`
    options: Mapping[str, Any]
    verbose: int
    weights: str = ""  # column with the weights of rows; empty: there is none
    cache: bool = False  # whether ranks keep data in memory once they have read it

    @property
    def splits(self) -> list[str]:
        """Splits that have rows; always the training split."""
        return [split for split in (TRAIN, VALIDATION) if split == TRAIN or self.manifest.count_rows(split)]

    def make_reader(self, split: str, rank: int, size: int) -> Reader:
        """Return the reader of a rank's rows of a split."""
        return Reader(
            self.store,
            self.data,
            self.manifest,
            [*self.features, *self.labels, *([self.weights] if self.weights else [])],
            split,
            rank=rank,
            size=size,
            seed=self.seed,
            shuffle=self.shuffle and split == TRAIN,
            cache=self.cache,
        )

    def plan_batches(self, reader: Reader, split: str) -> tuple[int, int]:
        """Return the batch size of a split, and the number of batches of an epoch."""
        size, most = (self.batch_size, self.steps) if split == TRAIN else (self.val_batch_size, self.val_steps)
        steps = reader.count_steps(size)
        return size, steps if most is None else min(most, steps)

    def keep_history(self, history: Sequence[Mapping[str, float]]) -> None:
        """Write the history of the epochs so far, and show the last one."""
        self.store.write(f"{self.run}/{HISTORY}", json.dumps(history).encode())
        if self.verbose:
            said = ", ".join(f"{name} {value:.6g}" for name, value in history[-1].items())
            print(f"epoch {len(history)} of {self.epochs}: {said}", flush=True)


def load(store: Store, path: str) -> Any:
    """Read a pickle of a store. That runs code, so only trusted users may have write access to the store."""
    return load_pickle(store.read(path))


def dump(store: Store, path: str, value: Any) -> None:
    """Write a pickle into a store; classes of a notebook are allowed."""
    from pyspark import cloudpickle

    buffer = io.BytesIO()
    cloudpickle.dump(value, buffer)
    store.write(path, buffer.getvalue())


def without_rows(shape: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return the shape of one row, from a shape with or without a leading -1 for the rows."""
    if shape is None:
        return None
    return tuple(shape[1:] if len(shape) and shape[0] in (-1, None) else shape)


def row_shape(shape: Sequence[int] | None, column: str, length: int) -> tuple[int, ...] | None:
    """Return the shape of a row of a column, without -1; None: that of the column.

    In `shape`, an argument of `without_rows`, one more -1 may stand for the remaining values. `length` is that of the
    column's lists; 0: numbers. Raises DataError if the shape has another number of values than a row.
    """
    sizes, there = without_rows(shape), length or 1
    if sizes is None:
        return None
    known = math.prod(size for size in sizes if size != -1)
    if sizes.count(-1) == 1 and known > 0 and there % known == 0:
        return tuple(there // known if size == -1 else size for size in sizes)
    if -1 in sizes or known != there:
        raise DataError(
            f"column {column!r} has {there} values a row, which the shape {list(shape or ())} does not take: give a "
            "shape of as many values, without the rows, or with -1 for them before it"
        )
    return sizes


def like_shape(label: Any, shape: tuple[int, ...]) -> Any:
    """Reshape a label to the shape of the model's output, as losses and metrics of every kind expect it.

    It is an array or a tensor. A label that has another number of values, such as the number of a class, is returned
    unchanged. The shape includes the rows.
    """
    return label.reshape(shape) if math.prod(shape) == math.prod(label.shape) else label


def reshape_columns(batch: Batch, names: Sequence[str], shapes: Sequence[tuple[int, ...] | None]) -> list[Any]:
    """Return columns of a batch as writable copies, each in its shape.

    A shape has the form that `without_rows` takes; None: unchanged.
    """
    rows = [without_rows(shape) for shape in shapes]
    return [
        np.array(batch[name] if shape is None else batch[name].reshape(len(batch[name]), *shape))
        for name, shape in zip(names, rows, strict=True)
    ]
