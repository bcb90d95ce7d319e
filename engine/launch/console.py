"""The launcher's own stdout and stderr, written without ever waiting for whoever reads them.

A paused terminal or a slow pipe must not stop the training, and nothing may be lost: what cannot be written now goes to
a backlog, in memory first, then in an unnamed file.
"""

from __future__ import annotations

import os
import select
import stat
import tempfile
from typing import IO

from ..host.sockets import retry_short

MEMORY_BYTES = 4 << 20
PIPE_PORTION = 4096  # a pipe that polls as writable takes this much without blocking
TERMINAL_PORTION = 256


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


class Console:
    """One of the launcher's streams.

    Parameters
    ----------
    descriptor : int
        1 or 2.

    Attributes
    ----------
    descriptor : int
    colour : bool
        Whether it is a terminal and the user has not set NO_COLOR.
    broken : bool
        Whether its reader has gone; what is written is dropped.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.broken = False
        self._backlog = Backlog()
        self._poller = select.poll()
        self._poller.register(descriptor, select.POLLOUT)
        try:
            mode = os.fstat(descriptor).st_mode
        except OSError:  # started with it closed
            self.broken, mode = True, 0
        terminal = not self.broken and os.isatty(descriptor)
        self.colour = terminal and not os.environ.get("NO_COLOR")
        self._portion = TERMINAL_PORTION if terminal else PIPE_PORTION
        self._polled = terminal or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)

    @property
    def behind(self) -> int:
        """Bytes that are left to write."""
        return len(self._backlog)

    @property
    def waiting(self) -> bool:
        """Whether something is left to write as soon as the reader has room."""
        return bool(self._backlog)

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
        while self.waiting and (not self._polled or self._poller.poll(0)):
            if not self._write_portion():
                break

    def drain(self) -> None:
        """Write everything, waiting for the reader."""
        while self.waiting:
            if self._polled:
                self._poller.poll()
            self._write_portion()

    def _write_portion(self) -> bool:
        """Write once; tell whether it went."""
        size = self._portion if self._polled else MEMORY_BYTES
        try:
            self._backlog.drop(retry_short(os.write, self.descriptor, self._backlog.peek(size)))
        except BlockingIOError:  # somebody made it non-blocking
            return False
        except OSError:  # the reader has gone, or the disk is full; the ranks' files have it all
            self.give_up()
            return False
        return True

    def give_up(self) -> None:
        """Write nothing any more, and forget what waits."""
        self.broken = True
        self._backlog = Backlog()
