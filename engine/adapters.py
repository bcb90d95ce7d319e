"""Adapters: how the collectives read, write and make tensors of each kind.

An `Adapter` is a few methods. Here are the one for NumPy and the one for whatever is unknown and lends its memory; a
framework's package registers its own, and is imported when its first tensor comes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from . import readable
from .errors import UnsupportedTensorError
from .frameworks.table import binding_of, bound_to


class Adapter(Protocol):
    """How the collectives read, write and make tensors of one kind."""

    def input(self, tensor: Any) -> Any:
        """`tensor`, or an aligned, contiguous copy, as the native engine takes it. Raises for others."""

    def target(self, tensor: Any) -> Any:
        """As `input`, to be written in place: `tensor`, or a copy that `store` brings back. Raises if read-only."""

    def empty(self, source: Any) -> Any:
        """Memory for a result like `source`, which came from `input`."""

    def store(self, tensor: Any, result: Any) -> None:
        """Copy `result` into `tensor`; called when `target` gave a copy."""

    def result(self, tensor: Any, output: Any) -> Any:
        """`output`, which came from `empty`, as a tensor of the framework of `tensor`."""

    def rows(self, tensor: Any) -> Any:
        """As `input`, with at least one dimension."""

    def room(self, tensor: Any) -> Callable[[list[int]], list[Any]] | None:
        """Of a tensor on a GPU, what makes tensors for results of so many bytes, on the stream that is current now, in
        whatever thread. None: results of unknown size lie in memory of the engine's."""

    def gathered(self, tensor: Any, data: Any, rows: int) -> Any:
        """The bytes of an allgather, as a tensor of `rows` rows like those of `tensor`. `data` is a memoryview, or what
        `room` has made."""

    def counts(self, rows: Sequence[int]) -> Any:
        """Numbers of rows, as a tensor of int32."""

    def cast(self, tensor: Any, dtype: Any) -> tuple[Any, Any]:
        """`tensor` in a dtype, by name or the framework's own, and the dtype that it had; what is no float stays."""


class NumpyAdapter:
    """`numpy.ndarray`, its subclasses (results are plain arrays) and NumPy's scalars (results are 0-d arrays)."""

    def input(self, tensor: Any) -> Any:
        if type(tensor) is np.ndarray and tensor.flags.carray:
            return tensor
        array = np.asarray(tensor, order="C")
        return array if array.flags.aligned else array.copy()

    def target(self, tensor: Any) -> Any:
        if type(tensor) is np.ndarray and tensor.flags.carray:  # contiguous, aligned and writable in one look
            return tensor
        if not isinstance(tensor, np.ndarray) or not tensor.flags.writeable:
            raise UnsupportedTensorError(
                "this array is read-only and cannot receive a result; use the call without '_'"
            )
        return NumpyAdapter.input(self, tensor)

    def empty(self, source: Any) -> Any:
        return np.empty_like(source)

    def store(self, tensor: Any, result: Any) -> None:
        tensor[...] = result

    def result(self, tensor: Any, output: Any) -> Any:
        return output

    def rows(self, tensor: Any) -> Any:
        return np.atleast_1d(self.input(tensor))

    def room(self, tensor: Any) -> Callable[[list[int]], list[Any]] | None:
        return None

    def gathered(self, tensor: Any, data: memoryview, rows: int) -> Any:
        return np.ndarray((rows, *np.shape(tensor)[1:]), np.asarray(tensor).dtype, data)

    def counts(self, rows: Sequence[int]) -> Any:
        return np.array(rows, np.int32)

    def cast(self, tensor: Any, dtype: Any) -> tuple[Any, Any]:
        array = self.input(tensor)
        if dtype == "bfloat16":
            raise UnsupportedTensorError("NumPy has no bfloat16 to cast an array to; use Compression.fp16, or torch")
        return (array.astype(dtype), array.dtype) if array.dtype.kind == "f" else (tensor, None)


class ProtocolAdapter(NumpyAdapter):
    """Anything else that lends its memory, through a NumPy view of it.

    Results are of the array's own library if it follows the array API standard, else NumPy's.
    """

    def _view(self, tensor: Any) -> Any:
        try:
            if hasattr(tensor, "__dlpack__"):
                return np.from_dlpack(tensor)
            return np.asarray(memoryview(tensor))
        except (TypeError, ValueError, BufferError, RuntimeError) as error:
            kind, told = type(tensor), readable.exception_text(error)
            raise UnsupportedTensorError(
                f"{kind.__module__}.{kind.__qualname__} does not lend its memory as the engine needs it: {told}"
            ) from error

    def input(self, tensor: Any) -> Any:
        return super().input(self._view(tensor))

    def target(self, tensor: Any) -> Any:
        return super().target(self._view(tensor))

    def store(self, tensor: Any, result: Any) -> None:
        self._view(tensor)[...] = result

    def result(self, tensor: Any, output: Any) -> Any:
        if not hasattr(tensor, "__array_namespace__"):
            return output
        return tensor.__array_namespace__().from_dlpack(output)

    def gathered(self, tensor: Any, data: memoryview, rows: int) -> Any:
        return self.result(tensor, super().gathered(self._view(tensor), data, rows))


_adapters: dict[type, Adapter] = {}


def register(kind: type, adapter: Adapter) -> None:
    """Use `adapter` for tensors of `kind` and of its subclasses."""
    _adapters[kind] = adapter


def adapter_of(tensor: Any) -> Adapter:
    """The adapter for a tensor.

    Raises
    ------
    UnsupportedTensorError
        Numbers, lists, and objects that do not lend their memory.
    """
    kind = type(tensor)
    adapter = _adapters.get(kind)
    if adapter is None:
        adapter = _adapters[kind] = _find(tensor)
    return adapter


def _find(tensor: Any) -> Adapter:
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
