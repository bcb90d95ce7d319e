"""Objects that others keep alive."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

T = TypeVar("T")


class LiveObjects(Generic[T]):
    """Objects that others keep alive, in the order in which they were added.

    There is no lock: each step is one of the interpreter's own, so threads and signal handlers may come in between.
    """

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[T]] = {}

    def add(self, item: T) -> None:
        key, references = id(item), self._references
        references[key] = weakref.ref(item, lambda gone: references.pop(key, None))

    def list_items(self) -> list[T]:
        """Return the objects that are alive."""
        return [item for each in list(self._references.values()) if (item := each()) is not None]
