"""Collectives for NumPy arrays, for tensors of a framework with a binding, and for whatever speaks DLPack or buffers.

What is particular to a framework is an `Adapter` of a few methods. Here are the one for NumPy and the one for whatever
is unknown; a framework's package registers its own, and is imported when its first tensor comes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from engine import runtime
from engine.errors import UnsupportedTensorError
from engine.native import core
from engine.types import Average, Op


class Adapter(Protocol):
    """What the collectives must know about one kind of tensor."""

    def input(self, tensor: Any) -> Any:
        """`tensor`, or a contiguous copy of it, as the native engine takes it. Raises if it is nothing for us."""

    def target(self, tensor: Any) -> Any:
        """As `input`, to be written in place: `tensor`, or a copy that `store` brings back. Raises if read-only."""

    def empty(self, source: Any) -> Any:
        """Memory for a result like `source`, which came from `input`."""

    def store(self, tensor: Any, result: Any) -> None:
        """Copy `result` into `tensor`; called when `target` gave a copy."""

    def result(self, tensor: Any, output: Any) -> Any:
        """`output`, which came from `empty`, as something of the framework of `tensor`."""

    def rows(self, tensor: Any) -> Any:
        """As `input`, with at least one dimension."""

    def gathered(self, tensor: Any, data: memoryview, rows: int) -> Any:
        """The bytes of an allgather, as a tensor of `rows` rows like those of `tensor`."""


class NumpyAdapter:
    """`numpy.ndarray`, its subclasses (results are plain arrays) and NumPy's scalars (results are 0-d arrays)."""

    def input(self, tensor: Any) -> Any:
        return np.asarray(tensor, order="C")

    def target(self, tensor: Any) -> Any:
        if not isinstance(tensor, np.ndarray) or not tensor.flags.writeable:
            raise UnsupportedTensorError(
                "this array is read-only and cannot receive a result; use the call without '_'"
            )
        return np.asarray(tensor, order="C")

    def empty(self, source: Any) -> Any:
        return np.empty_like(source)

    def store(self, tensor: Any, result: Any) -> None:
        tensor[...] = result

    def result(self, tensor: Any, output: Any) -> Any:
        return output

    def rows(self, tensor: Any) -> Any:
        return np.atleast_1d(self.input(tensor))

    def gathered(self, tensor: Any, data: memoryview, rows: int) -> Any:
        return np.ndarray((rows, *np.shape(tensor)[1:]), np.asarray(tensor).dtype, data)


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
            kind = type(tensor)
            raise UnsupportedTensorError(
                f"{kind.__module__}.{kind.__qualname__} does not lend its memory as the engine needs it: {error}"
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
_bindings = {"torch": "engine.torch"}


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
        binding = _bindings.get(base.__module__.partition(".")[0])
        # A class that only claims the framework's name is no tensor of it unless the binding knows one of its bases.
        if binding is not None and base.__module__.partition(".")[0] in sys.modules:
            import_module(binding)
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


class Handle:
    """One asynchronous operation: `poll` it, `synchronize` it. It owns its tensors until the result is fetched."""

    __slots__ = ("_fetch", "_native", "_result")

    def __init__(self, native: core.Handle, result: Any, fetch: Callable[[Any], Any] | None) -> None:
        self._native = native
        self._result = result
        self._fetch = fetch

    @property
    def name(self) -> str:
        """The name the operation goes by on every rank."""
        return self._native.name

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once. Never blocks; raises nothing."""
        return self._native.done

    def wait(self) -> Any:
        """The result, when it is there; may be called again. Raises what went wrong."""
        self._native.wait()
        fetch = self._fetch
        if fetch is not None:
            self._result = fetch(self._result)
            self._fetch = None
        return self._result

    def __repr__(self) -> str:
        return f"<Handle {self.name!r}, {'done' if self.done else 'in flight'}>"


def allreduce_async_(
    tensor: Any,
    op: int | None = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start `allreduce_`; see there. The tensor must be left alone until `synchronize` returns."""
    adapter = adapter_of(tensor)
    target = adapter.target(tensor)
    native = runtime.engine().allreduce(target, target, name, _op(op), prescale_factor, postscale_factor)
    return _in_place(native, adapter, tensor, target)


def allreduce_async(
    tensor: Any,
    op: int | None = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start `allreduce`; see there. The tensor must not be written to until `synchronize` returns."""
    adapter = adapter_of(tensor)
    source = adapter.input(tensor)
    output = adapter.empty(source)
    native = runtime.engine().allreduce(source, output, name, _op(op), prescale_factor, postscale_factor)
    return Handle(native, output, lambda output: adapter.result(tensor, output))


def allreduce(
    tensor: Any,
    op: int | None = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Combine a tensor over all ranks, element by element. Collective.

    Parameters
    ----------
    tensor : array or tensor
        Any shape; float16, bfloat16, float32, float64, int8, uint8, int32, int64 or bool; equal shape and dtype on all
        ranks. In main memory.
    op : Op, optional
        `Average`, `Sum`, `Min`, `Max` or `Product`.
    name : str, optional
        Equal on all ranks. Without one, the n-th unnamed operation of its kind meets the n-th of the other ranks.
    prescale_factor, postscale_factor : float, optional
        Multiply the inputs, and the result.

    Returns
    -------
    array or tensor
        Of the input's framework, shape and dtype, bitwise equal on all ranks. No gradient flows through it.

    Raises
    ------
    MismatchError
        Ranks disagree on shape, dtype, op or scale; all ranks raise it, and the engine goes on.
    DuplicateNameError
        The name is in flight.
    UnsupportedTensorError
        Nothing the engine can work on: a dtype, a device, a list.
    WorldError
        A rank died, raised, left or stalled.
    """
    return allreduce_async(tensor, op, name, prescale_factor, postscale_factor).wait()


def allreduce_(
    tensor: Any,
    op: int | None = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """As `allreduce`, in place. Returns `tensor`."""
    return allreduce_async_(tensor, op, name, prescale_factor, postscale_factor).wait()


def broadcast_async_(tensor: Any, root_rank: int, name: str | None = None) -> Handle:
    """Start `broadcast_`; see `broadcast`. The tensor must be left alone until `synchronize` returns."""
    adapter = adapter_of(tensor)
    target = adapter.target(tensor)
    native = runtime.engine().broadcast(target, target, name, root_rank)
    return _in_place(native, adapter, tensor, target)


def broadcast_async(tensor: Any, root_rank: int, name: str | None = None) -> Handle:
    """Start `broadcast`; see there. The tensor must not be written to until `synchronize` returns."""
    adapter = adapter_of(tensor)
    source = adapter.input(tensor)
    output = adapter.empty(source)
    native = runtime.engine().broadcast(source, output, name, root_rank)
    return Handle(native, output, lambda output: adapter.result(tensor, output))


def broadcast(tensor: Any, root_rank: int, name: str | None = None) -> Any:
    """Give every rank the values of one. Collective.

    Parameters
    ----------
    tensor : array or tensor
        Equal shape and dtype on all ranks; the dtypes of `allreduce`.
    root_rank : int
        Whose values. Equal on all ranks.
    name : str, optional
        As for `allreduce`.

    Returns
    -------
    array or tensor
        Of the input's framework, shape and dtype.

    Raises
    ------
    EngineError
        As for `allreduce`, and for a root that is no rank.
    """
    return broadcast_async(tensor, root_rank, name).wait()


def broadcast_(tensor: Any, root_rank: int, name: str | None = None) -> Any:
    """As `broadcast`, in place. Returns `tensor`."""
    return broadcast_async_(tensor, root_rank, name).wait()


def allgather_async(tensor: Any, name: str | None = None) -> Handle:
    """Start `allgather`; see there. The tensor must not be written to until `synchronize` returns."""
    adapter = adapter_of(tensor)
    native = runtime.engine().allgather(adapter.rows(tensor), name)

    def fetch(_: Any) -> Any:
        data, rows = native.gathered
        return adapter.gathered(tensor, data, sum(rows))

    return Handle(native, None, fetch)


def allgather(tensor: Any, name: str | None = None) -> Any:
    """Concatenate the tensors of all ranks along the first dimension, in rank order. Collective.

    Parameters
    ----------
    tensor : array or tensor
        Equal dtype and shape on all ranks, except that the first dimension may differ. A 0-d tensor counts as one row.
    name : str, optional
        As for `allreduce`.

    Returns
    -------
    array or tensor
        Of the input's framework and dtype, equal on all ranks. No gradient flows through it.

    Raises
    ------
    EngineError
        As for `allreduce`.
    """
    return allgather_async(tensor, name).wait()


def barrier(name: str | None = None) -> None:
    """Return when every rank has called it. Collective."""
    runtime.engine().barrier(name).wait()


def poll(handle: Handle) -> bool:
    """Whether `synchronize` would return, or raise, at once."""
    return handle.done


def synchronize(handle: Handle) -> Any:
    """Wait for an operation and return its result. Raises what went wrong, as the operation's docstring says."""
    return handle.wait()


def _op(op: int | None) -> int:
    return Average if op is None else op if type(op) is Op else Op(op)


def _in_place(native: core.Handle, adapter: Adapter, tensor: Any, target: Any) -> Handle:
    if target is tensor:
        return Handle(native, tensor, None)

    def fetch(target: Any) -> Any:
        adapter.store(tensor, target)
        return tensor

    return Handle(native, target, fetch)
