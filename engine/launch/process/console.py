"""The launcher's own stdout and stderr, written by threads so that a blocked terminal or disk stops no training."""

from __future__ import annotations

import functools
import os
import select
import stat

from ...host.sockets import retry_short
from .writer import FLUSH, Writer

PORTION = 1 << 16  # bytes of one write; a longer one would show no progress
PIPE_PORTION = 4096


class Console:
    """One of the launcher's streams, stdout (descriptor 1) or stderr (2); `beside` is the other one.

    If both are the same file, they share a thread, which keeps the order of their output.
    """

    def __init__(self, descriptor: int, beside: Console | None = None) -> None:
        self.writer: Writer
        self.broken = False  # whether its reader has gone or the disk is full; further output is dropped
        self._descriptor = descriptor
        self._given = self._written = 0  # bytes; the latter counted by the writer
        try:
            mode = os.fstat(descriptor).st_mode
        except OSError:  # started with it closed
            self.broken, mode = True, 0
        terminal = not self.broken and os.isatty(descriptor)
        self.colour = terminal and not os.environ.get("NO_COLOR")
        self._read_by_somebody = terminal or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
        self._portion = PIPE_PORTION if self._read_by_somebody else PORTION
        self.writer = Writer(f"console-{descriptor}") if beside is None or not self._is_as(beside) else beside.writer

    @property
    def lost(self) -> int:
        """Number of bytes that are not written yet; 0 if the stream is broken."""
        return 0 if self.broken else self._given - self._written

    def write(self, data: bytes) -> None:
        """Queue data to be written as soon as there is room."""
        if not self.broken:
            self._given += len(data)
            self.writer.put(functools.partial(self._write, data), len(data))

    def flush(self) -> bool:
        """Wait until all output is written, and return whether it was.

        The wait for a reader has no limit while there is one; a file that makes no progress is given up after `FLUSH`.
        """
        return self.writer.flush(None if self._read_by_somebody else FLUSH)

    def close(self) -> None:
        """Flush and end the thread; later writes are synchronous."""
        self.writer.finish(None if self._read_by_somebody else FLUSH)

    def _is_as(self, other: Console) -> bool:
        """Return whether both streams are the same open file."""
        return not self.broken and not other.broken and os.path.sameopenfile(self._descriptor, other._descriptor)

    def _write(self, data: bytes) -> None:
        """Write data; runs in the writer's thread."""
        view = memoryview(data)
        while view and not self.broken:
            try:
                written = retry_short(os.write, self._descriptor, view[: self._portion])
            except BlockingIOError:  # another process has made it non-blocking
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll()
            except OSError:  # the reader has gone, or the disk is full; the ranks' files have all output
                self.broken = True
            else:
                view = view[written:]
                self._written += written
                self.writer.note_progress()
