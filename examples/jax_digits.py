"""A dense network in JAX learns to read handwritten digits, on any number of ranks.

python examples/jax_digits.py
enginerun -np 2 python examples/jax_digits.py

Whatever the number of ranks, the model sees the same batches and its loss falls along the same curve.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import optax
from common import TRAINING, Log, batch, digits, many, stop
from jax import numpy as jnp

import engine
import engine.jax as hvd


def model(seed: int) -> list[dict[str, Any]]:
    """The parameters of two dense layers."""
    initialize = jax.nn.initializers.glorot_uniform()
    keys = jax.random.split(jax.random.key(seed))
    shapes = (64, 128), (128, 10)
    return [{"w": initialize(key, shape), "b": jnp.zeros(shape[1])} for key, shape in zip(keys, shapes, strict=True)]


def scores(parameters: list[dict[str, Any]], pictures: Any) -> Any:
    """What the network makes of pictures: a score for each digit."""
    first, second = parameters
    return jnp.tanh(pictures @ first["w"] + first["b"]) @ second["w"] + second["b"]


def cost(parameters: list[dict[str, Any]], pictures: Any, labels: Any) -> Any:
    """The mean cross entropy over a batch."""
    return optax.softmax_cross_entropy_with_integer_labels(scores(parameters, pictures), labels).mean()


def options() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description="Train a small network of JAX on handwritten digits.")
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

    # Every rank invents a model of its own; that of rank 0 is the one to train.
    parameters = hvd.broadcast_pytree(model(seed=rank), root_rank=0)
    optimizer = hvd.distributed(optax.sgd(0.1, momentum=0.9))  # Averages the gradients over the ranks first.
    state = optimizer.init(parameters)

    @jax.jit
    def train(parameters: Any, state: Any, pictures: Any, labels: Any) -> tuple[Any, Any, Any]:
        loss, gradients = jax.value_and_grad(cost)(parameters, pictures, labels)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, hvd.allreduce(loss, name="loss")

    pictures, labels = digits()
    with Log("digits", args.steps, args.batch, args.log, active=rank == 0) as log:
        for step in range(args.steps):
            waited = engine.counters()["wait_ns"]
            mine = batch(step, args.batch)[rank::size]
            parameters, state, mean = train(parameters, state, pictures[mine], labels[mine])
            log.step(float(mean), (engine.counters()["wait_ns"] - waited) / 1e9)
        answers = scores(parameters, pictures[TRAINING + rank :: size]).argmax(axis=1)
        right = hvd.allreduce((answers == labels[TRAINING + rank :: size]).sum(), op=hvd.Sum, name="right")
        share = int(right) / (len(labels) - TRAINING)
        log.say(f"{share:.1%} of {len(labels) - TRAINING} unseen digits read correctly by {many(size, 'rank')}")
    hvd.check_consistency(parameters)  # Every rank holds the same model, to the bit.


if __name__ == "__main__":
    main()
