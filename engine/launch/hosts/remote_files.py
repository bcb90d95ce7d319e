"""The files of a job on a host that may not share a file system with the launcher.

Ranks have a directory with the same path on every host, so that file names in messages are right on the launcher's
host, too. On a file system that is shared with the launcher, that is the launcher's own directory. Elsewhere the agent
makes it, and sends its files when the ranks have ended. Several agents may share a file system that the launcher does
not see: one of them makes and removes the directory, and each sends the files of its own ranks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ...host import linux, private_files
from ...host.patience import Patience
from ..errors import LaunchError
from ..process import leftovers
from ..process.writer import Writer
from .channel import Channel, ChannelError, Message

TOKEN = ".job"  # file in the launcher's directory with the job's name: an agent that sees it shares the directory
FELLOWS = ".agents"  # the same in an agent's directory: other agents of the job may use the directory, too
ENCLOSED = "enclosed"  # file in the directory that the launcher sends to every host
NOT_SENT = ("stdout", "stderr", TOKEN, ENCLOSED, FELLOWS)  # names of files that the launcher or an agent writes itself
DEEPEST = 32  # most parts of the path of a file that is sent
LONGEST = 200  # characters of a refused name that are shown
PART = 1 << 20
FELLOW = 5.0  # seconds in which the agent that has locked the directory must write the job's name
PAUSE = 0.02  # seconds between two polls for that


class Directory:
    """The directory of a job, on the side of an agent, which has the job's name and the ranks of its host."""

    def __init__(self, path: Path, job: str, ranks: Sequence[int]) -> None:
        self._path = path
        self._job = job
        self._ranks = ranks
        self._shared = False
        self._made = False
        self._lock = -1
        self._enclosed = f"{ENCLOSED}.{ranks[0]}"  # its name while it is received; other agents may receive it, too

    def make(self) -> None:
        """Make and lock the directory, unless it is the launcher's own.

        A `LaunchError` is raised if it cannot be made, or another job uses it.
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
            self._lock_directory()
            leftovers.forget_records(self._path)
            for rank in self._ranks:
                private_files.make_directory(self._path / _of_rank(rank))
        except OSError as error:
            raise LaunchError(
                f"no directory for the job's files: {error}; choose one with --output-dir that can be made there"
            ) from error

    def _lock_directory(self) -> None:
        """Lock the directory against other jobs, unless another agent of this job has locked it."""
        try:
            self._lock = leftovers.lock(self._path)
        except BlockingIOError:
            patience = Patience(FELLOW)
            while not self._held_for_this_job():
                if not patience.seconds_left():
                    raise OSError(f"{str(self._path)!r} is in use by another job") from None
                time.sleep(PAUSE)
        else:
            private_files.write(self._path / FELLOWS, self._job.encode())

    def _held_for_this_job(self) -> bool:
        with contextlib.suppress(OSError):
            return (self._path / FELLOWS).read_text() == self._job
        return False

    def send(self, channel: Channel) -> None:
        """Send the ranks' files, unless the launcher shares the directory."""
        if self._shared:
            return
        for path in self._list_files():
            with contextlib.suppress(OSError), path.open("rb") as file:
                for head, part in read_parts(file, str(path.relative_to(self._path))):
                    channel.send("file", part, **head)
                    channel.out.drain()

    def take_part(self, message: Message) -> None:
        """Write a part of the file that the launcher sends, unless the launcher shares the directory.

        `message` is one of `file`. A `LaunchError` is raised if the part cannot be written.
        """
        path = self._path / self._enclosed
        try:
            if not self._shared:
                _write_part(message, path)
        except OSError as error:
            raise LaunchError(f"cannot write {str(path)!r}: {linux.explain_briefly(error)}") from error

    def finish_enclosed(self) -> None:
        """Rename the launcher's file, which is complete, to the name that ranks look for."""
        with contextlib.suppress(FileNotFoundError):  # none was sent
            (self._path / self._enclosed).rename(self._path / ENCLOSED)

    def remove(self) -> None:
        """Remove the directory if this agent has made it, else the files that it has written; may be called twice."""
        if self._lock >= 0:
            with contextlib.suppress(OSError):  # the directory is gone, or belongs to another user by now
                for name in (ENCLOSED, self._enclosed, FELLOWS):
                    (self._path / name).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1
        if self._made:
            shutil.rmtree(self._path, ignore_errors=True)
            self._made = False

    def _list_files(self) -> Iterator[Path]:
        """Yield the files to send: those of this host's ranks, and other files if this agent has made the directory.

        The launcher has the ranks' stdout and stderr already.
        """
        own = {f"rank.{rank}" for rank in self._ranks}
        for folder, folders, names in os.walk(self._path):
            if Path(folder) == self._path:
                folders[:] = [each for each in folders if each in own or (self._made and not each.startswith("rank."))]
                names = names if self._made else []
            paths = (Path(folder, name) for name in sorted(names) if name not in NOT_SENT)
            yield from (path for path in paths if path.is_file() and not path.is_symlink())


def read_parts(file: BinaryIO, name: str) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield the parts of a file, of `PART` bytes, each with the head of its message.

    `name` is the file's path in the job's directory.
    """
    first = True
    while (part := file.read(PART)) or first:
        yield {"path": name, "first": first}, part
        first = False


def remove_token(directory: Path) -> None:
    """Remove the launcher's token, if the directory is still there."""
    with contextlib.suppress(OSError):
        (directory / TOKEN).unlink(missing_ok=True)


def keep_part(
    message: Message, directory: Path, numbers: Collection[int], files: Writer, problems: dict[str, OSError]
) -> None:
    """Queue the writing of a part of a file that an agent has sent into the launcher's directory.

    `numbers` are the ranks of the agent's host, or its slots in an elastic job; it may write into their directories
    only. If the part cannot be written, the reason is noted in `problems`, by the file's path. A `ChannelError` is
    raised as by `name_of`.
    """
    name = name_of(message, numbers)
    path = directory / name

    def write() -> None:
        try:
            for depth in range(1, len(name.parts)):  # each of them is checked, so that none is a link
                private_files.make_directory(directory.joinpath(*name.parts[:depth]))
            _write_part(message, path)
        except OSError as error:
            problems.setdefault(str(path), error)

    if not files.put(write, len(message.body)):
        problems.setdefault(str(path), OSError(errno.EIO, "its file system took nothing any more"))


def name_of(message: Message, numbers: Collection[int]) -> Path:
    """Return the validated name, relative to the job's directory, of a file that an agent has sent.

    A `ChannelError` is raised if it leads out of the directory, or to a file that the agent may not write.
    """
    text = message.get_text("path")
    name = Path(text)
    if name.is_absolute() or ".." in name.parts or not name.parts or "\0" in text or len(name.parts) > DEEPEST:
        raise ChannelError(f"a file {text[:LONGEST]!r} is outside of the job's directory")
    if name.name in NOT_SENT or (name.parts[0].startswith("rank.") and name.parts[0] not in map(_of_rank, numbers)):
        raise ChannelError(f"a file {text[:LONGEST]!r} is not one of its ranks'")
    return name


def _write_part(message: Message, path: Path) -> None:
    """Write a file's first part into a new file, and append the others."""
    if message.head.get("first"):
        private_files.write(path, message.body)
    else:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        private_files.write_and_close(descriptor, message.body)


def _of_rank(number: int) -> str:
    return f"rank.{number}"
