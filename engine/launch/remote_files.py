"""The files of a job on a host that may not share a file system with the launcher.

Ranks get a directory with the same path on every host, so that messages which name a file name the one that the user
finds. Where that is the launcher's own, as on a shared file system, files lie where they belong. Elsewhere the agent
makes it, and sends what is in it when the ranks have ended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import leftovers
from .channel import Channel, ChannelError, Message
from .errors import LaunchError

TOKEN = ".job"  # file in the launcher's directory that holds the job's name: whoever sees it shares the directory
ENCLOSED = "enclosed"  # file in the directory that the launcher hands to every host
PART = 1 << 20


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
            self._made = not self._path.exists()
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._path.stat().st_uid != os.geteuid():
                raise PermissionError(f"{str(self._path)!r} belongs to another user")
            self._lock = leftovers.lock(self._path)
            leftovers.forget_records(self._path)
            for rank in self._ranks:
                (self._path / f"rank.{rank}").mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"no directory for the job's files: {error}; choose one with --output-dir that can be made there"
            ) from error

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
        if not self._shared and (problem := keep(message, self._path)) is not None:
            raise LaunchError(f"cannot write {str(self._path / str(message.head['path']))!r}: {problem.strerror}")

    def remove(self) -> None:
        """Remove it, if this agent has made it, or else what was handed over; a second call does nothing."""
        if self._lock >= 0:
            with contextlib.suppress(OSError):  # the directory is gone, or somebody else's meanwhile
                (self._path / ENCLOSED).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1
        if self._made:
            shutil.rmtree(self._path, ignore_errors=True)
            self._made = False

    def _files(self) -> Iterator[Path]:
        """Those to send: of a directory that was there before, only those of ranks; their output is there already."""
        roots = [self._path] if self._made else [self._path / f"rank.{rank}" for rank in self._ranks]
        for root in roots:
            for folder, _, names in os.walk(root):
                paths = (Path(folder, name) for name in sorted(names) if name not in ("stdout", "stderr", ENCLOSED))
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
