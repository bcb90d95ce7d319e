"""Reduction of Keras gradients on the TensorFlow backend, in eager mode and in the graph of `fit`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from ..frameworks.options import ReductionOptions
from ..tensorflow.reduce import reduce_gradients


def reduce(
    gradients: Sequence[Any],
    names: Sequence[str],
    options: ReductionOptions,
    number: int,
    groups: Sequence[Sequence[int]] | None,
) -> list[Any]:
    """Reduce gradients over ranks. Collective. Parameters are those of `reduce_gradients`; `number` is `optimizer`."""
    sent = [
        each if each is None or isinstance(each, tf.IndexedSlices) else tf.convert_to_tensor(each) for each in gradients
    ]
    return reduce_gradients(
        sent, names, options, prefix="", num_groups=options.num_groups, groups=groups, optimizer=number
    )


def to_dense(gradient: Any) -> Any:
    """Return the gradient as a dense tensor."""
    return tf.convert_to_tensor(gradient)


def divide_gradient(gradient: Any, by: int) -> Any:
    """Return the gradient divided by a number."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / by, gradient.indices, gradient.dense_shape)
    return gradient / by


def read_value(variable: Any) -> Any:
    """Return the value of a variable as a NumPy array, even while a function is traced."""
    with tf.init_scope():
        return (variable.value if isinstance(variable, keras.Variable) else variable).numpy()
