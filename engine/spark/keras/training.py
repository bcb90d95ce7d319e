"""What the ranks of an estimator do: train a model of Keras on their parts of a data set, and keep it in a store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from ..manifest import TRAIN, VALIDATION
from ..reader import Reader
from ..training import START, Training, dump, load, shaped
from .packed import Packed

CHECKPOINT = "checkpoint/model.pkl"


@dataclass(frozen=True)
class Start:
    """A model, and how it is trained.

    Attributes
    ----------
    model : keras.Model
    compiled : mapping
        Arguments of `compile`; none: the model is compiled.
    callbacks : list of keras.callbacks.Callback
    custom_objects : mapping of str to object
    """

    model: Any
    compiled: Mapping[str, Any]
    callbacks: list[Any]
    custom_objects: Mapping[str, Any]


def train(training: Training) -> list[dict[str, float]]:
    """Train on one rank.

    Returns
    -------
    list of dict of str to float
        By epoch: losses and metrics, averaged over all ranks.
    """
    start = load(training.store, f"{training.run}/{START}")  # first of all: it chooses Keras' backend
    import keras

    from ... import keras as hvd

    hvd.init()
    keras.utils.set_random_seed(training.seed)
    model = start.model
    if start.compiled:
        model.compile(**start.compiled)
    hvd.DistributedOptimizer(model.optimizer, **training.options)
    readers = {split: training.reader(split, hvd.rank(), hvd.size()) for split in training.splits}
    steps = {split: training.batches(reader, split)[1] for split, reader in readers.items()}
    validation: dict[str, Any] = {}
    if VALIDATION in readers:
        batches = _batches(training, readers[VALIDATION], VALIDATION)
        validation = {"validation_data": batches, "validation_steps": steps[VALIDATION]}
    history: list[dict[str, float]] = []

    def keep(epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        history.append({name: float(value) for name, value in (logs or {}).items()})
        if hvd.rank() == 0:
            dump(training.store, f"{training.run}/{CHECKPOINT}", Packed(model, start.custom_objects))
            training.keep(history)

    model.fit(
        _batches(training, readers[TRAIN], TRAIN),
        epochs=training.epochs,
        steps_per_epoch=steps[TRAIN],
        shuffle=False,  # the reader does it
        verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            *start.callbacks,
            keras.callbacks.LambdaCallback(on_epoch_end=keep),
        ],
        **validation,
    )
    if hvd.rank() == 0:  # a callback may have chosen other weights at the end, as `EarlyStopping` does
        dump(training.store, f"{training.run}/{CHECKPOINT}", Packed(model, start.custom_objects))
    hvd.barrier()  # the model is there when the first rank ends
    hvd.shutdown()
    return history


def _batches(training: Training, reader: Reader, split: str) -> Iterator[tuple[Any, ...]]:
    """The batches of a rank as `fit` takes them, epoch after epoch without end."""
    size, steps = training.batches(reader, split)
    for epoch in count():
        for batch in islice(reader.batches(epoch, size), steps):
            inputs = shaped(batch, training.features, training.shapes)
            labels = shaped(batch, training.labels, (None,) * len(training.labels))
            weights = [batch[training.weights]] if training.weights else []
            yield (_one_or_all(inputs), _one_or_all(labels), *weights)


def _one_or_all(arrays: list[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else tuple(arrays)
