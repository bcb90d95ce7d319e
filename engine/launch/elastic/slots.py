"""The slots of an elastic job: their numbers, and the files with their workers' output."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Sequence
from pathlib import Path

from ...elastic.places import Slot
from ...exit_report.report import NAME, ExitReport
from ...host import private_files
from ..hosts import remote_files
from ..hosts.channel import ChannelError, Message
from ..process.console import Console
from ..process.output import Display, open_displays
from ..process.writer import Writer


class Slots:
    """Numbers of slots, and the output of their workers.

    Parameters
    ----------
    directory : Path
        The job's directory, in which each slot has a directory `rank.NUMBER`.
    most : int
        Largest number of workers at once.
    consoles : sequence of Console
        The launcher's stdout and stderr.
    timestamps : bool
        Whether lines on them begin with the time.

    Attributes
    ----------
    displays : dict
        Display of each (slot number, stream name) that was used.
    problems : dict of str to OSError
        Files of workers that could not be written here, and why.
    files : Writer
        Writer of the workers' files.
    """

    def __init__(self, directory: Path, most: int, consoles: Sequence[Console], *, timestamps: bool) -> None:
        self.displays: dict[tuple[int, str], Display] = {}
        self.problems: dict[str, OSError] = {}
        self.files = Writer("files")
        self._directory, self._most = directory, most
        self._consoles, self._timestamps = list(consoles), timestamps
        self._numbers: dict[Slot, int] = {}
        self._had: set[tuple[str, int]] = set()  # hosts, and the numbers that their slots have or had

    def __getitem__(self, slot: Slot) -> int:
        """Return the number of a slot that has one."""
        return self._numbers[slot]

    def number(self, slot: Slot, used: Collection[int]) -> int:
        """Return a slot's number in the job; assign one if it has none.

        A slot keeps its number, unless the numbers run out: then a slot without a worker loses its number to the new
        one. The first numbers are assigned in the order of the first world's ranks.

        Parameters
        ----------
        slot : Slot
        used : collection of int
            Numbers of slots that have workers.
        """
        number = self._numbers.get(slot)
        if number is None:
            known = set(self._numbers.values())
            number = next((each for each in range(self._most) if each not in known), None)
            if number is None:
                number = next(each for each in range(2 * self._most + len(used)) if each not in used)
                self._numbers = {other: each for other, each in self._numbers.items() if each != number}
            self._numbers[slot] = number
            self._had.add((slot.host, number))
        return number

    def open(self, number: int) -> int:
        """Open the files of a slot, unless they are open; return how many bytes its workers have written to stderr."""
        if (number, "stderr") not in self.displays:
            opened = open_displays(
                number, self._directory, self._consoles, self.files, timestamps=self._timestamps
            ).items()
            self.displays |= {(number, name): display for name, display in opened}
        return self.displays[number, "stderr"].taken

    def show(self, host: str, message: Message) -> None:
        """Show output of a slot's worker, or of a child process that has outlived it.

        By then the slot's number and files may belong to another slot.
        """
        number = message.number("number")
        if (host, number) not in self._had:
            raise ChannelError(f"it speaks of slot number {number}, which is not one of its slots")
        if (number, stream := message.text("stream")) not in self.displays:
            raise ChannelError(f"it writes to {stream!r}")
        self.displays[number, stream].take(message.body)

    def keep(self, host: str, message: Message) -> None:
        """Write a worker's file, a part of which its host has sent."""
        numbers = [number for name, number in self._had if name == host]
        remote_files.keep_later(message, self._directory, numbers, self.files, self.problems)

    def keep_report(self, number: int, report: ExitReport) -> None:
        """Write the exit report of a failed worker into the directory of its slot."""
        if not report.empty:
            path = self._directory / f"rank.{number}" / NAME
            self.files.put(functools.partial(_write_quietly, path, report.data()))

    def flush(self, number: int) -> None:
        """Show the last, unfinished line of a worker that has ended."""
        for name in ("stdout", "stderr"):
            self.displays[number, name].flush()

    def close(self) -> None:
        """Write out and close all files; one that makes no progress is given up."""
        for display in self.displays.values():
            display.close()
        self.files.put(functools.partial(remote_files.remove_token, self._directory))
        self.files.finish()


def _write_quietly(path: Path, data: bytes) -> None:
    with contextlib.suppress(OSError):
        private_files.write(path, data)
