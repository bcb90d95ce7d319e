"""Copies of values that hold arrays: arrays lie side by side in one memory, and everything else is pickled.

A commit into the memory of an earlier one therefore allocates nothing. Arrays reach another rank in one message, and
without being pickled.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors.formatting import exception_text

Memory = npt.NDArray[np.uint8]

_ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class ArrayPlace:
    """Position and description of an array in the memory of a copy."""

    start: int  # offset in the memory, in bytes
    nbytes: int
    dtype: Any  # notation of the framework; it can be pickled
    shape: tuple[int, ...]
    origin: str = ""  # further data by which the framework recreates the array, such as a kind of device


class NumpyArrays:
    """Operations on arrays of NumPy, except those of Python objects. Those of a framework's arrays derive from it."""

    def is_array(self, value: Any) -> bool:
        """Return whether a value is an array that is to be kept as one."""
        return type(value) is np.ndarray and not value.dtype.hasobject

    def identify_array(self, array: Any) -> Hashable:
        """Return a key that is equal for identical views of the same memory; such arrays stay one array in a copy.

        That of NumPy is the array's identity: a view of the same memory is another array.
        """
        return id(array)

    def describe_array(self, array: Any, start: int) -> ArrayPlace:
        """Return the description of an array that is put at offset `start`, in bytes."""
        return ArrayPlace(start, array.nbytes, array.dtype, array.shape)

    def allocate_memory(self, nbytes: int) -> Memory:
        """Return uninitialized memory for copies."""
        return np.empty(nbytes, np.uint8)

    def copy_into_views(self, arrays: list[Any], views: list[Any]) -> None:
        """Copy each array into the view that `view` returned for its place."""
        for array, view in zip(arrays, views, strict=True):
            np.copyto(view, array)

    def view(self, memory: Memory, place: ArrayPlace) -> Any:
        """Return the array at a place of memory, without a copy."""
        return np.ndarray(place.shape, place.dtype, memory.data, place.start)

    def copy_view(self, view: Any, place: ArrayPlace) -> Any:
        """Return a copy of such a view, on the device that the array came from."""
        return view.copy()


NUMPY = NumpyArrays()


@dataclass(frozen=True)
class Copy:
    """Copy of some values."""

    names: tuple[str, ...]
    pickled: bytes  # one pickle for each value, concatenated, with numbers in place of arrays
    places: tuple[ArrayPlace, ...]  # places of the arrays, by number
    memory: Memory  # uint8[n] that holds the arrays; it may be longer than needed


NOTHING = Copy((), b"", (), np.empty(0, np.uint8))


def count_bytes(places: tuple[ArrayPlace, ...]) -> int:
    """Return how many bytes of memory arrays at these places take."""
    return places[-1].start + places[-1].nbytes if places else 0


class _Pickler(pickle.Pickler):
    """Pickler that replaces arrays by numbers, and collects them."""

    def __init__(self, file: io.BytesIO, kind: NumpyArrays) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.arrays: list[Any] = []
        self._kind = kind
        self._numbers: dict[Hashable, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not self._kind.is_array(value):
            return None
        number = self._numbers.setdefault(self._kind.identify_array(value), len(self.arrays))
        if number == len(self.arrays):
            self.arrays.append(value)  # the reference also prevents that another array gets its address
        return number


class _Unpickler(pickle.Unpickler):
    """Inverse of `_Pickler`."""

    find: Callable[[int], Any]

    def persistent_load(self, number: int) -> Any:
        return self.find(number)


def copy_values(values: Mapping[str, Any], kind: NumpyArrays, find_memory: Callable[[int], Memory]) -> Copy:
    """Copy values; those that share an object share it in the copy, too.

    `find_memory` returns memory of at least the given number of bytes, in which no copy lies that is still needed. A
    TypeError names the value that cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, kind)
    for name, value in values.items():
        try:
            pickler.dump(value)
        except Exception as error:  # whatever a `__reduce__` may raise
            told = exception_text(error)
            raise TypeError(f"{name!r}, of type {type(value).__qualname__}, cannot be kept: {told}") from error
    places: list[ArrayPlace] = []
    for array in pickler.arrays:
        places.append(kind.describe_array(array, -(-count_bytes((*places[-1:],)) // _ALIGNMENT) * _ALIGNMENT))
    memory = find_memory(count_bytes(tuple(places)))
    kind.copy_into_views(pickler.arrays, [kind.view(memory, place) for place in places])
    return Copy(tuple(values), file.getvalue(), tuple(places), memory)


def restore_values(copy: Copy, kind: NumpyArrays, lent: Callable[[str], bool] = lambda name: False) -> dict[str, Any]:
    """Return the values of a copy, which share nothing with it.

    `lent` takes a name, and returns whether the arrays of that value may be views of the copy's memory. That is safe if
    the receiver copies them at once and changes nothing.
    """
    own: dict[int, Any] = {}
    unpickler = _Unpickler(io.BytesIO(copy.pickled))
    values: dict[str, Any] = {}

    def find_array(number: int) -> Any:
        place = copy.places[number]
        view = kind.view(copy.memory, place)
        if lending:
            return view
        if number not in own:
            own[number] = kind.copy_view(view, place)
        return own[number]

    unpickler.find = find_array
    for name in copy.names:
        lending = lent(name)
        values[name] = unpickler.load()
    return values
