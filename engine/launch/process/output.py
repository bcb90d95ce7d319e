"""A rank's output: raw bytes to its file, whole lines with a prefix to the console.

A line is held back until it is complete, so that the output of two ranks never shares a line. A line longer than
`LINE_LIMIT` is shown in pieces, each a line of its own. Text that a carriage return overwrites is not shown; only a
progress bar is shown every `PROGRESS_INTERVAL` seconds.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

from ...exit_report.report import NAME, ExitReport
from ...host import linux, private_files
from ..errors import LaunchError
from .console import Console
from .writer import Writer

LINE_LIMIT = 8 << 20
PROGRESS_INTERVAL = 10.0
READ_BYTES = 1 << 16
TAIL_BYTES = 1 << 18  # bytes at the end of a stream that are examined after a failure
COLOURS = (36, 33, 32, 35, 34, 31)


class Lines:
    """Splitter of a stream of bytes into whole lines."""

    def __init__(self, limit: int = LINE_LIMIT, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit  # largest size in bytes of an unfinished line that is held back
        self._clock = clock  # seconds, by which overwritten lines are shown at intervals
        self._held = bytearray()
        self._overwrites = False
        self._shown = float("-inf")

    def feed(self, data: bytes) -> bytes:
        """Take the next part of the stream; return the whole lines to show, often none, each with its newline."""
        if b"\r" in data:
            self._overwrites = True
        end = data.rfind(b"\n") + 1
        whole = b""
        if end:
            whole = bytes(self._held) + data[:end]
            self._held.clear()
            if self._overwrites:
                whole = b"".join(_cut_overwritten(line) + b"\n" for line in whole[:-1].split(b"\n"))
                self._overwrites = b"\r" in data[end:]
        self._held += data[end:]
        if self._overwrites:
            whole += self._drop_progress()
        if len(self._held) > self._limit:
            whole += self.flush()
        return whole

    def flush(self) -> bytes:
        """Return the unfinished line with a newline; empty if no line was begun."""
        line = _cut_overwritten(bytes(self._held))
        self._held.clear()
        return line + b"\n" if line else b""

    def _drop_progress(self) -> bytes:
        """Drop overwritten text; at intervals, return the last of it as a line."""
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


def _cut_overwritten(line: bytes) -> bytes:
    """Return the part of a line that a terminal shows after its carriage returns."""
    if b"\r" not in line:
        return line
    return next((part for part in reversed(line.split(b"\r")) if part.strip()), b"")


class Tail:
    """The last `TAIL_BYTES` of a stream."""

    def __init__(self) -> None:
        self._held = bytearray()

    def add(self, data: bytes) -> None:
        """Take more of the stream."""
        self._held += data
        if len(self._held) > 2 * TAIL_BYTES:
            del self._held[:-TAIL_BYTES]

    def __bytes__(self) -> bytes:
        return bytes(self._held[-TAIL_BYTES:])


class Display:
    """Destination of one stream of a rank, `stdout` or `stderr`: raw bytes go to a file, whole lines to the console.

    The file is newly made, with its directory if that is missing. Once its writer `files` is started, no method here
    waits for a file system. With `timestamps`, the prefix of lines begins with the time.
    """

    def __init__(
        self, rank: int, name: str, path: Path, console: Console, files: Writer, *, timestamps: bool = False
    ) -> None:
        self.path = path
        self.problem: OSError | None = None  # why the file is incomplete
        self.taken = 0  # bytes of the stream so far
        self._whose = f"rank {rank}'s {name}"
        self._kept = 0  # bytes in the file, counted by the writer
        self._tail = Tail()
        self._file = -1
        self._files = files
        self._console = console
        self._lines = Lines()
        self._timestamps = timestamps
        self._tag = f"[{rank}]<{name}>:".encode()
        if console.colour:
            self._tag = b"\x1b[%dm%s\x1b[0m" % (COLOURS[rank % len(COLOURS)], self._tag)
        files.put(self._open)

    def write_output(self, data: bytes) -> None:
        """Write data to the file, and show the lines that are complete."""
        self.taken += len(data)
        self._tail.add(data)
        self._files.put(functools.partial(self._write_file, data), len(data))
        self._show_lines(self._lines.feed(data))

    def read_tail(self, since: int) -> tuple[bytes, bool]:
        """Return the end of the stream after its first `since` bytes, and whether some of it was cut off."""
        size = max(0, self.taken - since)
        return (bytes(self._tail)[-size:], size > TAIL_BYTES) if size else (b"", False)

    def flush(self) -> None:
        """Show the unfinished line."""
        self._show_lines(self._lines.flush())

    def close(self) -> None:
        """Show the unfinished line and close the file; a second call does nothing."""
        self.flush()
        self._files.put(self._close)

    def describe_loss(self) -> str:
        """Return a text on what is missing in the file, once its writer has finished; empty if it is complete."""
        if self.problem is not None:
            return f"{self.path} is not complete: {linux.explain_briefly(self.problem)}"
        if (lost := self.taken - self._kept) > 0:
            return f"{lost} bytes of {self._whose} were lost: {self.path} did not take them"
        return ""

    # ---- in the writer's thread

    def _open(self) -> None:
        try:
            private_files.make_directory(self.path.parent)
            self._file = private_files.create_file(self.path)
        except OSError as error:
            self.problem = error

    def _write_file(self, data: bytes) -> None:
        """Write raw bytes to the file; after an error, such as a full disk, the rest is dropped."""
        if self.problem is not None:
            return
        view = memoryview(data)
        try:
            while view:
                written = os.write(self._file, view)
                view = view[written:]
                self._kept += written
                self._files.note_progress()
        except OSError as error:
            self.problem = error

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    # ----

    def _show_lines(self, whole: bytes) -> None:
        if not whole:
            return
        tag = self._tag
        if self._timestamps:
            tag = datetime.now().isoformat(timespec="milliseconds").encode() + tag
        self._console.write(tag + whole[:-1].replace(b"\n", b"\n" + tag) + b"\n")


class Stream:
    """The pipe of one of a rank's two streams; `take` is called with its data.

    `flush` is called when the stream has ended or its last output has been read, so that an unfinished line is shown.
    """

    def __init__(
        self, rank: int, pipe: int, take: Callable[[bytes], None], flush: Callable[[], None] = lambda: None
    ) -> None:
        self.rank = rank
        self.pipe = pipe  # reading end, which does not block; -1 once it is closed
        self._take, self._flush = take, flush

    def read(self) -> bool:
        """Read once from the pipe, and pass the data on; return True if there may be more now."""
        try:
            data = os.read(self.pipe, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        self._take(data)
        return True

    def drain(self, limit: int) -> None:
        """Read what the pipe holds now and show it, including an unfinished line.

        It stops after `limit` bytes, even if a process goes on writing.
        """
        for _ in range(limit // READ_BYTES + 1):
            if self.pipe < 0 or not self.read():
                break
        self._flush()

    def close(self) -> None:
        """Close the pipe; a second call does nothing."""
        if self.pipe < 0:
            return
        self._flush()
        os.close(self.pipe)
        self.pipe = -1


class RankOutput:
    """Output of a job's ranks, or of the slots of an elastic job. Rank N's files are in the directory `rank.N`.

    `consoles` are the launcher's stdout and stderr, on which lines begin with the time if `timestamps` is True.
    """

    def __init__(self, directory: Path, consoles: Sequence[Console], *, timestamps: bool) -> None:
        self.displays: dict[tuple[int, str], Display] = {}  # those opened, by number and stream
        self.problems: dict[str, OSError] = {}  # files of ranks that could not be written here, and why
        self.files = Writer("files")
        self.writers = [self.files, *(console.writer for console in consoles)]
        self.directory = directory
        self._consoles = dict(zip(("stdout", "stderr"), consoles, strict=False))
        self._timestamps = timestamps

    def start(self) -> None:
        """Start the writers' threads; nothing may need a process with one thread any more."""
        for writer in self.writers:
            writer.start()

    def open(self, number: int) -> dict[str, Display]:
        """Return the displays of a rank by the names of its streams; open its files, unless they are open.

        A `LaunchError` is raised if a file cannot be written; once the writers are started, that is not detected here.
        """
        for name, console in self._consoles.items():
            if (number, name) not in self.displays:
                path = self.directory / f"rank.{number}" / name
                display = Display(number, name, path, console, self.files, timestamps=self._timestamps)
                if display.problem is not None:
                    why = linux.explain_briefly(display.problem)
                    raise LaunchError(f"cannot write {str(path)!r}: {why}; choose another --output-dir")
                self.displays[number, name] = display
        return {name: self.displays[number, name] for name in self._consoles}

    def flush(self, number: int) -> None:
        """Show the last, unfinished lines of a rank that has ended."""
        for name in self._consoles:
            self.displays[number, name].flush()

    def keep_report(self, number: int, report: ExitReport) -> None:
        """Write the exit report of a failed rank beside its output."""
        if not report.empty:
            path = self.directory / f"rank.{number}" / NAME
            self.files.put(functools.partial(_write_quietly, path, report.to_bytes()))

    def close(self) -> None:
        """Write out and close all files; one that makes no progress is given up."""
        for display in self.displays.values():
            display.close()
        self.files.finish()

    def list_losses(self) -> Iterator[str]:
        """Yield a line on each file that is not complete, once the files are closed."""
        yield from (lack for display in self.displays.values() if (lack := display.describe_loss()))
        for path, problem in self.problems.items():
            yield f"{path} is not complete: {linux.explain_briefly(problem)}"


def _write_quietly(path: Path, data: bytes) -> None:
    with contextlib.suppress(OSError):
        private_files.write(path, data)
