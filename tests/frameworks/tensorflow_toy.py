"""A small model of TensorFlow variables with data and comparisons, for tests of the binding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import engine


def model(seed: int = 1) -> list[Any]:
    """Return weights and biases of two layers, in float64, so that rounding cannot hide other differences."""
    random = np.random.default_rng(seed)
    shapes = {"first/kernel": (8, 16), "first/bias": (16,), "second/kernel": (16, 3), "second/bias": (3,)}
    return [tf.Variable(random.normal(size=shape) / 3, name=name) for name, shape in shapes.items()]


def whole_batch(step: int, per_rank: int = 4) -> Any:
    """Return the input of all ranks in a step, of shape [per_rank * size, 8]."""
    return tf.constant(np.random.default_rng(1000 + step).normal(size=(per_rank * engine.size(), 8)))


def shard(batch: Any) -> Any:
    """Return this rank's shard of a batch."""
    return batch[engine.rank() :: engine.size()]


def loss_of(variables: Sequence[Any], batch: Any) -> Any:
    """Return the mean over samples, so that the mean over equal shards equals that of the whole."""
    kernel, bias, second, last = variables
    output = tf.tanh(batch @ kernel + bias) @ second + last
    return tf.reduce_mean(tf.reduce_sum((output - tf.sin(batch[:, :3])) ** 2, 1))


def descend(variables: Sequence[Any], gradients: Sequence[Any], rate: float = 0.125) -> None:
    """Make a step of gradient descent."""
    for variable, gradient in zip(variables, gradients, strict=True):
        if gradient is not None:
            variable.assign_sub(rate * tf.cast(tf.convert_to_tensor(gradient), variable.dtype))


def trained_alone(steps: int = 3) -> list[np.ndarray]:
    """Return the model after one process's steps on whole batches."""
    variables = model()
    for step in range(steps):
        with tf.GradientTape() as tape:
            loss = loss_of(variables, whole_batch(step))
        descend(variables, tape.gradient(loss, variables))
    return values(variables)


def values(variables: Sequence[Any]) -> list[np.ndarray]:
    """Return copies of the values."""
    return [each.numpy().copy() for each in variables]


def check_close(found: Sequence[Any], expected: Sequence[Any], tolerance: float = 1e-11) -> None:
    """Check equality up to rounding."""
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), tolerance, tolerance)


def check_same_everywhere(arrays: Sequence[Any]) -> None:
    """Check that all ranks hold the same bits; collective."""
    engine.check_consistency({str(k): np.asarray(each) for k, each in enumerate(arrays)})


def averaged(arrays: Sequence[Any]) -> list[np.ndarray]:
    """Return the mean over ranks, computed without the code under test; collective."""
    gathered = engine.allgather_object([np.asarray(each) for each in arrays])
    return [np.mean(of_ranks, 0) for of_ranks in zip(*gathered, strict=True)]


def raises(kind: type[BaseException] | tuple[type[BaseException], ...], function: Callable[[], object]) -> str:
    """Return the text of the error that a call must raise."""
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"did not raise {kind}")


def as_function(function: Callable[..., Any], traced: bool) -> Callable[..., Any]:
    """Return the function, or its compiled graph."""
    return tf.function(function) if traced else function
