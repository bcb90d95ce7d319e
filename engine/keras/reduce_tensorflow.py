"""Reduces gradients of Keras on the TensorFlow backend, in eager mode and in the graph of `fit`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from ..frameworks.options import Options
from ..tensorflow.reduce import reduce_gradients


def reduce(
    gradients: Sequence[Any],
    names: Sequence[str],
    options: Options,
    number: int,
    groups: Sequence[Sequence[int]] | None,
) -> list[Any]:
    """Reduce gradients over ranks. Collective. Parameters as of `reduce_gradients`; `number`: of the optimizer."""
    sent = [
        each if each is None or isinstance(each, tf.IndexedSlices) else tf.convert_to_tensor(each) for each in gradients
    ]
    return reduce_gradients(
        sent, names, options, prefix="", num_groups=options.num_groups, groups=groups, optimizer=number
    )


def dense(gradient: Any) -> Any:
    """The gradient as a dense tensor."""
    return tf.convert_to_tensor(gradient)


def divided(gradient: Any, by: int) -> Any:
    """The gradient divided by a number."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / by, gradient.indices, gradient.dense_shape)
    return gradient / by


def value(variable: Any) -> Any:
    """The value of a variable as a NumPy array, also while a function is traced."""
    with tf.init_scope():
        return (variable.value if isinstance(variable, keras.Variable) else variable).numpy()
