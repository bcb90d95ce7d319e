"""The launcher's own stdout and stderr, written by threads: a terminal or a disk that pauses stops no training."""

from __future__ import annotations

import functools
import os
import select
import stat

from ..host.sockets import retry_short
from .writer import FLUSH, Writer

PORTION = 1 << 16  # bytes of one write; of a longer one nobody would see that it moves
PIPE_PORTION = 4096


class Console:
    """One of the launcher's streams.

    Parameters
    ----------
    descriptor : int
        1 or 2.
    beside : Console, optional
        The other one. If both are the same file they have one thread, which keeps the order of what is written.

    Attributes
    ----------
    writer : Writer
        What writes it.
    colour : bool
        Whether it is a terminal and the user has not set NO_COLOR.
    broken : bool
        Whether its reader has gone; what is written is dropped.
    """

    def __init__(self, descriptor: int, beside: Console | None = None) -> None:
        self.writer: Writer
        self.broken = False
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
        """Bytes that were not written, or not yet."""
        return 0 if self.broken else self._given - self._written

    def write(self, data: bytes) -> None:
        """Write as soon as there is room.

        Parameters
        ----------
        data : bytes
        """
        if not self.broken:
            self._given += len(data)
            self.writer.put(functools.partial(self._write, data), len(data))

    def flush(self) -> bool:
        """Wait until all is written: for a reader as long as there is one, for a file that stands still `FLUSH`.

        Returns
        -------
        bool
            Whether it was.
        """
        return self.writer.flush(None if self._read_by_somebody else FLUSH)

    def close(self) -> None:
        """Flush, and end the thread; what is written after that is written at once."""
        self.writer.finish(None if self._read_by_somebody else FLUSH)

    def _is_as(self, other: Console) -> bool:
        """Whether both are the same file."""
        return not self.broken and not other.broken and os.path.sameopenfile(self._descriptor, other._descriptor)

    def _write(self, data: bytes) -> None:
        """Write in the writer's thread."""
        view = memoryview(data)
        while view and not self.broken:
            try:
                written = retry_short(os.write, self._descriptor, view[: self._portion])
            except BlockingIOError:  # somebody made it non-blocking
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll()
            except OSError:  # the reader has gone, or the disk is full; the ranks' files have it all
                self.broken = True
            else:
                view = view[written:]
                self._written += written
                self.writer.moved()
