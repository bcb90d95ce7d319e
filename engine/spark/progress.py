"""Detection that the tasks of a job have begun, on a Spark Connect server: its clients have no status tracker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from .slots import context_of


class StageProgress:
    """Handler of the server's progress reports on the session's operations, by default every 2 s.

    `size` is the number of tasks of the job's only stage, which begin together.
    """

    def __init__(self, size: int) -> None:
        self.all_began = False  # whether all tasks have begun
        self._size = size

    @contextmanager
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
