"""A thread for writes that may block, so that the supervisor of processes never waits for a file.

Its queue is bounded. The supervisor calls `is_full` in each step, and leaves the pipes of ranks unread while it returns
True. By this back-pressure a slow disk slows down the ranks, as it would without a launcher, and no output is lost. If
a disk makes no progress for `STANDSTILL` seconds, output beyond the bound is dropped and counted instead. A training is
worth more than its log.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from ...host.patience import Patience
from ..errors import LaunchError

HIGH = 64 << 20  # high-water mark: queued bytes above which ranks are not read
LOW = 32 << 20  # low-water mark: queued bytes at which they are read again
STANDSTILL = 60.0  # seconds for which a full writer without progress holds ranks back
FLUSH = 30.0  # seconds without progress after which the remaining output is given up at the end
LONGEST_WAIT = 0.5  # longest seconds between two polls at the end
LOOK = 0.05  # seconds between two polls of a full writer


class Writer:
    """Queue of tasks that a thread runs in order. Before `start`, tasks run at once, in the thread that puts them.

    The thread ends by `finish`, or with the process. If it makes no progress at the end, `given_up` is set, and nothing
    more is written.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: SimpleQueue[tuple[Callable[[], None], int] | None] = SimpleQueue()  # None: the end
        self._thread: threading.Thread | None = None
        self._given = 0  # bytes put into the queue, counted by the producer's thread
        self._taken = 0  # bytes of finished tasks, counted by this writer's thread, like `_moves`
        self._moves = 0  # parts of tasks that are done
        self._seen = -1  # value of `_moves` when `_patience` began
        self._patience = Patience(STANDSTILL)
        self._holding = self._losing = self.given_up = False

    def start(self) -> None:
        """Start the thread; a second call does nothing. Call it when nothing needs a single-threaded process any more.

        A `LaunchError` is raised if the system allows no further thread.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"enginerun-{self._name}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise LaunchError(
                    "cannot start the thread that writes the ranks' output; there are too many processes and threads: "
                    "see 'ulimit -u', and the container's limit (pids.max)"
                ) from error
            self._thread = thread

    @property
    def behind(self) -> int:
        """Number of bytes that wait to be written."""
        return self._given - self._taken

    def put(self, task: Callable[[], None], size: int = 0) -> bool:
        """Queue a task, which may block, and which holds `size` bytes; return False if it is dropped.

        That is so if the queue is full without progress for `STANDSTILL`, or the writer has given up. The task calls
        `note_progress` whenever a part is done, and raises nothing.
        """
        if self._thread is None:
            task()
            return True
        if self.given_up or (size and self._losing and self.behind > HIGH):
            return False
        self._given += size
        self._tasks.put((task, size))
        return True

    def note_progress(self) -> None:
        """Report progress: a part of a task is done. Tasks call this."""
        self._moves += 1

    def is_full(self) -> bool:
        """Return whether the producer should pause, and call this again after `LOOK` seconds."""
        if self.behind <= (LOW if self._holding else HIGH):
            self._holding = self._losing = False
            self._seen = -1
            return False
        if self._moves != self._seen:
            self._seen = self._moves
            self._patience.reset(STANDSTILL)
        self._losing = not self._patience.seconds_left()
        self._holding = not self._losing
        return self._holding

    def flush(self, seconds: float | None = FLUSH) -> bool:
        """Wait until all tasks are done, and return whether they were.

        After `seconds` without progress the rest is given up; None: never.
        """
        written = threading.Event()
        if self.given_up or not self.put(written.set):
            return False
        patience, seen = Patience(0.0 if seconds is None else seconds), -1
        while not written.is_set():
            if seconds is not None and self._moves != seen:
                seen = self._moves
                patience.reset(seconds)
            written.wait(LONGEST_WAIT if seconds is None else patience.wait())
            if seconds is not None and not patience.seconds_left():
                self.given_up = True
                return written.is_set()
        return True

    def finish(self, seconds: float | None = FLUSH) -> bool:
        """Flush and end the thread; parameters and result are those of `flush`.

        A thread that is blocked in a write ends as soon as the write does.
        """
        whole, thread = self.flush(seconds), self._thread
        if thread is not None:
            self._tasks.put(None)
            if whole:
                thread.join()  # no task is left
                self._thread = None
        return whole

    def _run(self) -> None:
        while (queued := self._tasks.get()) is not None and not self.given_up:
            task, size = queued
            task()
            self._taken += size
            self._moves += 1
