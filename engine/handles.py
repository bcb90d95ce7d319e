"""Handles of asynchronous operations: whether one is done, and its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .native import handles


class Handle:
    """One asynchronous operation: `poll` it, `synchronize` it. It owns its tensors until the result is fetched."""

    __slots__ = ("_fetch", "_native", "_result")

    def __init__(self, native: handles.Handle, result: Any, fetch: Callable[[Any], Any] | None) -> None:
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

    def then(self, fetch: Callable[[Any], Any]) -> Handle:
        """The same operation, whose result is what `fetch` makes of this handle's."""
        return Handle(self._native, None, lambda _: fetch(self.wait()))

    @property
    def rows(self) -> tuple[int, ...]:
        """After `wait`, of an allgather or all-to-all: how many rows came from each rank."""
        return self._native.gathered[1]

    def __repr__(self) -> str:
        return f"<Handle {self.name!r}, {'done' if self.done else 'in flight'}>"


def poll(handle: Handle) -> bool:
    """Whether `synchronize` would return, or raise, at once."""
    return handle.done


def synchronize(handle: Handle) -> Any:
    """Wait for an operation and return its result. Raises what went wrong, as the operation's docstring says."""
    return handle.wait()
