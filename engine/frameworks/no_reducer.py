"""Substitute for an optimizer's reducer while its process is in no world that has the process set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Never

from ..errors import NotInitializedError


class NoReducer:
    """Object with the methods of `Reducer` that leaves gradients local and refuses a step.

    `passes` is the number of backward passes to accumulate before a reduction.
    """

    def __init__(self, passes: int, why: str) -> None:
        self.group = SimpleNamespace(passes=passes, touched=False)
        self.skipping = False
        self._why = why  # error text: the reason why a step is refused, and the remedy

    def _raise_not_initialized(self) -> Never:
        raise NotInitializedError(self._why)

    def before_step(self) -> None:
        """Raise NotInitializedError."""
        self._raise_not_initialized()

    def wrap_closure(self, closure: Callable[[], Any], step: str) -> Never:
        """Raise NotInitializedError."""
        self._raise_not_initialized()

    def synchronize(self) -> None:
        """Raise NotInitializedError."""
        self._raise_not_initialized()

    def freeze(self) -> Never:
        """Raise NotInitializedError."""
        self._raise_not_initialized()

    def add(self, named: dict[str, Any], trained: Any = ()) -> None:
        """Do nothing; parameters are hooked in the next world."""

    def after_step(self) -> None:
        """Do nothing; there is no step."""

    def before_zero(self) -> None:
        """Do nothing; no reduction is under way."""

    def mark_zeroed(self) -> None:
        """Do nothing; gradients are not tracked."""

    def mark_dropped(self) -> None:
        """Do nothing; gradients are not tracked."""

    def finish(self) -> None:
        """Do nothing; no reduction is under way."""

    def share_state(self, root: int | None) -> None:
        """Do nothing; there is no state."""

    def remove(self) -> None:
        """Do nothing; there are no hooks."""

    def release(self) -> None:
        """Do nothing; there are no resources."""

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do nothing; gradients accumulate on this rank in any case."""
        yield

    @contextmanager
    def skip(self) -> Iterator[None]:
        """Do nothing; a step is refused in any case."""
        yield
