"""Copies of values that hold arrays: the arrays lie side by side in one memory, and everything else is pickled.

So a commit that is made into memory of an earlier one allocates nothing, and arrays reach another rank in one message
without being pickled.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .. import readable

Memory = npt.NDArray[np.uint8]

_ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class Place:
    """Where an array lies, and what it is.

    Attributes
    ----------
    start, nbytes : int
    dtype : object
        As its framework writes it; can be pickled.
    shape : tuple of int
    origin : str
        What else its framework needs to know to make the array again, such as a kind of device.
    """

    start: int
    nbytes: int
    dtype: Any
    shape: tuple[int, ...]
    origin: str = ""


class Arrays(Protocol):
    """The arrays of one framework."""

    def owns(self, value: Any) -> bool:
        """Whether a value is such an array, and is to be kept as one."""
        ...

    def key(self, array: Any) -> Hashable:
        """Equal for arrays that are the same memory, seen in the same way; they stay one array in a copy."""
        ...

    def place(self, array: Any, start: int) -> Place:
        """What is kept of an array, at a place."""
        ...

    def memory(self, nbytes: int) -> Memory:
        """Memory for copies; what is in it does not matter."""
        ...

    def write(self, arrays: list[Any], views: list[Any]) -> None:
        """Copy arrays into what `view` gave for their places."""
        ...

    def view(self, memory: Memory, place: Place) -> Any:
        """The array at a place of memory, without a copy."""
        ...

    def own(self, view: Any, place: Place) -> Any:
        """A copy of such a view, where the array came from."""
        ...


class NumpyArrays:
    """Arrays of NumPy, but for those of Python objects."""

    def owns(self, value: Any) -> bool:
        """Whether a value is such an array, and is to be kept as one."""
        return type(value) is np.ndarray and not value.dtype.hasobject

    def key(self, array: npt.NDArray[Any]) -> Hashable:
        """Equal for arrays that are the same memory, seen in the same way."""
        return id(array)

    def place(self, array: npt.NDArray[Any], start: int) -> Place:
        """What is kept of an array, at a place."""
        return Place(start, array.nbytes, array.dtype, array.shape)

    def memory(self, nbytes: int) -> Memory:
        """Memory for copies."""
        return np.empty(nbytes, np.uint8)

    def write(self, arrays: list[Any], views: list[Any]) -> None:
        """Copy arrays into views."""
        for array, view in zip(arrays, views, strict=True):
            np.copyto(view, array)

    def view(self, memory: Memory, place: Place) -> npt.NDArray[Any]:
        """The array at a place of memory."""
        return np.ndarray(place.shape, place.dtype, memory.data, place.start)

    def own(self, view: npt.NDArray[Any], place: Place) -> npt.NDArray[Any]:
        """A copy of such a view."""
        return view.copy()


NUMPY = NumpyArrays()


@dataclass(frozen=True)
class Copy:
    """A copy of some values.

    Attributes
    ----------
    names : tuple of str
        Of the values.
    pickled : bytes
        A pickle of each value, one behind the other, with numbers in place of arrays.
    places : tuple of Place
        By number, the arrays.
    memory : numpy.ndarray
        uint8[n]: where they lie. It may be longer than needed.
    """

    names: tuple[str, ...]
    pickled: bytes
    places: tuple[Place, ...]
    memory: Memory

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the arrays take."""
        return extent(self.places)


NOTHING = Copy((), b"", (), np.empty(0, np.uint8))


def extent(places: tuple[Place, ...]) -> int:
    """Bytes of memory that arrays at these places take."""
    return places[-1].start + places[-1].nbytes if places else 0


class _Pickler(pickle.Pickler):
    """Pickles values, and collects their arrays."""

    def __init__(self, file: io.BytesIO, kind: Arrays) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.arrays: list[Any] = []
        self._kind = kind
        self._numbers: dict[Hashable, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not self._kind.owns(value):
            return None
        number = self._numbers.setdefault(self._kind.key(value), len(self.arrays))
        if number == len(self.arrays):
            self.arrays.append(value)  # which also keeps its address from being given to another
        return number


class _Unpickler(pickle.Unpickler):
    """The inverse of `_Pickler`."""

    find: Callable[[int], Any]

    def persistent_load(self, number: int) -> Any:
        return self.find(number)


def take(values: Mapping[str, Any], kind: Arrays, find_memory: Callable[[int], Memory]) -> Copy:
    """Copy values.

    Parameters
    ----------
    values : mapping of str to object
        Those that share something share it in the copy.
    kind : Arrays
    find_memory : callable
        Gives memory of at least so many bytes, which no copy that is still needed lies in.

    Raises
    ------
    TypeError
        A value that cannot be pickled, by name.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, kind)
    for name, value in values.items():
        try:
            pickler.dump(value)
        except Exception as error:  # whatever a `__reduce__` may raise
            told = readable.exception_text(error)
            raise TypeError(f"{name!r}, of type {type(value).__qualname__}, cannot be kept: {told}") from error
    places: list[Place] = []
    for array in pickler.arrays:
        places.append(kind.place(array, -(-extent((*places[-1:],)) // _ALIGNMENT) * _ALIGNMENT))
    memory = find_memory(extent(tuple(places)))
    kind.write(pickler.arrays, [kind.view(memory, place) for place in places])
    return Copy(tuple(values), file.getvalue(), tuple(places), memory)


def give(copy: Copy, kind: Arrays, lent: Callable[[str], bool] = lambda name: False) -> dict[str, Any]:
    """The values of a copy, which share nothing with it.

    Parameters
    ----------
    copy : Copy
    kind : Arrays
    lent : callable, optional
        Of a name: whether the arrays of that value may be views of the copy's memory, because whoever gets them copies
        them at once, and changes nothing.
    """
    own: dict[int, Any] = {}
    unpickler = _Unpickler(io.BytesIO(copy.pickled))
    values: dict[str, Any] = {}

    def find(number: int) -> Any:
        place = copy.places[number]
        view = kind.view(copy.memory, place)
        if lending:
            return view
        if number not in own:
            own[number] = kind.own(view, place)
        return own[number]

    unpickler.find = find
    for name in copy.names:
        lending = lent(name)
        values[name] = unpickler.load()
    return values
