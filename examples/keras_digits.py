"""Keras' `fit` learns to read handwritten digits, on any number of ranks and on each backend of Keras.

KERAS_BACKEND=torch python examples/keras_digits.py
KERAS_BACKEND=tensorflow enginerun -np 2 python examples/keras_digits.py
KERAS_BACKEND=jax enginerun -np 3 python examples/keras_digits.py

Whatever the number of ranks, the model sees the same batches and its loss falls along the same curve.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
from common import many, stop
from sklearn.datasets import load_digits

import engine.keras as hvd

TRAINING = 1500  # of the 1797 pictures; the others are for the examination


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Pictures [1797, 8, 8, 1] from 0 to 1 and their labels, in an order that mixes the writers."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    return data.images[order, :, :, None].astype(np.float32) / 16, data.target[order]


def cnn() -> keras.Model:
    """Two convolutions and two dense layers.

    It has no batch normalisation: that would make a sample's loss depend on which others are on its rank. And it is
    smooth: where a rectifier or a maximum switches, the last bit of a sum decides, and curves of different sums part.
    """
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="tanh"),
            layers.Conv2D(32, 3, padding="same", activation="tanh"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(64, activation="tanh"),
            layers.Dense(10),
        ]
    )


def portion(pictures: int, batch: int) -> np.ndarray:
    """Which pictures this rank trains with, batch by batch: its part of each, and all ranks' parts are the whole."""
    whole = np.arange(pictures - pictures % batch).reshape(-1, batch)
    return whole[:, hvd.rank() :: hvd.size()].reshape(-1)


class Note(keras.callbacks.Callback):
    """Writes a line of JSON for each epoch to a file, on rank 0."""

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self._path = path if hvd.rank() == 0 else None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._path is not None:
            with open(self._path, "a") as file:
                print(json.dumps({"epoch": epoch, **(logs or {})}), file=file)


def options() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description="Train a small CNN of Keras on handwritten digits.")
    add = parser.add_argument
    add("--epochs", type=int, default=8)
    add("--batch", type=int, default=60, help="pictures in a step, over all ranks (default 60)")
    add("--pictures", type=int, default=TRAINING, help=f"how many to train with (default {TRAINING})")
    add("--no-wrap", action="store_true", help="leave DistributedOptimizer out, to see that it is needed")
    add("--log", type=Path, help="write a line of JSON for each epoch to this file")
    return parser.parse_args()


def main() -> None:
    """Train, then examine."""
    args = options()
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    if args.batch % size or args.batch > args.pictures:
        stop(f"a batch of {args.batch} of {args.pictures} pictures cannot be shared equally by {many(size, 'rank')}")

    keras.utils.set_random_seed(rank)  # Every rank invents a model of its own; that of rank 0 is the one to train.
    model = cnn()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    if not args.no_wrap:
        optimizer = hvd.DistributedOptimizer(optimizer)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # jit_compile: XLA compiles the step on JAX, with the collectives in it, and cannot have them on TensorFlow.
    xla = keras.backend.backend() == "jax"
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=xla)

    pictures, labels = digits()
    mine = portion(args.pictures, args.batch)
    model.fit(
        pictures[mine],
        labels[mine],
        batch_size=args.batch // size,
        epochs=args.epochs,
        shuffle=False,
        verbose=2 if rank == 0 else 0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            Note(args.log),
        ],
    )
    right = model.predict(pictures[TRAINING + rank :: size], verbose=0).argmax(1) == labels[TRAINING + rank :: size]
    share = hvd.allreduce(right.sum(), op=hvd.Sum) / (len(labels) - TRAINING)
    if rank == 0:
        name = keras.backend.backend()
        print(f"{share:.1%} of {len(labels) - TRAINING} unseen digits read correctly by {many(size, 'rank')} on {name}")
    if not args.no_wrap:
        named = {each.path: keras.ops.convert_to_numpy(each) for each in model.weights}
        hvd.check_consistency(named)  # Every rank holds the same model, to the bit.


if __name__ == "__main__":
    main()
