"""Adapter of `tf.Tensor` and `tf.Variable`, through which collectives read, write and create such tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ..collectives.adapters import register
from ..errors import UnsupportedTensorError


class _Lent:
    """Tensor whose memory is exported by DLPack, since NumPy's buffers have no bfloat16 and are read-only."""

    __slots__ = ("dtype", "ndim", "shape", "tensor")

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.dtype, self.shape, self.ndim = tensor, tensor.dtype, tensor.shape, tensor.shape.rank

    def __dlpack__(self) -> Any:
        return tf.experimental.dlpack.to_dlpack(self.tensor)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, rows: Any) -> _Lent:
        return _Lent(self.tensor[rows])


class TensorAdapter:
    """Adapter for tensors with values, and for variables."""

    def as_input(self, tensor: Any) -> Any:
        if isinstance(tensor, tf.Variable):
            tensor = tensor.read_value()
        if not hasattr(tensor, "numpy"):
            raise UnsupportedTensorError(
                f"{tensor!r} is symbolic and has no value yet: inside a tf.function call the functions of "
                "engine.tensorflow"
            )
        return _Lent(tensor)

    def as_target(self, tensor: Any) -> Any:
        if not isinstance(tensor, tf.Variable):
            raise UnsupportedTensorError(
                "a tf.Tensor cannot be written to; use the call without '_', or give a tf.Variable"
            )
        return _Lent(tf.identity(tensor.read_value()))

    def make_empty(self, source: Any) -> Any:
        return _Lent(_allocate_tensor(source.shape, source.dtype))

    def store(self, tensor: Any, result: Any) -> None:
        tensor.assign(result.tensor if isinstance(result, _Lent) else result)

    def as_framework_tensor(self, tensor: Any, output: Any) -> Any:
        """Return the `tf.Tensor` whose memory `output` lends to the engine."""
        return output.tensor

    def as_rows(self, tensor: Any) -> Any:
        source = self.as_input(tensor)
        return source if source.ndim else _Lent(tf.reshape(source.tensor, [1]))

    def make_allocator(self, tensor: Any) -> None:
        return None

    def make_gathered(self, tensor: Any, data: memoryview, rows: int) -> Any:
        shape = (rows, *tensor.shape[1:])
        dtype = tf.as_dtype(tensor.dtype)
        if not data.nbytes:
            return tf.zeros(shape, dtype)
        return tf.convert_to_tensor(np.frombuffer(data, dtype.as_numpy_dtype).reshape(shape))

    def make_counts(self, rows: Sequence[int]) -> Any:
        return tf.constant(rows, tf.int32)

    def cast(self, tensor: Any, dtype: Any) -> tuple[Any, Any]:
        if not tensor.dtype.is_floating:
            return tensor, None
        return tf.cast(tensor, dtype), tensor.dtype


def _allocate_tensor(shape: Any, dtype: Any) -> Any:
    """Create a tensor with unshared memory, which the engine therefore may write to."""
    return tf.raw_ops.Empty(shape=shape, dtype=dtype) if shape.num_elements() else tf.zeros(shape, dtype)


register(tf.Tensor, TensorAdapter())
register(tf.Variable, TensorAdapter())
