"""Files and directories that only this user can read, and that nobody else has laid where they are.

Every file of a job is opened here: logs, records, timelines, results of calls. No link is followed, nothing of another
user is used, and what exists with another mode gets the right one: files 0600, directories 0700. A file is opened from
the descriptor of its directory, after that was examined: who can rename directories above it can take it away, and
neither read it nor put another in its place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

FILE_MODE, DIRECTORY_MODE = 0o600, 0o700
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_directory(path: Path, *, keep_mode: bool = False) -> bool:
    """Make a directory and what is missing above it, or see to it that one that exists can be used.

    Parameters
    ----------
    path : Path
    keep_mode : bool, optional
        Leave a directory readable by others that was so: it has other files, too.

    Returns
    -------
    bool
        Whether it was made by this call.

    Raises
    ------
    OSError
        It cannot be made; it is a link; it belongs to another user; others can write to it.
    """
    made = make_missing(path)
    descriptor = open_directory(path)
    try:
        about = os.fstat(descriptor)
        if stat.S_IMODE(about.st_mode) != DIRECTORY_MODE and not (keep_mode or about.st_mode & stat.S_ISVTX):
            os.fchmod(descriptor, DIRECTORY_MODE)
    finally:
        os.close(descriptor)
    return made


def make_missing(path: Path) -> bool:
    """Make a directory and those above it, as far as they are missing; what exists is not looked at.

    Returns
    -------
    bool
        Whether this call made the last of them.
    """
    try:
        os.mkdir(path, DIRECTORY_MODE)
    except FileExistsError:
        return False
    except FileNotFoundError:
        if path.parent == path:
            raise
        make_missing(path.parent)
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.mkdir(path, DIRECTORY_MODE)
            return True
        return False
    return True


def open_directory(path: Path) -> int:
    """Open a directory of this user into which nobody else can put files, or else take away those of this user.

    Returns
    -------
    int
        Its descriptor.

    Raises
    ------
    OSError
        As `make_directory`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:
        raise _name_link(path) from None
    with _closed_on_error(descriptor):
        about = os.fstat(descriptor)
        _check_owner(about, path)
        if about.st_mode & _OTHERS_WRITE and not about.st_mode & stat.S_ISVTX:
            why = "other users can write to this directory; run 'chmod go-w' on it, or choose one that is not there yet"
            raise PermissionError(errno.EPERM, why, str(path))
    return descriptor


def create(path: Path) -> int:
    """Make a file in a job's directory, in the place of whatever has its name.

    Returns
    -------
    int
        Its descriptor; what is written is appended.

    Raises
    ------
    OSError
        It cannot be made, or its directory cannot be used, as `open_directory` says.
    """
    directory = open_directory(path.parent)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=directory)
        return _create(path.name, directory)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(directory)


def write(path: Path, data: bytes) -> None:
    """Write a file in a job's directory, in the place of whatever has its name; errors as of `create`."""
    write_all(create(path), data)


def replace(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees all of it, or the one before; errors as of `create`."""
    directory = open_directory(path.parent)
    draft = f".{path.name}.{secrets.token_hex(8)}"
    try:
        write_all(_create(draft, directory), data)
        os.replace(draft, path.name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft, dir_fd=directory)
        raise
    finally:
        os.close(directory)


def open_file(path: Path, flags: int = 0) -> int:
    """Open a file for writing, or make it; its directory may be any that the user has named.

    Parameters
    ----------
    path : Path
    flags : int, optional
        More flags for open(2). A file that exists keeps its content, also with `O_TRUNC` until it was looked at.

    Returns
    -------
    int
        Its descriptor.

    Raises
    ------
    OSError
        It cannot be opened; it is a link, or no file; it belongs to another user, or has another name, too.
    """
    common = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, common | flags & ~os.O_TRUNC, FILE_MODE)
    except OSError as error:
        raise (_name_link(path) if error.errno == errno.ELOOP else error) from None
    with _closed_on_error(descriptor):
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        _check_owner(about, path)
        if about.st_nlink > 1:
            raise PermissionError(errno.EPERM, "it has a second name (a hard link); choose another path", str(path))
        os.fchmod(descriptor, FILE_MODE)
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
        os.set_blocking(descriptor, True)
    return descriptor


def is_own(path: Path) -> bool:
    """Whether a path is a regular file of this user, and no link to one."""
    about = os.lstat(path)
    return stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid()


def _check_owner(about: os.stat_result, path: Path) -> None:
    if about.st_uid != os.geteuid():
        why = f"it belongs to another user (uid {about.st_uid}; this process has {os.geteuid()}); choose another path"
        raise PermissionError(errno.EPERM, why, str(path))


def _name_link(path: Path) -> OSError:
    """The error for what is a link, or no directory."""
    if path.is_symlink():
        return OSError(errno.ELOOP, "it is a symbolic link, which is not followed; name what it points to", str(path))
    return NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def _create(name: str, directory: int) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, FILE_MODE, dir_fd=directory)
    os.fchmod(descriptor, FILE_MODE)  # whatever the umask
    return descriptor


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of it and close the descriptor."""
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _closed_on_error(descriptor: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(descriptor)
        raise
