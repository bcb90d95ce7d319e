"""What ranks that train an estimator's model are told, whatever framework it is of, and what they keep in the store."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .manifest import TRAIN, VALIDATION, Manifest
from .reader import Batch, Reader
from .store import Store

START, HISTORY = "start.pkl", "history.json"  # below the run


@dataclass(frozen=True)
class Training:
    """What every rank is told.

    Attributes
    ----------
    store : Store
    run : str
        Of the run, below the store: the model is read and written there.
    data : str
        Of the data set, below the store.
    manifest : Manifest
    features, labels : tuple of str
    shapes : tuple of tuple of int, or None
        Of each feature, without the rows; None: as the data has it.
    batch_size, val_batch_size, epochs : int
    steps, val_steps : int or None
        The most batches of an epoch.
    shuffle : bool
    seed : int
    options : mapping
        More arguments of the binding's `DistributedOptimizer`, `backward_passes_per_step` among them.
    verbose : int
    weights : str
        The column with the rows' weights; empty: there are none.
    """

    store: Store
    run: str
    data: str
    manifest: Manifest
    features: tuple[str, ...]
    labels: tuple[str, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    batch_size: int
    val_batch_size: int
    epochs: int
    steps: int | None
    val_steps: int | None
    shuffle: bool
    seed: int
    options: Mapping[str, Any]
    verbose: int
    weights: str = ""

    @property
    def splits(self) -> list[str]:
        """The splits that have rows."""
        return [split for split in (TRAIN, VALIDATION) if split == TRAIN or self.manifest.rows(split)]

    def reader(self, split: str, rank: int, size: int) -> Reader:
        """What reads a rank's rows of a split."""
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
        )

    def batches(self, reader: Reader, split: str) -> tuple[int, int]:
        """The rows of a batch of a split, and how many batches an epoch has."""
        size, most = (self.batch_size, self.steps) if split == TRAIN else (self.val_batch_size, self.val_steps)
        steps = reader.steps(size)
        return size, steps if most is None else min(most, steps)

    def keep(self, history: Sequence[Mapping[str, float]]) -> None:
        """Write what the epochs until now have given, and show the last."""
        self.store.write(f"{self.run}/{HISTORY}", json.dumps(history).encode())
        if self.verbose:
            said = ", ".join(f"{name} {value:.6g}" for name, value in history[-1].items())
            print(f"epoch {len(history)} of {self.epochs}: {said}", flush=True)


def load(store: Store, path: str) -> Any:
    """Read a pickle of a store. That runs code: the store must be one that only trusted users write to."""
    return pickle.loads(store.read(path))


def dump(store: Store, path: str, value: Any) -> None:
    """Write a pickle into a store, of classes of a notebook, too."""
    from pyspark import cloudpickle

    buffer = io.BytesIO()
    cloudpickle.dump(value, buffer)
    store.write(path, buffer.getvalue())


def shaped(batch: Batch, names: Sequence[str], shapes: Sequence[tuple[int, ...] | None]) -> list[Any]:
    """Columns of a batch, each in its shape.

    Parameters
    ----------
    batch : dict of str to numpy.ndarray
    names : sequence of str
    shapes : sequence of tuple of int, or None
        Of each without the rows; None: as it is.

    Returns
    -------
    list of numpy.ndarray
        Which may be written to.
    """
    return [
        np.array(batch[name] if shape is None else batch[name].reshape(len(batch[name]), *shape))
        for name, shape in zip(names, shapes, strict=True)
    ]
