"""Objects with the methods of an optimizer's reducer that reduce no gradients in backward passes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, Never

from ..errors import NotInitializedError


class IdleReducer:
    """Base class with methods of `Reducer` that do nothing, since no hooks, reductions or gradients are tracked."""

    def do_nothing(self, *arguments: Any, **named: Any) -> None:
        """Do nothing."""

    add = after_step = before_zero = mark_zeroed = mark_dropped = finish = do_nothing
    synchronize = share_state = remove = release = do_nothing

    def pause(self) -> AbstractContextManager[None]:
        """Return a context that changes nothing; gradients accumulate on this rank in any case."""
        return nullcontext()


class NoReducer(IdleReducer):
    """Substitute for an optimizer's reducer while its process is in no world that has the process set.

    It leaves gradients local and refuses a step. `passes` is the number of backward passes to accumulate before a
    reduction; `why` is the error text: the reason why a step is refused, and the remedy.
    """

    def __init__(self, passes: int, why: str) -> None:
        self.group = SimpleNamespace(passes=passes, touched=False)
        self.skipping = False
        self._why = why

    def refuse_step(self, *arguments: Any, **named: Any) -> Never:
        """Raise NotInitializedError."""
        raise NotInitializedError(self._why)

    before_step = wrap_closure = synchronize = freeze = refuse_step
    skip = IdleReducer.pause
