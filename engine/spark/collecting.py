"""Wait for a Spark job with a timeout and cancellation, which Spark's own blocking call does not offer.

Spark cannot cancel a barrier stage for which there are too few slots: it has not begun, and is retried for ten minutes.
So the call is made in a thread, which is abandoned if need be. On a Spark Connect server, progress reports say that the
tasks have begun: its clients have no status tracker.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .slots import context_of

LOOK = 0.2
CANCELLED = 3.0  # seconds that Spark has to end a job that was cancelled
AGAIN = 1.0  # seconds between two cancellations


class LateStartError(Exception):
    """The job has not begun in time, and was cancelled."""


class Collecting:
    """Rows of a DataFrame that are being collected in a thread.

    The job has the properties of the caller's thread, such as its scheduler pool, and a unique `tag` in Spark.
    """

    def __init__(self, session: Any, frame: Any, tag: str) -> None:
        from pyspark import InheritableThread

        self._session = session
        self._frame = frame
        self._tag = tag
        self._rows: list[Any] | None = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        InheritableThread(target=self._collect, session=session, daemon=True).start()

    def await_rows(self, late: threading.Event, excused: Callable[[], bool]) -> list[Any]:
        """Wait for the rows; raise Spark's exception, or LateStartError if the job is late and not excused.

        `late` is set when the job should have begun. `excused` is called once then; it returns whether the job may go
        on all the same.
        """
        asked = False
        try:
            while not self._done.wait(LOOK):
                if late.is_set() and not asked:
                    asked = True
                    if not excused():
                        raise LateStartError
        except BaseException:
            self._cancel()
            raise
        if self._error is not None:
            raise self._error
        assert self._rows is not None
        return self._rows

    def _collect(self) -> None:
        try:
            self._session.addTag(self._tag)
            if (context := context_of(self._session)) is not None:
                context.addJobTag(self._tag)  # the status tracker finds the job by it
            self._rows = self._frame.collect()
        except BaseException as error:  # raised again in the thread that waits
            self._error = error
        finally:
            self._done.set()

    def _cancel(self) -> None:
        """Cancel the job, again and again, since Spark may not have begun it yet."""

        def cancel() -> None:
            while not self._done.is_set():
                with contextlib.suppress(Exception):  # Spark may have ended
                    self._session.interruptTag(self._tag)
                self._done.wait(AGAIN)

        threading.Thread(target=cancel, daemon=True).start()
        self._done.wait(CANCELLED)


class StageProgress:
    """Handler of the server's progress reports on the session's operations, by default every 2 s.

    `size` is the number of tasks of the job's only stage, which begin together.
    """

    def __init__(self, size: int) -> None:
        self.all_began = False  # whether all tasks have begun
        self._size = size

    @contextlib.contextmanager
    def follow_session(self, session: Any) -> Iterator[None]:
        """Receive reports within the context, if the session is one of Spark Connect."""
        if context_of(session) is not None:
            yield
            return
        session.registerProgressHandler(self)
        try:
            yield
        finally:
            session.removeProgressHandler(self)

    def __call__(self, stages: Iterable[Any] | None, inflight_tasks: int, operation_id: str | None, done: bool) -> None:
        """Handle a report, in the form of PySpark's progress handlers."""
        for stage in stages or ():
            if stage.num_tasks == self._size == inflight_tasks + stage.num_completed_tasks:
                self.all_began = True
