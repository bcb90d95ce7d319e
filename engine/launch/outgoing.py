"""What goes to a process that may read slowly, by a pipe or a connection that does not block.

What cannot be written now waits, in memory first, then in an unnamed file. Agents leave the output of ranks unread long
before that (`full`): only what a launcher hands to many hosts at once is as long.
"""

from __future__ import annotations

import os
import select
import tempfile
from typing import IO

from ..host.sockets import retry_short

MEMORY_BYTES = 16 << 20
PORTION = 1 << 18
BEHIND = 4 << 20  # bytes that wait, from which on ranks are not read: what else is sent stands behind them


class Backlog:
    """First in, first out; in memory up to `MEMORY_BYTES`, then on disk."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._file: IO[bytes] | None = None
        self._read_at = 0
        self._write_at = 0

    def __bool__(self) -> bool:
        return bool(self._head) or self._read_at < self._write_at

    def __len__(self) -> int:
        return len(self._head) + self._write_at - self._read_at

    def append(self, data: bytes) -> None:
        """Add at the end.

        Parameters
        ----------
        data : bytes
        """
        if self._read_at == self._write_at and len(self._head) < MEMORY_BYTES:
            self._head += data
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - lives as long as the backlog
        view = memoryview(data)
        while view:
            written = os.pwrite(self._file.fileno(), view, self._write_at)
            self._write_at += written
            view = view[written:]

    def peek(self, size: int) -> bytes:
        """Look at the first bytes.

        Parameters
        ----------
        size : int
            How many at most.

        Returns
        -------
        bytes
            Empty only if the backlog is.
        """
        if not self._head and self._file is not None and self._read_at < self._write_at:
            self._head += os.pread(self._file.fileno(), MEMORY_BYTES, self._read_at)
            self._read_at += len(self._head)
            if self._read_at == self._write_at:
                self._file.truncate(0)
                self._read_at = self._write_at = 0
        return bytes(self._head[:size])

    def drop(self, size: int) -> None:
        """Remove the first bytes, at most as many as `peek` gave.

        Parameters
        ----------
        size : int
        """
        del self._head[:size]


class Outgoing:
    """The writing end of a channel.

    Parameters
    ----------
    descriptor : int
        Does not block.

    Attributes
    ----------
    descriptor : int
    broken : bool
        Whether its reader has gone; what is written is dropped.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.broken = False
        self._backlog = Backlog()

    @property
    def waiting(self) -> bool:
        """Whether something is left to write as soon as the reader has room."""
        return bool(self._backlog)

    def full(self) -> bool:
        """Whether whoever gives should give no more for now."""
        return len(self._backlog) > BEHIND

    def write(self, data: bytes) -> None:
        """Write now what can be written without waiting, and keep the rest.

        Parameters
        ----------
        data : bytes
        """
        if self.broken:
            return
        behind = self.waiting
        try:
            self._backlog.append(data)
        except OSError:  # no room for a backlog on the disk
            self.give_up()
        if not behind:
            self.pump()

    def pump(self) -> None:
        """Write what can be written without waiting."""
        while self.waiting and self._write_portion():
            pass

    def drain(self) -> None:
        """Write everything, waiting for the reader."""
        poll = select.poll()
        while self.waiting:
            poll.register(self.descriptor, select.POLLOUT)
            poll.poll()
            self._write_portion()

    def _write_portion(self) -> bool:
        """Write once; tell whether it went."""
        try:
            self._backlog.drop(retry_short(os.write, self.descriptor, self._backlog.peek(PORTION)))
        except BlockingIOError:
            return False
        except OSError:  # the reader has gone
            self.give_up()
            return False
        return True

    def give_up(self) -> None:
        """Write nothing any more, and forget what waits."""
        self.broken = True
        self._backlog = Backlog()
