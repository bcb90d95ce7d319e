"""Data loaders that prepare batches in a thread of their own, compatible with `horovod.data`, and a timer of input.

A loader defines in `_iterate` how it makes batches. With `AsyncDataLoaderMixin` before it in the list of bases, a
thread makes them ahead of the training loop, as far as a bounded queue has room.

`time_input` tells the engine how long a training loop waits for the batches of any loader.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from .input_timer import time_input

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader", "time_input"]

# Seconds between two checks of a waiting thread, in case it misses its wake-up.
_TICK = 1.0


class BaseDataLoader:
    """Base class of loaders. A subclass defines `_iterate`, and `__len__` if its length is known."""

    def __len__(self) -> int:
        # A TypeError, which `list(loader)` takes for an unknown length.
        raise TypeError(f"{type(self).__qualname__} does not say how many batches it has: define __len__")

    def _iterate(self) -> Iterator[Any]:
        """Make the batches of one pass. Runs in the loader's own thread, if there is one."""
        raise NotImplementedError(f"{type(self).__qualname__} does not say what its batches are: define _iterate")

    def _process_batch(self, batch: Any) -> Any:
        """Finish a batch in the thread of the training loop, for example by moving it to a device."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class AsyncDataLoaderMixin:
    """Make a loader's batches in a thread of their own. It goes before the loader in the list of bases.

    Every iteration has its own thread. The thread ends after its last batch, when the iterator is dropped, or by
    `close_async_loader`. The training loop raises an exception of the thread in place of the batch.

    Parameters
    ----------
    async_loader_queue_size : int
        Largest number of batches that are made ahead; 0 makes each batch on demand, without a thread.
    *args, **kwargs
        Arguments of the loader.

    Examples
    --------
    >>> class Loader(AsyncDataLoaderMixin, BaseDataLoader):
    ...     def __init__(self, path, **kwargs):
    ...         super().__init__(**kwargs)
    ...         self.path = path
    ...
    ...     def _iterate(self):
    ...         yield from read_batches(self.path)
    """

    def __init__(self, async_loader_queue_size: int = 64, *args: Any, **kwargs: Any) -> None:
        room: Any = async_loader_queue_size
        if not isinstance(room, int) or room < 0:
            raise ValueError(f"async_loader_queue_size is a number of batches, 0 or more, not {room!r}")
        self.async_loader_queue_size = room
        self._passes: WeakSet[_Pass] = WeakSet()
        super().__init__(*args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        loader: Any = self
        if self.async_loader_queue_size == 0:
            for batch in loader._iterate():
                yield loader._process_batch(batch)
            return
        ahead = _Pass(loader._iterate(), self.async_loader_queue_size)
        self._passes.add(ahead)
        try:
            while (item := ahead.next()) is not None:
                yield loader._process_batch(item[0])
        finally:
            ahead.close()

    def close_async_loader(self) -> None:
        """End all iterations and their threads, and drop the batches that were made ahead."""
        for each in list(self._passes):
            each.close()


class _Pass:
    """Queue of ready batches of one pass over the data, with the thread that makes them."""

    def __init__(self, batches: Iterator[Any], room: int) -> None:
        self._batches, self._room = batches, room
        self._ready: deque[Any] = deque()
        self._changed = threading.Condition()
        self._ended = self._closed = False
        self._error: BaseException | None = None
        # A daemon: a training loop that fails must not wait for data.
        self._thread = threading.Thread(target=self._make, name="engine-data", daemon=True)
        self._thread.start()

    def next(self) -> tuple[Any] | None:
        """Return the next batch in a tuple, or None after the last. Raises the thread's exception, if any."""
        with self._changed:
            while not self._ready and not self._ended and not self._closed:
                self._changed.wait(_TICK)
            if self._ready and not self._closed:
                batch = self._ready.popleft()
                self._changed.notify_all()
                return (batch,)
            if self._error is not None and not self._closed:
                raise self._error
            return None

    def close(self) -> None:
        """Let the thread end after its current batch."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()

    def _make(self) -> None:
        error: BaseException | None = None
        try:
            for batch in self._batches:
                if not self._put(batch):
                    break
        except BaseException as raised:  # Raised again by `next`, where somebody sees it.
            error = raised
        finally:
            close = getattr(self._batches, "close", None)
            if close is not None:
                close()
            with self._changed:
                self._error, self._ended = error, True
                self._changed.notify_all()

    def _put(self, batch: Any) -> bool:
        """Wait for room in the queue and append a batch; return False if the pass has been closed."""
        with self._changed:
            while len(self._ready) >= self._room and not self._closed:
                self._changed.wait(_TICK)
            if not self._closed:
                self._ready.append(batch)
                self._changed.notify_all()
            return not self._closed
