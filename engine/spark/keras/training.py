"""Training of a Keras model on a rank of an estimator, with its part of a data set, and results in a store."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice, zip_longest
from pathlib import Path
from typing import Any

from ..manifest import TRAIN, VALIDATION
from ..reader import Reader
from ..training import START, Training, dump, like_shape, load, reshape_columns
from .model import compute_outputs
from .packed import Packed

CHECKPOINT = "checkpoint/model.pkl"


@dataclass(frozen=True)
class Start:
    """Model, and how it is trained."""

    model: Any  # keras.Model
    compiled: Mapping[str, Any]  # arguments of `compile`; empty: the model is compiled already
    callbacks: list[Any]  # keras.callbacks.Callback each
    custom_objects: Mapping[str, Any]
    checkpoint: Any = None  # ModelCheckpoint that selects the weights of the trained model; None: the last epoch's


def train_rank(training: Training) -> list[dict[str, float]]:
    """Train on one rank; return losses and metrics by epoch, averaged over all ranks."""
    start = load(training.store, f"{training.run}/{START}")  # before Keras is imported: it selects the backend
    import keras

    from ... import keras as hvd

    hvd.init()
    keras.utils.set_random_seed(training.seed)
    model = start.model
    if start.compiled:
        model.compile(**start.compiled)
    hvd.DistributedOptimizer(model.optimizer, **training.options)
    readers = {split: training.make_reader(split, hvd.rank(), hvd.size()) for split in training.splits}
    steps = {split: training.plan_batches(reader, split)[1] for split, reader in readers.items()}
    outputs = _output_shapes(training, readers[TRAIN], model)
    validation: dict[str, Any] = {}
    if VALIDATION in readers:
        batches = _yield_batches(training, readers[VALIDATION], VALIDATION, outputs)
        validation = {"validation_data": batches, "validation_steps": steps[VALIDATION]}
    history: list[dict[str, float]] = []

    def keep_epoch(epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        history.append({name: float(value) for name, value in (logs or {}).items()})
        if hvd.rank() == 0:
            dump(training.store, f"{training.run}/{CHECKPOINT}", Packed(model, start.custom_objects))
            training.keep_history(history)

    best = Path(tempfile.mkdtemp(prefix="engine-checkpoint-"), "best.weights.h5")
    if start.checkpoint is not None:
        start.checkpoint.filepath, start.checkpoint.save_weights_only = str(best), True
    model.fit(
        _yield_batches(training, readers[TRAIN], TRAIN, outputs),
        epochs=training.epochs,
        steps_per_epoch=steps[TRAIN],
        shuffle=False,  # the reader shuffles
        verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            *start.callbacks,
            *([] if start.checkpoint is None else [start.checkpoint]),
            keras.callbacks.LambdaCallback(on_epoch_end=keep_epoch),
        ],
        **validation,
    )
    if hvd.rank() == 0:  # a callback may have chosen other weights at the end, as `EarlyStopping` does
        if best.exists():
            model.load_weights(best)
        dump(training.store, f"{training.run}/{CHECKPOINT}", Packed(model, start.custom_objects))
    shutil.rmtree(best.parent)
    hvd.barrier()  # no rank ends before the model is written
    hvd.shutdown()
    return history


def _output_shapes(training: Training, reader: Reader, model: Any) -> list[tuple[int, ...]]:
    """Return the shapes of a row of the model's outputs: as the model declares them, or else by computing them."""
    try:
        shapes = [tuple(each.shape[1:]) for each in model.outputs or ()]
    except AttributeError:  # a subclass of `keras.Model`, or a model that is not built
        shapes = []
    if shapes and not any(None in shape for shape in shapes):
        return shapes
    batch = next(iter(reader.read_batches(0, training.batch_size)))
    return [
        output.shape[1:]
        for output in compute_outputs(model, reshape_columns(batch, training.features, training.shapes))
    ]


def _yield_batches(
    training: Training, reader: Reader, split: str, outputs: Sequence[tuple[int, ...]]
) -> Iterator[tuple[Any, ...]]:
    """Yield a rank's batches for `fit`, over endless epochs, with labels in the shapes of the outputs."""
    size, steps = training.plan_batches(reader, split)
    for epoch in count():
        for batch in islice(reader.read_batches(epoch, size), steps):
            inputs = reshape_columns(batch, training.features, training.shapes)
            labels = [
                label if given is not None or shape is None else like_shape(label, (len(label), *shape))
                for label, given, shape in zip_longest(
                    reshape_columns(batch, training.labels, training.label_shapes),
                    training.label_shapes,
                    outputs[: len(training.labels)],
                )
            ]
            weights = [batch[training.weights]] if training.weights else []
            yield (_one_or_all(inputs), _one_or_all(labels), *weights)


def _one_or_all(arrays: list[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else tuple(arrays)
