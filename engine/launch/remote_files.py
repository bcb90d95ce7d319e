"""The files of a job on a host that may not share a file system with the launcher.

Ranks get a directory with the same path on every host, so that messages which name a file name the one that the user
finds. Where that is the launcher's own, as on a shared file system, files lie where they belong. Elsewhere the agent
makes it, and sends what is in it when the ranks have ended. Several agents may share a file system that the launcher
does not see: one of them makes the directory and removes it, and each sends what its own ranks have left.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..host import linux, private_files
from ..host.patience import Patience
from . import leftovers
from .channel import Channel, ChannelError, Message
from .errors import LaunchError
from .writer import Writer

TOKEN = ".job"  # file in the launcher's directory that holds the job's name: whoever sees it shares the directory
FELLOWS = ".agents"  # the same in one that agents have made: an agent of this job may use what another one holds
ENCLOSED = "enclosed"  # file in the directory that the launcher hands to every host
NOT_SENT = ("stdout", "stderr", TOKEN, ENCLOSED, FELLOWS)  # names of files that the launcher or an agent writes itself
DEEPEST = 32  # directories above a file that is sent
LONGEST = 200  # characters of a refused name that are shown
PART = 1 << 20
FELLOW = 5.0  # seconds within which an agent that holds the directory has said for which job
PAUSE = 0.02  # seconds from one look for that to the next


class Directory:
    """The directory of a job, on an agent's side.

    Parameters
    ----------
    path : Path
    job : str
        The job's name.
    ranks : sequence of int
        Those of this host.
    """

    def __init__(self, path: Path, job: str, ranks: Sequence[int]) -> None:
        self._path = path
        self._job = job
        self._ranks = ranks
        self._shared = False
        self._made = False
        self._lock = -1
        self._enclosed = f"{ENCLOSED}.{ranks[0]}"  # its name while it comes: fellows take it, too

    def make(self) -> None:
        """Make it, unless it is the launcher's own.

        Raises
        ------
        LaunchError
            It cannot be made, or is in use.
        """
        with contextlib.suppress(OSError):
            self._shared = (self._path / TOKEN).read_text() == self._job
        if self._shared:
            return
        try:
            if self._path.name.startswith(leftovers.PREFIX):
                leftovers.clear_old(self._path.parent)
            keep_mode = leftovers.holds_other_files(self._path)
            self._made = private_files.make_directory(self._path, keep_mode=keep_mode)
            self._hold()
            leftovers.forget_records(self._path)
            for rank in self._ranks:
                private_files.make_directory(self._path / _of_rank(rank))
        except OSError as error:
            raise LaunchError(
                f"no directory for the job's files: {error}; choose one with --output-dir that can be made there"
            ) from error

    def _hold(self) -> None:
        """Hold it against other jobs, unless another agent of this one does."""
        try:
            self._lock = leftovers.lock(self._path)
        except BlockingIOError:
            patience = Patience(FELLOW)
            while not self._held_for_this_job():
                if not patience.left():
                    raise OSError(f"{str(self._path)!r} is in use by another job") from None
                time.sleep(PAUSE)
        else:
            private_files.write(self._path / FELLOWS, self._job.encode())

    def _held_for_this_job(self) -> bool:
        with contextlib.suppress(OSError):
            return (self._path / FELLOWS).read_text() == self._job
        return False

    def send(self, channel: Channel) -> None:
        """Send the files that the ranks have left, if the launcher does not see them.

        Parameters
        ----------
        channel : Channel
        """
        if self._shared:
            return
        for path in self._files():
            with contextlib.suppress(OSError):
                for head, part in parts(path, self._path):
                    channel.send("file", part, **head)
                    channel.out.drain()

    def take(self, message: Message) -> None:
        """Take a part of a file that the launcher hands over, unless it lies here already.

        Parameters
        ----------
        message : Message
            A `file`.

        Raises
        ------
        LaunchError
            It cannot be written.
        """
        path = self._path / self._enclosed
        try:
            if not self._shared:
                _write_part(message, path)
        except OSError as error:
            raise LaunchError(f"cannot write {str(path)!r}: {linux.explain_briefly(error)}") from error

    def settle(self) -> None:
        """What was handed over is complete, and can be read by the name that ranks look for."""
        with contextlib.suppress(FileNotFoundError):  # nothing was
            (self._path / self._enclosed).rename(self._path / ENCLOSED)

    def remove(self) -> None:
        """Remove it, if this agent has made it, or else what was handed over; a second call does nothing."""
        if self._lock >= 0:
            with contextlib.suppress(OSError):  # the directory is gone, or somebody else's meanwhile
                for name in (ENCLOSED, self._enclosed, FELLOWS):
                    (self._path / name).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1
        if self._made:
            shutil.rmtree(self._path, ignore_errors=True)
            self._made = False

    def _files(self) -> Iterator[Path]:
        """Those to send: what ranks of this host have left, and what else lies in a directory that this agent has made.

        The output of ranks is there already.
        """
        own = {f"rank.{rank}" for rank in self._ranks}
        for folder, folders, names in os.walk(self._path):
            if Path(folder) == self._path:
                folders[:] = [each for each in folders if each in own or (self._made and not each.startswith("rank."))]
                names = names if self._made else []
            paths = (Path(folder, name) for name in sorted(names) if name not in NOT_SENT)
            yield from (path for path in paths if path.is_file() and not path.is_symlink())


def parts(path: Path, directory: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Read a file in the parts by which it is sent, each with the head of its message.

    Parameters
    ----------
    path : Path
    directory : Path
        Of the job, in which it lies.

    Yields
    ------
    dict, bytes
    """
    with path.open("rb") as file:
        first = True
        while (part := file.read(PART)) or first:
            yield {"path": str(path.relative_to(directory)), "first": first}, part
            first = False


def enclosed_parts(data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Cut what the launcher hands to every host into parts, as `parts` does with a file."""
    for start in range(0, len(data), PART):
        yield {"path": ENCLOSED, "first": start == 0}, data[start : start + PART]


def remove_token(directory: Path) -> None:
    """Remove the launcher's token, if the directory is still there."""
    with contextlib.suppress(OSError):
        (directory / TOKEN).unlink(missing_ok=True)


def keep_later(
    message: Message, directory: Path, numbers: Collection[int], files: Writer, problems: dict[str, OSError]
) -> None:
    """Have a part of a file written, as of `keep`, and note by its path why it could not be.

    Raises
    ------
    ChannelError
        As of `keep`.
    """
    path, numbers = directory / name_of(message, numbers), tuple(numbers)

    def write() -> None:
        if (problem := keep(message, directory, numbers)) is not None:
            problems.setdefault(str(path), problem)

    if not files.put(write, len(message.body)):
        problems.setdefault(str(path), OSError(errno.EIO, "its file system took nothing any more"))


def name_of(message: Message, numbers: Collection[int]) -> Path:
    """Return the name of a file in the job's directory that an agent has sent.

    Raises
    ------
    ChannelError
        It leads out of the directory, or to what is not the host's.
    """
    text = message.text("path")
    name = Path(text)
    if name.is_absolute() or ".." in name.parts or not name.parts or "\0" in text or len(name.parts) > DEEPEST:
        raise ChannelError(f"a file {text[:LONGEST]!r} is outside of the job's directory")
    if name.name in NOT_SENT or (name.parts[0].startswith("rank.") and name.parts[0] not in map(_of_rank, numbers)):
        raise ChannelError(f"a file {text[:LONGEST]!r} is not one of its ranks'")
    return name


def keep(message: Message, directory: Path, numbers: Collection[int]) -> OSError | None:
    """Write a part of a file that an agent has sent into the launcher's directory.

    Parameters
    ----------
    message : Message
        A `file`.
    directory : Path
        The job's.
    numbers : collection of int
        The ranks of the agent's host, or its slots in an elastic job: it writes into the directories of no others.

    Returns
    -------
    OSError or None
        Why it could not be written.

    Raises
    ------
    ChannelError
        Its name leads out of the directory, or to what is not the host's.
    """
    name = name_of(message, numbers)
    try:
        for depth in range(1, len(name.parts)):  # each of them, so that none is a link
            private_files.make_directory(directory.joinpath(*name.parts[:depth]))
        _write_part(message, directory / name)
    except OSError as error:
        return error
    return None


def _write_part(message: Message, path: Path) -> None:
    """Write the first part into a new file, and others behind it."""
    if message.head.get("first"):
        private_files.write(path, message.body)
    else:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        private_files.write_all(descriptor, message.body)


def _of_rank(number: int) -> str:
    return f"rank.{number}"
