"""Handles of asynchronous operations, by which callers poll and wait for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..native import handles


class Handle:
    """Handle of one asynchronous operation, for `poll` and `synchronize`.

    It keeps its tensors alive until the result is fetched.
    """

    __slots__ = ("_fetch", "_native", "_result")

    def __init__(self, native: handles.Handle, result: Any, fetch: Callable[[Any], Any] | None) -> None:
        self._native = native
        self._result = result
        self._fetch = fetch

    @property
    def name(self) -> str:
        """Name of the operation on every rank."""
        return self._native.name

    @property
    def done(self) -> bool:
        """Return whether `wait` would return at once. Never blocks or raises."""
        return self._native.done

    def wait(self) -> Any:
        """Wait for the operation and return its result; may be called again. Raises the operation's error."""
        self._native.wait()
        fetch = self._fetch
        if fetch is not None:
            self._result = fetch(self._result)
            self._fetch = None
        return self._result

    def then(self, fetch: Callable[[Any], Any]) -> Handle:
        """Return a handle of the same operation whose result is `fetch` of this handle's result."""
        return Handle(self._native, None, lambda _: fetch(self.wait()))

    @property
    def rows(self) -> tuple[int, ...]:
        """Numbers of rows from each rank, of an allgather or all-to-all; valid after `wait`."""
        return self._native.gathered[1]

    def __repr__(self) -> str:
        return f"<Handle {self.name!r}, {'done' if self.done else 'in flight'}>"


def poll(handle: Handle) -> bool:
    """Return whether `synchronize` would return, or raise, at once."""
    return handle.done


def synchronize(handle: Handle) -> Any:
    """Wait for an operation and return its result. Raises the errors that the operation's docstring lists."""
    return handle.wait()
