"""Files and console lines of a job's ranks, in the launcher."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...exit_report.report import NAME, ExitReport
from ...host import linux, private_files
from .console import Console
from .output import Display, open_displays
from .writer import Writer


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
        self._consoles, self._timestamps = list(consoles), timestamps

    def start(self) -> None:
        """Start the writers' threads; nothing may need a process with one thread any more."""
        for writer in self.writers:
            writer.start()

    def open(self, number: int) -> dict[str, Display]:
        """Return the displays of a rank by the names of its streams; open its files, unless they are open.

        A `LaunchError` is raised if a file cannot be written.
        """
        if (number, "stderr") not in self.displays:
            opened = open_displays(number, self.directory, self._consoles, self.files, timestamps=self._timestamps)
            self.displays |= {(number, name): display for name, display in opened.items()}
        return {name: self.displays[number, name] for name in ("stdout", "stderr")}

    def flush(self, number: int) -> None:
        """Show the last, unfinished lines of a rank that has ended."""
        for name in ("stdout", "stderr"):
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
