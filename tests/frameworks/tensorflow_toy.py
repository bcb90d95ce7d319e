"""A small model of TensorFlow's variables, its data, and what tests of the binding compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import engine


def model(seed: int = 1) -> list[Any]:
    """Weights and biases of two layers, float64, which leaves no doubt whether a difference is rounding."""
    random = np.random.default_rng(seed)
    shapes = {"first/kernel": (8, 16), "first/bias": (16,), "second/kernel": (16, 3), "second/bias": (3,)}
    return [tf.Variable(random.normal(size=shape) / 3, name=name) for name, shape in shapes.items()]


def whole_batch(step: int, per_rank: int = 4) -> Any:
    """The input of all ranks in a step, [per_rank * size, 8]."""
    return tf.constant(np.random.default_rng(1000 + step).normal(size=(per_rank * engine.size(), 8)))


def shard(batch: Any) -> Any:
    """What this rank has of it."""
    return batch[engine.rank() :: engine.size()]


def loss_of(variables: Sequence[Any], batch: Any) -> Any:
    """The mean over samples, so that the mean over equal shards is that of the whole."""
    kernel, bias, second, last = variables
    output = tf.tanh(batch @ kernel + bias) @ second + last
    return tf.reduce_mean(tf.reduce_sum((output - tf.sin(batch[:, :3])) ** 2, 1))


def descend(variables: Sequence[Any], gradients: Sequence[Any], rate: float = 0.125) -> None:
    """A step of gradient descent."""
    for variable, gradient in zip(variables, gradients, strict=True):
        if gradient is not None:
            variable.assign_sub(rate * tf.cast(tf.convert_to_tensor(gradient), variable.dtype))


def trained_alone(steps: int = 3) -> list[np.ndarray]:
    """The model after steps of one process on the whole batches."""
    variables = model()
    for step in range(steps):
        with tf.GradientTape() as tape:
            loss = loss_of(variables, whole_batch(step))
        descend(variables, tape.gradient(loss, variables))
    return values(variables)


def values(variables: Sequence[Any]) -> list[np.ndarray]:
    """Copies."""
    return [each.numpy().copy() for each in variables]


def check_close(found: Sequence[Any], expected: Sequence[Any], tolerance: float = 1e-11) -> None:
    """Equal up to rounding."""
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), tolerance, tolerance)


def check_same_everywhere(arrays: Sequence[Any]) -> None:
    """All ranks hold the same bits. Collective."""
    engine.check_consistency({str(k): np.asarray(each) for k, each in enumerate(arrays)})


def averaged(arrays: Sequence[Any]) -> list[np.ndarray]:
    """Mean over ranks by means that are not under test. Collective."""
    gathered = engine.allgather_object([np.asarray(each) for each in arrays])
    return [np.mean(of_ranks, 0) for of_ranks in zip(*gathered, strict=True)]


def raises(kind: type[BaseException] | tuple[type[BaseException], ...], function: Callable[[], object]) -> str:
    """The text of the error that a call must raise."""
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"did not raise {kind}")


def as_function(function: Callable[..., Any], traced: bool) -> Callable[..., Any]:
    """The function itself, or its graph."""
    return tf.function(function) if traced else function
