"""Adapter of `jax.Array`, through which the collectives read such arrays, and create new ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..collectives.adapters import NumpyAdapter, register
from ..errors import UnsupportedTensorError

_ALIGNMENT = 64  # bytes; XLA uses memory with this alignment without a copy


def expect_host(array: Any, what: str = "an array") -> None:
    """Raise UnsupportedTensorError unless the array is on one CPU device, and has a numeric dtype."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        raise UnsupportedTensorError(f"{what} holds {array.dtype}: send its jax.random.key_data")
    devices = list(array.devices())
    if len(devices) != 1:
        raise UnsupportedTensorError(f"{what} is spread over {len(devices)} devices: a rank has one")
    if devices[0].platform != "cpu":
        raise UnsupportedTensorError(
            f"{what} is on {devices[0]}; the engine works in main memory for now: use "
            'jax.device_put(x, jax.local_devices(backend="cpu")[0])'
        )


class JaxAdapter(NumpyAdapter):
    """Adapter for `jax.Array`. Arrays are read as NumPy arrays; results are arrays over memory of the engine."""

    def as_input(self, tensor: Any) -> Any:
        expect_host(tensor)
        return super().as_input(np.asarray(tensor))

    def as_target(self, tensor: Any) -> Any:
        raise UnsupportedTensorError("arrays of JAX cannot be written to: use the call without '_'")

    def make_empty(self, source: Any) -> Any:
        raw = np.empty(source.nbytes + _ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        return raw[start : start + source.nbytes].view(source.dtype).reshape(source.shape)

    def as_framework_tensor(self, tensor: Any, output: Any) -> Any:
        """Return `output` as an array of JAX, over the same memory if that is aligned."""
        return _array_over(output, tensor)

    def make_gathered(self, tensor: Any, data: memoryview, rows: int) -> Any:
        return _array_over(super().make_gathered(tensor, data, rows), tensor)

    def make_counts(self, rows: Sequence[int]) -> Any:
        return jax.numpy.asarray(rows, np.int32)

    def cast(self, tensor: Any, dtype: Any) -> tuple[Any, Any]:
        if not jax.numpy.issubdtype(tensor.dtype, jax.numpy.floating):
            return tensor, None
        return tensor.astype(dtype), tensor.dtype


def _array_over(output: Any, like: Any) -> Any:
    """Make an array over the memory of `output`, which is not written to any more; a copy if it is not aligned."""
    return jax.device_put(output, next(iter(like.devices())), may_alias=True)


class TracerAdapter(JaxAdapter):
    """Adapter for tracers, which raises an error, since a tracer has no values while JAX traces a function."""

    def as_input(self, tensor: Any) -> Any:
        raise UnsupportedTensorError(
            f"{type(tensor).__name__} is a tracer: inside jit, grad and vmap call engine.jax.allreduce or another "
            "function of engine.jax, which JAX can trace, in place of engine.allreduce"
        )


register(jax.Array, JaxAdapter())
register(jax.core.Tracer, TracerAdapter())
