"""Wrapped optimizers move from one world of an elastic job into the next: the same objects, in the same order.

A binding registers what it has wrapped. `runtime.enter` has the ranks agree on how many there are, and then moves them
one after the other, in the order in which they were made: so the first of a survivor and the first of a newcomer meet.
What only some ranks have, because it was made within the function that `elastic.run` wraps, is left behind.
"""

from __future__ import annotations

import weakref
from typing import Protocol


class Movable(Protocol):
    """What `register` takes."""

    def move(self, root: int | None) -> None:
        """Begin anew in the world that this process has just entered. Collective.

        Parameters
        ----------
        root : int or None
            The rank whose state counts where ranks have to be equal; None if nobody has been in a world before.
        """

    def leave_behind(self) -> None:
        """Some rank of the world does not have it: it cannot be used any more."""


_live: list[weakref.ref[Movable]] = []


def register(movable: Movable) -> None:
    """Have it moved into each world that this process enters, as long as it is alive."""
    _live.append(weakref.ref(movable))


def forget(movable: Movable) -> None:
    """Have it moved no more."""
    _live[:] = [each for each in _live if each() is not movable]


def count() -> int:
    """How many there are."""
    return len(_alive())


def move(common: int, root: int | None) -> None:
    """Move the first `common` into the world that this process has just entered, and leave the others behind.

    Collective. `root`: as for `Movable.move`.
    """
    alive = _alive()
    for each in alive[common:]:
        each.leave_behind()
        forget(each)
    for each in alive[:common]:
        each.move(root)


def _alive() -> list[Movable]:
    _live[:] = [each for each in _live if each() is not None]
    return [there for each in _live if (there := each()) is not None]
