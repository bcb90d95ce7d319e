"""Clean-up of earlier jobs: records in a directory that is used again, and old temporary directories."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path

from ...exit_report.report import NAME as REPORT
from ...host import stacks
from ...trace import flight

PREFIX = "enginerun-"  # prefix of the names of jobs' temporary directories
RESULT, ERROR = "call-result", "call-error"  # files of a rank of `engine.run`, which leaves one of them
# Records of a job that a rank leaves.
RECORDS = (*flight.RECORDS, stacks.NAME, REPORT, RESULT, ERROR)
KEPT = 7 * 24 * 3600.0  # seconds for which a temporary directory is kept
_OF_RANK, _OF_WORLD = re.compile(r"rank\.\d+"), re.compile(r"world\.\d+")
_OF_JOB = re.compile(r"(rank|world|line)\.\d+|autotune\.jsonl|enclosed.*|\.job|\.agents")  # names in its directory
CLEARED = 20  # most directories that one job removes, so that its start is not delayed


def holds_other_files(directory: Path) -> bool:
    """Return whether an existing directory has files of no job; then other programs may rely on its mode."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return any(_OF_JOB.fullmatch(name) is None for name in os.listdir(directory))
    return False


def forget_records(directory: Path) -> None:
    """Remove all records of an earlier job's ranks from a job's directory, which would be mistaken for this job's.

    An `OSError` is raised if a record cannot be removed.
    """
    for name in RECORDS:
        for old in directory.glob(f"rank.*/{name}"):
            if not old.parent.is_symlink():
                old.unlink()
    for world in flight.worlds_in(directory):
        flight.remove_records(world)


def forget_empty(directory: Path) -> None:
    """Remove empty files for stacks from a job's directory; to be called after the report is made."""
    with contextlib.suppress(OSError):  # a failure here must not fail the job
        for path in directory.glob(f"rank.*/{stacks.NAME}"):
            if path.stat().st_size == 0:
                path.unlink()


def lock(directory: Path) -> int:
    """Lock a directory, so that no other job uses or removes it; symbolic links are not followed.

    The lock is held until the returned descriptor is closed or the process ends. A `BlockingIOError` is raised if
    another process holds it.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def clear_old(temporary: Path) -> None:
    """Remove temporary directories of this user's jobs in which nothing has changed for `KEPT` seconds.

    These are directories within `temporary`: those of `enginerun`, and of the records of ranks that were started
    without it (`engine.trace.flight`). A job locks its directory, so a directory in use is never removed, however long
    nothing changes there. Symbolic links are not followed. Directories that cannot be examined or removed are skipped.
    """
    cleared = 0
    try:
        names = [name for name in os.listdir(temporary) if name.startswith((PREFIX, flight.PREFIX))]
    except OSError:
        return  # the error shows again when the job's own directory is made there
    for name in names:
        with contextlib.suppress(OSError):  # in use, no directory, or gone since
            if not _is_old(os.lstat(temporary / name)):
                continue  # a new one must not be locked, even briefly: its job is about to lock it
            descriptor = lock(temporary / name)
            try:
                ours = name.startswith(PREFIX) or _holds_records_alone(descriptor)
                if ours and _is_abandoned(descriptor):
                    shutil.rmtree(temporary / name)  # follows no link, either
                    cleared += 1
            finally:
                os.close(descriptor)
        if cleared == CLEARED:
            return


def _holds_records_alone(descriptor: int) -> bool:
    """Return whether a directory holds nothing but ranks' records; other programs may use the same name for theirs.

    Records of an elastic job are in directories of its worlds.
    """
    names = os.listdir(descriptor)
    return bool(names) and all(
        _check_inside(name, descriptor, _holds_records_alone)
        if _OF_WORLD.fullmatch(name)
        else _OF_RANK.fullmatch(name) is not None and _check_inside(name, descriptor, _is_of_records)
        for name in names
    )


def _check_inside(name: str, descriptor: int, ask: Callable[[int], bool]) -> bool:
    """Open a directory within another, and return the result of `ask` for its descriptor."""
    inside = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=descriptor)
    try:
        return ask(inside)
    finally:
        os.close(inside)


def _is_of_records(descriptor: int) -> bool:
    """Return whether a directory has only records and unfinished records."""
    known = (*RECORDS, *(f".{record}." for record in RECORDS))
    return all(name.startswith(known) for name in os.listdir(descriptor))


def _is_old(about: os.stat_result) -> bool:
    """Return whether a file has not changed for `KEPT` seconds."""
    return about.st_mtime < time.time() - KEPT


def _is_abandoned(descriptor: int) -> bool:
    """Return whether a directory has this user, a job's mode, and no change in it for `KEPT` seconds."""
    about = os.fstat(descriptor)
    if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) != 0o700:
        return False
    return _is_old(about) and all(
        _is_old(os.stat(name, dir_fd=inside, follow_symlinks=False))
        for _, directories, files, inside in os.fwalk(dir_fd=descriptor)
        for name in (*directories, *files)
    )
