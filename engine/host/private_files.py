"""Files and directories that only this user can read and that no other user can replace.

All files of a job are opened here: logs, records, timelines, results of calls. Links are not followed, nothing owned by
another user is used, and wrong modes are corrected: files 0600, directories 0700. A file is opened relative to the
descriptor of its directory, after the directory was checked. So a user who can rename directories above it can remove
the file, but can neither read nor replace it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from .sockets import write_all

FILE_MODE, DIRECTORY_MODE = 0o600, 0o700
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_directory(path: Path, *, keep_mode: bool = False) -> bool:
    """Create a directory and its missing parents, or check that an existing one is safe to use.

    It returns whether this call created the directory. With `keep_mode`, a directory that others can read stays so,
    because it has other files, too. An OSError says that the directory cannot be created, is a link, belongs to another
    user, or is writable by others.
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
    """Create a directory and its missing parents, and return whether this call created the last of them.

    Existing ones are not checked.
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
    """Open a directory of this user in which nobody else can create files, or at least not remove this user's.

    It returns a descriptor, and raises the same errors as `make_directory`.
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


def create_file(path: Path) -> int:
    """Create a file in a job's directory, replacing any file of that name; return a descriptor for appending.

    It refuses the directories that `open_directory` refuses.
    """
    directory = open_directory(path.parent)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=directory)
        return _create_in_directory(path.name, directory)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(directory)


def write(path: Path, data: bytes) -> None:
    """Write a file in a job's directory, replacing any file of that name; same errors as `create_file`."""
    write_and_close(create_file(path), data)


def replace(path: Path, data: bytes) -> None:
    """Replace a file atomically: readers see either the old content or the new; same errors as `create_file`."""
    directory = open_directory(path.parent)
    draft = f".{path.name}.{secrets.token_hex(8)}"
    try:
        write_and_close(_create_in_directory(draft, directory), data)
        os.replace(draft, path.name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft, dir_fd=directory)
        raise
    finally:
        os.close(directory)


def open_file(path: Path, flags: int = 0) -> int:
    """Open or create a file for writing, in any directory that the user has named, and return its descriptor.

    `flags` are further flags for open(2). With `O_TRUNC`, an existing file is truncated only after it was checked. A
    link, another file than a regular one, one of another user, and one with a hard link are refused with an OSError.
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
    """Return whether a path is a regular file of this user, not a link."""
    about = os.lstat(path)
    return stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid()


def _check_owner(about: os.stat_result, path: Path) -> None:
    if about.st_uid != os.geteuid():
        why = f"it belongs to another user (uid {about.st_uid}; this process has {os.geteuid()}); choose another path"
        raise PermissionError(errno.EPERM, why, str(path))


def _name_link(path: Path) -> OSError:
    """Return the error for a path that is a link or not a directory."""
    if path.is_symlink():
        return OSError(errno.ELOOP, "it is a symbolic link, which is not followed; name what it points to", str(path))
    return NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def _create_in_directory(name: str, directory: int) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, FILE_MODE, dir_fd=directory)
    os.fchmod(descriptor, FILE_MODE)  # whatever the umask
    return descriptor


def write_and_close(descriptor: int, data: bytes) -> None:
    """Write all bytes and close the descriptor."""
    try:
        write_all(descriptor, data)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _closed_on_error(descriptor: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(descriptor)
        raise
