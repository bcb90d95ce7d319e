"""Pages of ranks that this process did not start, found in /proc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass

from ...host import processes
from ..page import NAME, PageError, Snapshot, read


@dataclass(frozen=True)
class Member:
    """Member of a run: a rank and the access to its page."""

    rank: int
    # Returns the descriptor or path of the rank's page; None while there is none
    source: Callable[[], int | str | None]
    up: Callable[[Snapshot | None], bool]  # takes the page's snapshot, or None; returns whether the process runs


def page_of(pid: int) -> str | None:
    """Return the path in /proc of the page into which a process of this user counts; None if there is none."""
    for descriptor in processes.list_memory(pid, NAME):
        path = f"/proc/{pid}/fd/{descriptor}"
        with contextlib.suppress(PageError):  # closed in the meantime, or not readable
            snapshot = read(path)
            if snapshot is not None and snapshot["pid"] == pid:  # a forked process also holds its parent's
                return path
    return None


class Stranger:
    """Rank that this process did not start. Its page is held open once found, so that it outlives the rank."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._descriptor: int | None = None

    def make_member(self, rank: int) -> Member:
        """Return this rank as a member of a run."""
        return Member(rank, self._open_page, self._is_up)

    def close(self) -> None:
        """Close the page."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open_page(self) -> int | None:
        if self._descriptor is None and (path := page_of(self._pid)) is not None:
            try:
                self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # it ended, or closed it, since we looked
                return None
        return self._descriptor

    def _is_up(self, snapshot: Snapshot | None) -> bool:
        if snapshot is not None and snapshot.state in ("ended", "failed"):
            return False
        process = processes.read_process(self._pid)
        return process is not None and processes.is_running(process)
