"""The files of a job on a host that may not share a file system with the launcher.

Ranks get a directory with the same path on every host, so that messages which name a file name the one that the user
finds. Where that is the launcher's own, as on a shared file system, files lie where they belong. Elsewhere the agent
makes it, and sends what is in it when the ranks have ended. Several agents may share a file system that the launcher
does not see: one of them makes the directory and removes it, and each sends what its own ranks have left.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..host.patience import Patience
from . import leftovers
from .channel import Channel, ChannelError, Message
from .errors import LaunchError

TOKEN = ".job"  # file in the launcher's directory that holds the job's name: whoever sees it shares the directory
FELLOWS = ".agents"  # the same in one that agents have made: an agent of this job may use what another one holds
ENCLOSED = "enclosed"  # file in the directory that the launcher hands to every host
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
            with contextlib.suppress(FileExistsError):
                self._path.mkdir(mode=0o700, parents=True)
                self._made = True
            if self._path.stat().st_uid != os.geteuid():
                raise PermissionError(f"{str(self._path)!r} belongs to another user")
            self._hold()
            leftovers.forget_records(self._path)
            for rank in self._ranks:
                (self._path / f"rank.{rank}").mkdir(mode=0o700, exist_ok=True)
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
            write_new(self._path / FELLOWS, self._job.encode())

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
        own = replace(message, head=message.head | {"path": self._enclosed})
        if not self._shared and (problem := keep(own, self._path)) is not None:
            raise LaunchError(f"cannot write {str(self._path / self._enclosed)!r}: {problem.strerror}")

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
        not_sent = ("stdout", "stderr", ENCLOSED, FELLOWS)
        for folder, folders, names in os.walk(self._path):
            if Path(folder) == self._path:
                folders[:] = [each for each in folders if each in own or (self._made and not each.startswith("rank."))]
                names = names if self._made else []
            paths = (Path(folder, name) for name in sorted(names) if name not in not_sent)
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


def keep(message: Message, directory: Path) -> OSError | None:
    """Write a part of a file that an agent has sent into the launcher's directory.

    Parameters
    ----------
    message : Message
        A `file`.
    directory : Path
        The job's.

    Returns
    -------
    OSError or None
        Why it could not be written.

    Raises
    ------
    ChannelError
        Its name leads out of the directory.
    """
    name = Path(str(message.head.get("path")))
    if name.is_absolute() or ".." in name.parts or not name.parts:
        raise ChannelError(f"a file {str(name)!r} is outside of the job's directory")
    try:
        (directory / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if message.head.get("first"):
            write_new(directory / name, message.body)
        else:
            _write(os.open(directory / name, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC), message.body)
    except OSError as error:
        return error
    return None


def write_new(path: Path, data: bytes) -> None:
    """Write a file that only this user can read, in the place of whatever has its name; no link is followed.

    Parameters
    ----------
    path : Path
    data : bytes

    Raises
    ------
    OSError
        It cannot be written.
    """
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    _write(os.open(path, flags, 0o600), data)


def _write(descriptor: int, data: bytes) -> None:
    """Write all of it and close the descriptor."""
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)
