"""Timer of input: how long a training loop waits for its batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from ..metrics import step_parts

_T = TypeVar("_T")


class _TimedIterator(Iterator[_T]):
    """Iterator over a loader's batches, each of which is timed."""

    def __init__(self, batches: Iterator[_T]) -> None:
        self._batches = batches

    def __next__(self) -> _T:
        return step_parts.time_input(next, self._batches)


class _TimedLoader(Generic[_T]):
    """A loader whose iterators are timed; it has the loader's truth and its other attributes."""

    def __init__(self, loader: Iterable[_T]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[_T]:
        return _TimedIterator(step_parts.time_input(iter, self._loader))  # a loader may start its workers here

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self._loader)  # a generator has no length

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not set yet, as in a copy that is being made
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_loader":
            super().__setattr__(name, value)
        else:
            setattr(self._loader, name, value)


def time_input(loader: Iterable[_T]) -> Iterable[_T]:
    """Return the loader with batches that are timed, so that late steps are attributed to it where it is late.

    A step whose batch came later than usual counts as late because of `input`. Loaders of `torch.utils.data` need no
    timer once `engine.torch` has wrapped an optimizer. While the process does not count, the timer has no effect.

    Parameters
    ----------
    loader : iterable
        Any iterable of batches. Each pass over the result is a pass over it.

    Returns
    -------
    iterable
        The same batches. It has the loader's length, if it has one, and its other attributes.

    Examples
    --------
    >>> for batch in engine.data.time_input(batches):
    ...     train(batch)
    """
    return _TimedLoader(loader)
