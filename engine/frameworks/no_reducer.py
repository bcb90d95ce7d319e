"""What an optimizer has in place of a reducer while its process is in no world that has its process set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Never

from ..errors import NotInitializedError


class NoReducer:
    """Has the methods of `Reducer`. Gradients stay each rank's own, and a step is refused.

    Parameters
    ----------
    passes : int
        Backward passes that are to be added up before a reduction.
    why : str
        Why there is no step, and what to do.
    """

    def __init__(self, passes: int, why: str) -> None:
        self.group = SimpleNamespace(passes=passes, touched=False)
        self.skipping = False
        self._why = why

    def _refuse(self) -> Never:
        raise NotInitializedError(self._why)

    def before_step(self) -> None:
        """Raise NotInitializedError."""
        self._refuse()

    def around(self, closure: Callable[[], Any], step: str) -> Never:
        """Raise NotInitializedError."""
        self._refuse()

    def synchronize(self) -> None:
        """Raise NotInitializedError."""
        self._refuse()

    def freeze(self) -> Never:
        """Raise NotInitializedError."""
        self._refuse()

    def add(self, named: dict[str, Any], trained: Any = ()) -> None:
        """Parameters are hooked in a world."""

    def after_step(self) -> None:
        """There is none."""

    def before_zero(self) -> None:
        """Nothing is under way."""

    def forget(self) -> None:
        """Nothing is known of gradients."""

    def renew(self) -> None:
        """Nothing is known of gradients."""

    def finish(self) -> None:
        """Nothing is under way."""

    def share_state(self, root: int | None) -> None:
        """There is none."""

    def remove(self) -> None:
        """There are no hooks."""

    def release(self) -> None:
        """There is nothing to let go of."""

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Gradients accumulate on this rank in any case."""
        yield

    @contextmanager
    def skip(self) -> Iterator[None]:
        """A step is refused in any case."""
        yield
