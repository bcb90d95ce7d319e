"""Batch normalisation with the joint statistics of all ranks' batches, as a layer of Keras.

The algorithm is that of `engine.torch.sync_batch_norm`. Each rank computes the mean m of its n values, and the sum M2
of their squared deviations. These are gathered and merged in float64, in the order of ranks, by the formula of Chan,
Golub and LeVeque (1983):

    mean = sum(n m) / sum(n)        M2 = sum(M2 + n (m - mean)^2)

Every rank merges the same numbers in the same order, so moving statistics stay bitwise equal. Gradients flow back
through the same formula and one allreduce. They are mathematical ones: sums over the outputs of all ranks.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from ..collectives.process_sets import ProcessSet, global_process_set
from ..frameworks.agreement import ObjectNumber
from . import op
from .call import Call
from .names import once_in_graph


@keras.saving.register_keras_serializable(package="engine")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization` over the batches of all ranks. In training, both directions are collective.

    All ranks of the process set must run it equally often, in the same order; batch sizes may differ, and be 0. In
    inference it behaves like Keras' own layer, and does not communicate. It needs Keras' TensorFlow backend.

    Parameters
    ----------
    fused : bool
        Accepted for existing scripts, and must be False: no fused kernel has the statistics of other ranks.
    process_set : ProcessSet, optional
        Process set whose ranks' batches are normalised together. On a rank outside of it the layer behaves like Keras'
        own. A layer that is made from a configuration has a set of the same ranks that was not added yet.
    **kwargs
        Arguments of `keras.layers.BatchNormalization`.

    Raises
    ------
    ValueError
        `fused` is True, or Keras has another backend than TensorFlow.
    NotInitializedError
        The layer was called in training, but the process set was not added, or has been removed.
    """

    def __init__(self, fused: bool = False, process_set: ProcessSet = global_process_set, **kwargs: Any) -> None:
        if fused is not False:
            raise ValueError("SyncBatchNormalization has no fused kernel: leave out fused, or give False")
        if keras.config.backend() != "tensorflow":
            raise ValueError(
                "engine.tensorflow.SyncBatchNormalization needs Keras' TensorFlow backend, not "
                f"{keras.config.backend()}: set KERAS_BACKEND=tensorflow"
            )
        super().__init__(**kwargs)
        self.process_set = process_set
        self._number: ObjectNumber | None = None

    def get_config(self) -> dict[str, Any]:
        """Return the configuration of `keras.layers.BatchNormalization`, with the ranks of the process set.

        The ranks are None for the world.
        """
        ranks = None if self.process_set is global_process_set else list(self.process_set.ranks)
        return {**super().get_config(), "process_set": ranks}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SyncBatchNormalization:
        """Make a layer from a configuration that `get_config` has returned."""
        ranks = config.pop("process_set", None)
        return cls(process_set=global_process_set if ranks is None else ProcessSet(ranks), **config)

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        """Return mean and variance per channel of all ranks' inputs. Keras' own layer calls this only in training."""
        if not self.process_set.included():
            return super()._moments(inputs, mask)
        row = _own_moments(inputs, mask, self._reduction_axes)
        call = Call(
            "allgather", once_in_graph(self._name_of_collective()), self.process_set.call_number, mathematical=True
        )
        (rows,), _ = op.exchange_rows(call, [row])
        counts, means, squares = tf.unstack(rows, axis=1)
        count = tf.maximum(_in_rank_order(counts), 1)
        mean = _in_rank_order(counts * means) / count
        variance = _in_rank_order(squares + counts * tf.square(means - mean)) / count
        return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)

    def _name_of_collective(self) -> str:
        """Return the name of the layer's collective.

        Layers of a process set are numbered in the order of their first use, which is the same on all its ranks.
        """
        if self._number is None:
            self._number = ObjectNumber("sync_batch_norm")
        return f"sync_batch_norm.{self._number.claim_in(self.process_set)}.{self.path}"


def _own_moments(inputs: Any, mask: Any, axes: list[int]) -> Any:
    """Return number, mean and sum of squared deviations of this rank's values per channel: float64 [1, 3, C]."""
    if mask is None:
        here = None
        count = tf.reduce_prod(tf.gather(tf.shape(inputs, tf.int64), axes))
        counts = tf.fill([tf.shape(inputs)[_channel_axis(inputs, axes)]], tf.cast(count, tf.float64))
    else:
        here = tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(inputs))
        inputs = tf.where(here, inputs, tf.zeros_like(inputs))
        counts = tf.cast(tf.math.count_nonzero(here, axes), tf.float64)
    divisor = tf.maximum(counts, 1)
    # The formulas below hold for any centre. A centre near the mean keeps squares small; it needs no gradient.
    centre = tf.stop_gradient(tf.reduce_sum(inputs, axes, keepdims=True) / _reshape_statistics(divisor, inputs, axes))
    centred = inputs - centre
    if here is not None:
        centred = tf.where(here, centred, tf.zeros_like(centred))
    rest = tf.cast(tf.reduce_sum(centred, axes), tf.float64)
    squares = tf.cast(tf.reduce_sum(tf.square(centred), axes), tf.float64) - tf.square(rest) / divisor
    means = tf.cast(tf.squeeze(centre, axes), tf.float64) + rest / divisor
    return tf.stack([counts, means, squares])[None]


def _reshape_statistics(values: Any, like: Any, axes: list[int]) -> Any:
    """Reshape [C] to broadcast with an input, and cast it to the input's dtype."""
    for axis in axes:
        values = tf.expand_dims(values, axis)
    return tf.cast(values, like.dtype)


def _channel_axis(inputs: Any, axes: list[int]) -> int:
    (axis,) = set(range(len(inputs.shape))) - set(axes)
    return axis


def _in_rank_order(rows: Any) -> Any:
    """Add up rows one after the other, since `tf.reduce_sum` guarantees no order. A joined rank has no row."""
    return tf.cumsum(rows, 0)[-1]
