"""A rank's output: raw bytes to its file, whole lines with a prefix to the console.

Whole lines: a line is held back until its end has come, so that halves of two ranks never share one. A line beyond
`LINE_LIMIT` is shown in pieces, each a line of its own. What a carriage return overwrote is not shown, except that a
progress bar gives a sign of life every `PROGRESS_INTERVAL` seconds.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Protocol

from ..host import linux, private_files
from .console import Console
from .errors import LaunchError
from .writer import Writer

LINE_LIMIT = 8 << 20
PROGRESS_INTERVAL = 10.0
READ_BYTES = 1 << 16
TAIL_BYTES = 1 << 18  # bytes of the end of a stream that are looked at after a failure
COLOURS = (36, 33, 32, 35, 34, 31)


class Lines:
    """Cut a stream of bytes into whole lines.

    Parameters
    ----------
    limit : int
        Most bytes of an unfinished line that are held back.
    clock : callable
        The clock, in seconds, that times the signs of life of an overwritten line.
    """

    def __init__(self, limit: int = LINE_LIMIT, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._held = bytearray()
        self._overwrites = False
        self._shown = float("-inf")

    def feed(self, data: bytes) -> bytes:
        """Take what was read.

        Parameters
        ----------
        data : bytes
            Any part of the stream.

        Returns
        -------
        bytes
            Whole lines, each with its newline; often none.
        """
        if b"\r" in data:
            self._overwrites = True
        end = data.rfind(b"\n") + 1
        whole = b""
        if end:
            whole = bytes(self._held) + data[:end]
            self._held.clear()
            if self._overwrites:
                whole = b"".join(_visible(line) + b"\n" for line in whole[:-1].split(b"\n"))
                self._overwrites = b"\r" in data[end:]
        self._held += data[end:]
        if self._overwrites:
            whole += self._progress()
        if len(self._held) > self._limit:
            whole += self.flush()
        return whole

    def flush(self) -> bytes:
        """Give up waiting for the end of the line.

        Returns
        -------
        bytes
            The line with a newline, or nothing if none was begun.
        """
        line = _visible(bytes(self._held))
        self._held.clear()
        return line + b"\n" if line else b""

    def _progress(self) -> bytes:
        """Forget what was overwritten; now and then, show the last of it."""
        text = bytes(self._held)
        *overwritten, _ = text.rstrip(b"\r").split(b"\r")  # a newline may follow the last return: DOS
        last = next((part for part in reversed(overwritten) if part.strip()), b"")
        start = text.rstrip(b"\r").rfind(b"\r") + 1
        del self._held[:start]
        now = self._clock()
        if not last or now - self._shown < PROGRESS_INTERVAL:
            return b""
        self._shown = now
        return last + b"\n"


def _visible(line: bytes) -> bytes:
    """Give what is left on a terminal of a line that overwrites itself."""
    if b"\r" not in line:
        return line
    return next((part for part in reversed(line.split(b"\r")) if part.strip()), b"")


class Tail:
    """The last bytes of a stream.

    Parameters
    ----------
    most : int
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = bytearray()

    def add(self, data: bytes) -> None:
        """Take more of the stream."""
        self._held += data
        if len(self._held) > 2 * self._most:
            del self._held[: -self._most]

    def __bytes__(self) -> bytes:
        return bytes(self._held[-self._most :])


class Display:
    """Where one stream of a rank goes: raw bytes to its file, whole lines to the console.

    Parameters
    ----------
    rank : int
    name : str
        `stdout` or `stderr`.
    path : Path
        Its file; a new one, in a directory that is made if it is missing.
    console : Console
        Where its lines are shown.
    files : Writer
        Writes the file. Once it has started, nothing here waits for a file system.
    timestamps : bool
        Put the time in front of the prefix.

    Attributes
    ----------
    path : Path
    problem : OSError or None
        Why the file is not complete.
    taken : int
        Bytes of the stream so far.
    """

    def __init__(
        self, rank: int, name: str, path: Path, console: Console, files: Writer, *, timestamps: bool = False
    ) -> None:
        self.path = path
        self.problem: OSError | None = None
        self.taken = 0
        self._whose = f"rank {rank}'s {name}"
        self._kept = 0  # bytes in the file, counted by the writer
        self._tail = Tail(TAIL_BYTES)
        self._file = -1
        self._files = files
        self._console = console
        self._lines = Lines()
        self._timestamps = timestamps
        self._tag = f"[{rank}]<{name}>:".encode()
        if console.colour:
            self._tag = b"\x1b[%dm%s\x1b[0m" % (COLOURS[rank % len(COLOURS)], self._tag)
        files.put(self._open)

    def take(self, data: bytes) -> None:
        """Keep what the rank wrote, and show the lines that are whole.

        Parameters
        ----------
        data : bytes
        """
        self.taken += len(data)
        self._tail.add(data)
        self._files.put(functools.partial(self._keep, data), len(data))
        self._show(self._lines.feed(data))

    def tail(self, since: int) -> tuple[bytes, bool]:
        """Return the last that was written behind so many bytes, and whether there is more than that."""
        size = max(0, self.taken - since)
        return (bytes(self._tail)[-size:], size > TAIL_BYTES) if size else (b"", False)

    def flush(self) -> None:
        """Show the unfinished line."""
        self._show(self._lines.flush())

    def close(self) -> None:
        """Show the unfinished line and close the file; a second call does nothing."""
        self.flush()
        self._files.put(self._close)

    def lack(self) -> str:
        """Say what the file lacks, once its writer has finished; empty if it is complete."""
        if self.problem is not None:
            return f"{self.path} is not complete: {linux.explain_briefly(self.problem)}"
        if (lost := self.taken - self._kept) > 0:
            return f"{lost} bytes of {self._whose} were lost: {self.path} did not take them"
        return ""

    # ---- in the writer's thread

    def _open(self) -> None:
        try:
            private_files.make_directory(self.path.parent)
            self._file = private_files.create(self.path)
        except OSError as error:
            self.problem = error

    def _keep(self, data: bytes) -> None:
        """Write raw bytes to the file; a full disk ends the file, not the job."""
        if self.problem is not None:
            return
        view = memoryview(data)
        try:
            while view:
                written = os.write(self._file, view)
                view = view[written:]
                self._kept += written
                self._files.moved()
        except OSError as error:
            self.problem = error

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    # ----

    def _show(self, whole: bytes) -> None:
        if not whole:
            return
        tag = self._tag
        if self._timestamps:
            tag = datetime.now().isoformat(timespec="milliseconds").encode() + tag
        self._console.write(tag + whole[:-1].replace(b"\n", b"\n" + tag) + b"\n")


class Sink(Protocol):
    """What takes the bytes of a stream; its methods are those of `Display`."""

    def take(self, data: bytes) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Stream:
    """The pipe of one of a rank's two streams.

    Parameters
    ----------
    rank : int
    pipe : int
        Its reading end; does not block.
    sink : Sink
        Takes what is read.

    Attributes
    ----------
    rank : int
    pipe : int
        -1 once it is closed.
    """

    def __init__(self, rank: int, pipe: int, sink: Sink) -> None:
        self.rank = rank
        self.pipe = pipe
        self._sink = sink

    def read(self) -> bool:
        """Take one portion from the pipe.

        Returns
        -------
        bool
            True if there may be more now.
        """
        try:
            data = os.read(self.pipe, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        self._sink.take(data)
        return True

    def drain(self, limit: int) -> None:
        """Take what is in the pipe now and show it, an unfinished line too.

        Parameters
        ----------
        limit : int
            Bytes after which to stop even if a process goes on writing.
        """
        for _ in range(limit // READ_BYTES + 1):
            if self.pipe < 0 or not self.read():
                break
        self._sink.flush()

    def close(self) -> None:
        """Close the pipe and what takes its bytes; a second call does nothing."""
        if self.pipe < 0:
            return
        self._sink.close()
        os.close(self.pipe)
        self.pipe = -1


def open_displays(
    rank: int, directory: Path, consoles: Sequence[Console], files: Writer, *, timestamps: bool
) -> dict[str, Display]:
    """Open the files of a rank.

    Parameters
    ----------
    rank : int
    directory : Path
        The job's.
    consoles : sequence of Console
        The launcher's stdout and stderr.
    files : Writer
    timestamps : bool
        As of `Display`.

    Returns
    -------
    dict of str to Display
        By the name of the stream.

    Raises
    ------
    LaunchError
        They cannot be written, as is known at once unless the writer has started.
    """
    displays = {}
    for name, console in zip(("stdout", "stderr"), consoles, strict=True):
        path = directory / f"rank.{rank}" / name
        displays[name] = display = Display(rank, name, path, console, files, timestamps=timestamps)
        if display.problem is not None:
            why = linux.explain_briefly(display.problem)
            raise LaunchError(f"cannot write {str(path)!r}: {why}; choose another --output-dir")
    return displays
