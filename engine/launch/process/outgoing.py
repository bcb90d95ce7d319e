"""Buffered, non-blocking output to a process that may read slowly, over a pipe or a connection.

Data that cannot be written now waits in memory, and above a limit in an unnamed file. Agents apply back-pressure to
their ranks long before that (`is_full`); only data that a launcher sends to many hosts at once gets so long.
"""

from __future__ import annotations

import os
import select
import tempfile
from typing import IO

from ...host.sockets import retry_short

MEMORY_BYTES = 16 << 20
PORTION = 1 << 18
BEHIND = 4 << 20  # high-water mark in bytes, above which ranks are not read: other messages wait behind their output


class Backlog:
    """FIFO of bytes, in memory up to `MEMORY_BYTES`, then on disk."""

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
        """Add at the end."""
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
        """Return the first bytes, at most `size`, without removing them; empty only if the backlog is."""
        if not self._head and self._file is not None and self._read_at < self._write_at:
            self._head += os.pread(self._file.fileno(), MEMORY_BYTES, self._read_at)
            self._read_at += len(self._head)
            if self._read_at == self._write_at:
                self._file.truncate(0)
                self._read_at = self._write_at = 0
        return bytes(self._head[:size])

    def drop_bytes(self, size: int) -> None:
        """Remove the first bytes, at most as many as `peek` gave."""
        del self._head[:size]


class Outgoing:
    """The writing end of a channel."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor  # non-blocking; negative once closed
        self.broken = False  # whether its reader has gone, or the disk is full; further data is dropped
        self._backlog = Backlog()

    @property
    def waiting(self) -> bool:
        """True if data waits for the reader to have room."""
        return bool(self._backlog)

    def is_full(self) -> bool:
        """Return whether producers should pause, because more than `BEHIND` bytes wait."""
        return len(self._backlog) > BEHIND

    def write(self, data: bytes) -> None:
        """Write as much as possible without blocking, and buffer the rest."""
        if self.broken:
            return
        behind = self.waiting
        try:
            self._backlog.append(data)
        except OSError:  # no room for a backlog on the disk
            self.give_up()
        if not behind:
            self.write_available()

    def write_available(self) -> None:
        """Write as much as possible without blocking."""
        while self.waiting and self._write_portion():
            pass

    def drain(self) -> None:
        """Write everything, and block while the reader has no room."""
        poll = select.poll()
        while self.waiting:
            poll.register(self.descriptor, select.POLLOUT)
            poll.poll()
            self._write_portion()

    def _write_portion(self) -> bool:
        """Write once, and return whether that succeeded."""
        try:
            self._backlog.drop_bytes(retry_short(os.write, self.descriptor, self._backlog.peek(PORTION)))
        except BlockingIOError:
            return False
        except OSError:  # the reader has gone
            self.give_up()
            return False
        return True

    def give_up(self) -> None:
        """Drop the waiting data and all further data."""
        self.broken = True
        self._backlog = Backlog()
