"""Adapters, through which the collectives read, write and create tensors of each kind.

This module has the adapters for NumPy and for unknown objects that export their memory. A framework's package
registers its own adapter; it is imported when its first tensor is submitted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ..errors import UnsupportedTensorError
from ..errors.formatting import exception_text
from .bindings import binding_of, bound_to


class Adapter(Protocol):
    """Methods with which the collectives read, write and create tensors of one kind."""

    def as_input(self, tensor: Any) -> Any:
        """Return `tensor`, or an aligned, contiguous copy that the native engine accepts. Raise for anything else."""

    def as_target(self, tensor: Any) -> Any:
        """Return `tensor`, or a copy that `store` writes back, to receive a result. Raise if it is read-only."""

    def make_empty(self, source: Any) -> Any:
        """Allocate memory for a result of the shape and dtype of `source`, which `as_input` has returned."""

    def store(self, tensor: Any, result: Any) -> None:
        """Copy `result` into `tensor`; called when `as_target` has returned a copy."""

    def as_framework_tensor(self, tensor: Any, output: Any) -> Any:
        """Return `output`, which `make_empty` has allocated, as a tensor of the framework of `tensor`."""

    def as_rows(self, tensor: Any) -> Any:
        """Return what `as_input` does, with at least one dimension."""

    def make_allocator(self, tensor: Any) -> Callable[[list[int]], list[Any]] | None:
        """Return an allocator for results of unknown size, for a tensor on a GPU.

        The allocator takes sizes in bytes and returns tensors. It may be called in any thread, and uses the stream that
        is current now. None: such results lie in memory of the engine.
        """

    def make_gathered(self, tensor: Any, data: Any, rows: int) -> Any:
        """Return the bytes of an allgather as a tensor of `rows` rows like those of `tensor`.

        `data` is a memoryview, or a tensor that the allocator of `make_allocator` has made.
        """

    def make_counts(self, rows: Sequence[int]) -> Any:
        """Return numbers of rows as a tensor of int32."""

    def cast(self, tensor: Any, dtype: Any) -> tuple[Any, Any]:
        """Cast a floating-point tensor; return it and its former dtype.

        `dtype` is a name or a dtype of the framework. Tensors of other dtypes are returned unchanged, with None.
        """


class NumpyAdapter:
    """Adapter for `numpy.ndarray`, its subclasses (results are plain arrays) and NumPy scalars (results are 0-d)."""

    def as_input(self, tensor: Any) -> Any:
        if type(tensor) is np.ndarray and tensor.flags.carray:
            return tensor
        array = np.asarray(tensor, order="C")
        return array if array.flags.aligned else array.copy()

    def as_target(self, tensor: Any) -> Any:
        if type(tensor) is np.ndarray and tensor.flags.carray:  # contiguous, aligned and writable in one look
            return tensor
        if not isinstance(tensor, np.ndarray) or not tensor.flags.writeable:
            raise UnsupportedTensorError(
                "this array is read-only and cannot receive a result; use the call without '_'"
            )
        return NumpyAdapter.as_input(self, tensor)

    def make_empty(self, source: Any) -> Any:
        return np.empty_like(source)

    def store(self, tensor: Any, result: Any) -> None:
        tensor[...] = result

    def as_framework_tensor(self, tensor: Any, output: Any) -> Any:
        """Return `output`, which `make_empty` has allocated as an array of NumPy."""
        return output

    def as_rows(self, tensor: Any) -> Any:
        return np.atleast_1d(self.as_input(tensor))

    def make_allocator(self, tensor: Any) -> Callable[[list[int]], list[Any]] | None:
        return None

    def make_gathered(self, tensor: Any, data: memoryview, rows: int) -> Any:
        return np.ndarray((rows, *np.shape(tensor)[1:]), np.asarray(tensor).dtype, data)

    def make_counts(self, rows: Sequence[int]) -> Any:
        return np.array(rows, np.int32)

    def cast(self, tensor: Any, dtype: Any) -> tuple[Any, Any]:
        array = self.as_input(tensor)
        if dtype == "bfloat16":
            raise UnsupportedTensorError("NumPy has no bfloat16 to cast an array to; use Compression.fp16, or torch")
        return (array.astype(dtype), array.dtype) if array.dtype.kind == "f" else (tensor, None)


class ProtocolAdapter(NumpyAdapter):
    """Adapter for any other object that exports its memory, through a NumPy view of it.

    Results belong to the array's own library if it follows the array API standard, else to NumPy.
    """

    def _view(self, tensor: Any) -> Any:
        try:
            if hasattr(tensor, "__dlpack__"):
                return np.from_dlpack(tensor)
            return np.asarray(memoryview(tensor))
        except (TypeError, ValueError, BufferError, RuntimeError) as error:
            kind, told = type(tensor), exception_text(error)
            raise UnsupportedTensorError(
                f"{kind.__module__}.{kind.__qualname__} does not export its memory as the engine needs it: {told}"
            ) from error

    def as_input(self, tensor: Any) -> Any:
        return super().as_input(self._view(tensor))

    def as_target(self, tensor: Any) -> Any:
        return super().as_target(self._view(tensor))

    def store(self, tensor: Any, result: Any) -> None:
        self._view(tensor)[...] = result

    def as_framework_tensor(self, tensor: Any, output: Any) -> Any:
        """Return `output` as an array of the library of `tensor` if it has the array API, else as it is."""
        if not hasattr(tensor, "__array_namespace__"):
            return output
        return tensor.__array_namespace__().from_dlpack(output)

    def make_gathered(self, tensor: Any, data: memoryview, rows: int) -> Any:
        return self.as_framework_tensor(tensor, super().make_gathered(self._view(tensor), data, rows))


_adapters: dict[type, Adapter] = {}


def register(kind: type, adapter: Adapter) -> None:
    """Register an adapter for tensors of a class and its subclasses."""
    _adapters[kind] = adapter


def adapter_of(tensor: Any) -> Adapter:
    """Return the adapter for a tensor.

    Raises UnsupportedTensorError for a number, a list, or an object that does not export its memory.
    """
    kind = type(tensor)
    adapter = _adapters.get(kind)
    if adapter is None:
        adapter = _adapters[kind] = _find_adapter(tensor)
    return adapter


def _find_adapter(tensor: Any) -> Adapter:
    kind = type(tensor)
    for base in kind.__mro__:
        framework = bound_to(base)
        # A class that only claims the framework's name is no tensor of it unless the binding knows one of its bases.
        if framework is not None and framework.package in sys.modules:
            binding_of(framework)
        if base in _adapters:
            return _adapters[base]
    if isinstance(tensor, bool | int | float | complex | list | tuple):
        raise UnsupportedTensorError(
            f"a {kind.__name__} is no tensor; make it one, for example numpy.array(value, dtype='float32')"
        )
    try:
        if not hasattr(tensor, "__dlpack__"):
            memoryview(tensor)
    except TypeError:
        raise UnsupportedTensorError(
            f"{kind.__module__}.{kind.__qualname__} is no tensor: it speaks neither DLPack nor the buffer protocol; "
            "numpy.asarray may convert it"
        ) from None
    return ProtocolAdapter()


register(np.ndarray, NumpyAdapter())
register(np.generic, NumpyAdapter())
