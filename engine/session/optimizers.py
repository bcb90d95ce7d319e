"""Move of wrapped optimizers from one world of an elastic job into the next.

A binding registers each optimizer that it wraps. `runtime.enter_world` lets the ranks agree on the number of
optimizers, and moves them one after the other in the order of their creation. So the first of a surviving rank matches
the first of a new rank. Optimizers that only some ranks have, because they were created within the function that
`elastic.run` wraps, are left behind.
"""

from __future__ import annotations

import weakref
from typing import Protocol


class MovableOptimizer(Protocol):
    """Object that `register_optimizer` accepts."""

    def move_to_world(self, root: int | None) -> None:
        """Restart in the world that this process has just entered. Collective.

        `root` is the rank whose state is used if ranks have to be equal; None if no rank was in a world before.
        """

    def leave_behind(self) -> None:
        """Become unusable, since some rank of the world does not have this object."""


_live: list[weakref.ref[MovableOptimizer]] = []


def register_optimizer(optimizer: MovableOptimizer) -> None:
    """Register an object to be moved into each world that this process enters, as long as it is alive."""
    _live.append(weakref.ref(optimizer))


def forget_optimizer(optimizer: MovableOptimizer) -> None:
    """Unregister an object."""
    _live[:] = [each for each in _live if each() is not optimizer]


def count_optimizers() -> int:
    """Return the number of registered objects."""
    return len(_live_optimizers())


def move_optimizers(common: int, root: int | None) -> None:
    """Move the first `common` objects into the world that this process has just entered; leave the others behind.

    Collective. `root`: same as in `MovableOptimizer.move_to_world`.
    """
    alive = _live_optimizers()
    for each in alive[common:]:
        each.leave_behind()
        forget_optimizer(each)
    for each in alive[:common]:
        each.move_to_world(root)


def _live_optimizers() -> list[MovableOptimizer]:
    _live[:] = [each for each in _live if each() is not None]
    return [there for each in _live if (there := each()) is not None]
