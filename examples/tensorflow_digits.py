"""A dense network in TensorFlow learns to read handwritten digits in a `tf.function`, on any number of ranks.

python examples/tensorflow_digits.py
enginerun -np 2 python examples/tensorflow_digits.py

Whatever the number of ranks, the model sees the same batches and its loss falls along the same curve.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import tensorflow as tf
from common import TRAINING, Log, batch, digits, many, stop

import engine
import engine.tensorflow as hvd

RATE, MOMENTUM = 0.1, 0.9


class Network(tf.Module):
    """Two dense layers, and what gradient descent with momentum remembers of each."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = []
        for inputs, outputs, name in ((64, 128, "hidden"), (128, 10, "scores")):
            bound = (6 / (inputs + outputs)) ** 0.5
            self.weights.append(tf.Variable(tf.random.uniform([inputs, outputs], -bound, bound), name=f"{name}.weight"))
            self.weights.append(tf.Variable(tf.zeros([outputs]), name=f"{name}.bias"))
        self.speeds = [tf.Variable(tf.zeros_like(each), trainable=False) for each in self.weights]

    def __call__(self, pictures: Any) -> Any:
        weight, bias, weight2, bias2 = self.weights
        return tf.tanh(pictures @ weight + bias) @ weight2 + bias2

    @tf.function
    def train(self, pictures: Any, labels: Any) -> Any:
        """One step on this rank's share of a batch; the loss over the whole batch."""
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, self(pictures))
            loss = tf.reduce_mean(entropy)
        gradients = tape.gradient(loss, self.weights)  # Averages over the ranks.
        for weight, speed, gradient in zip(self.weights, self.speeds, gradients, strict=True):
            speed.assign(MOMENTUM * speed - RATE * gradient)
            weight.assign_add(speed)
        return hvd.allreduce(loss, name="loss")


def options() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description="Train a small network of TensorFlow on handwritten digits.")
    add = parser.add_argument
    add("--steps", type=int, default=300)
    add("--batch", type=int, default=100, help="pictures in a step, over all ranks (default 100)")
    add("--log", type=Path, help="write a line of JSON for each step to this file")
    return parser.parse_args()


def main() -> None:
    """Train, then examine."""
    args = options()
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    if args.batch % size or args.batch > TRAINING:
        stop(f"a batch of {args.batch} of {TRAINING} pictures cannot be shared equally by {many(size, 'rank')}")

    tf.random.set_seed(rank)  # Every rank invents a model of its own; that of rank 0 is the one to train.
    network = Network()
    hvd.broadcast_variables(network.weights, root_rank=0)

    pictures, labels = digits()
    with Log("digits", args.steps, args.batch, args.log, active=rank == 0) as log:
        for step in range(args.steps):
            waited = engine.counters()["wait_ns"]
            mine = batch(step, args.batch)[rank::size]
            mean = network.train(tf.constant(pictures[mine]), tf.constant(labels[mine]))
            log.step(float(mean), (engine.counters()["wait_ns"] - waited) / 1e9)
        answers = tf.argmax(network(pictures[TRAINING + rank :: size]), axis=1, output_type=tf.int32)
        own = tf.reduce_sum(tf.cast(answers == labels[TRAINING + rank :: size], tf.int64))
        share = int(hvd.allreduce(own, op=hvd.Sum, name="right")) / (len(labels) - TRAINING)
        log.say(f"{share:.1%} of {len(labels) - TRAINING} unseen digits read correctly by {many(size, 'rank')}")
    hvd.check_consistency({each.name: each.numpy() for each in network.weights})  # to the bit


if __name__ == "__main__":
    main()
