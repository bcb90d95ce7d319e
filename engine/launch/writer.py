"""A thread that writes where a write may block, so that whoever supervises processes never stands still for a file.

What waits for it is bounded. Whoever produces output asks `full` in each of its steps, and leaves the pipes of ranks
unread as long as it is: a slow disk slows down those that write, as it would without a launcher, and nothing is lost.
A disk that takes nothing at all for `STANDSTILL` seconds loses what does not fit instead, and that is counted: a
training is worth more than its log.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from ..host.patience import Patience
from .errors import LaunchError

HIGH = 64 << 20  # bytes that wait, from which on ranks are not read
LOW = 32 << 20  # and from which on they are read again
STANDSTILL = 60.0  # seconds for which a full writer holds ranks back though nothing moves
FLUSH = 30.0  # seconds without any progress after which what is left at the end is given up
LONGEST_WAIT = 0.5  # seconds from one look at the end to the next
LOOK = 0.05  # seconds from one look at a full writer to the next


class Writer:
    """Runs what it is given, in order. Until `start`, that is at once, in the thread that gives it.

    Its thread ends by `finish`, or with the process.

    Parameters
    ----------
    name : str
        Of the thread.

    Attributes
    ----------
    given_up : bool
        Whether it stood still at the end: nothing more is written.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: SimpleQueue[tuple[Callable[[], None], int]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._given = 0  # bytes, counted by the thread that gives
        self._taken = 0  # bytes, counted by this writer's thread, as the next
        self._moves = 0  # parts of tasks that are done
        self._seen = -1  # of `_moves`, when `_patience` began
        self._patience = Patience(STANDSTILL)
        self._holding = self._losing = self.given_up = False

    def start(self) -> None:
        """Write in a thread from now on; a second call does nothing. No process may need a single thread any more.

        Raises
        ------
        LaunchError
            The system allows no thread more.
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
        """Bytes that wait to be written."""
        return self._given - self._taken

    def put(self, task: Callable[[], None], size: int = 0) -> bool:
        """Have something done after all that was given before.

        Parameters
        ----------
        task : callable
            May block. It calls `moved` whenever a part is done, and raises nothing.
        size : int
            Bytes that it holds.

        Returns
        -------
        bool
            False: it will not be done, because there is no room, and nothing has moved for `STANDSTILL`.
        """
        if self._thread is None:
            task()
            return True
        if self.given_up or (size and self._losing and self.behind > HIGH):
            return False
        self._given += size
        self._tasks.put((task, size))
        return True

    def moved(self) -> None:
        """Tell that a part of a task is done; called by tasks."""
        self._moves += 1

    def full(self) -> bool:
        """Look whether whoever gives should give no more for now. It looks again after `LOOK`."""
        if self.behind <= (LOW if self._holding else HIGH):
            self._holding = self._losing = False
            self._seen = -1
            return False
        if self._moves != self._seen:
            self._seen = self._moves
            self._patience.begin(STANDSTILL)
        self._losing = not self._patience.left()
        self._holding = not self._losing
        return self._holding

    def flush(self, seconds: float | None = FLUSH) -> bool:
        """Wait until all is written.

        Parameters
        ----------
        seconds : float, optional
            Without progress, after which what is left is given up; None: never.

        Returns
        -------
        bool
            Whether all was written.
        """
        written = threading.Event()
        if self.given_up or not self.put(written.set):
            return False
        patience, seen = Patience(0.0 if seconds is None else seconds), -1
        while not written.is_set():
            if seconds is not None and self._moves != seen:
                seen = self._moves
                patience.begin(seconds)
            written.wait(LONGEST_WAIT if seconds is None else patience.wait())
            if seconds is not None and not patience.left():
                self.given_up = True
                return written.is_set()
        return True

    def finish(self, seconds: float | None = FLUSH) -> bool:
        """Wait until all is written, and end the thread; parameters and result as of `flush`.

        A thread that stands still in a write ends as soon as that does.
        """
        whole, thread = self.flush(seconds), self._thread
        if thread is not None:
            self._tasks.put((_end, 0))
            if whole:
                thread.join()  # it does nothing more
                self._thread = None
        return whole

    def _run(self) -> None:
        task, size = self._tasks.get()
        while task is not _end and not self.given_up:
            task()
            self._taken += size
            self._moves += 1
            task, size = self._tasks.get()


def _end() -> None:
    """The last task."""
