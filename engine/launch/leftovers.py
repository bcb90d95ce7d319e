"""Files of earlier jobs: records in a directory that is used again, and old temporary directories."""

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

from ..exit_report.report import NAME as REPORT
from ..host import stacks
from ..trace import flight

PREFIX = "enginerun-"  # prefix of the names of jobs' temporary directories
RESULT, ERROR = "call-result", "call-error"  # files that a rank of `engine.run` leaves: one of them
# Files that a rank leaves about its job.
RECORDS = (*flight.RECORDS, stacks.NAME, REPORT, RESULT, ERROR)
KEPT = 7 * 24 * 3600.0  # seconds for which a temporary directory is kept
_OF_RANK, _OF_WORLD = re.compile(r"rank\.\d+"), re.compile(r"world\.\d+")
_OF_JOB = re.compile(r"(rank|world|line)\.\d+|autotune\.jsonl|enclosed.*|\.job|\.agents")  # names in its directory
CLEARED = 20  # most directories that one job clears, so that it does not start late


def holds_other_files(directory: Path) -> bool:
    """Whether a directory that exists has files that are no job's; then it has a mode that others may count on."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return any(_OF_JOB.fullmatch(name) is None for name in os.listdir(directory))
    return False


def forget_records(directory: Path) -> None:
    """Remove what the ranks of an earlier job have recorded, however many there were: it would be taken for this job's.

    Parameters
    ----------
    directory : Path
        Of a job.

    Raises
    ------
    OSError
        A record cannot be removed.
    """
    for name in RECORDS:
        for old in directory.glob(f"rank.*/{name}"):
            if not old.parent.is_symlink():
                old.unlink()
    for world in flight.worlds_in(directory):
        flight.forget(world)


def forget_empty(directory: Path) -> None:
    """Remove the files for stacks into which no rank has written, once the report has been made of them.

    Parameters
    ----------
    directory : Path
        Of a job.
    """
    with contextlib.suppress(OSError):  # an empty file is no reason to call a job failed
        for path in directory.glob(f"rank.*/{stacks.NAME}"):
            if path.stat().st_size == 0:
                path.unlink()


def lock(directory: Path) -> int:
    """Hold a directory, so that no other job uses it and none clears it away; no link is followed.

    Parameters
    ----------
    directory : Path

    Returns
    -------
    int
        A descriptor; the directory is held until it is closed, or its process has ended.

    Raises
    ------
    BlockingIOError
        Another process holds it.
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

    They are those of `enginerun`, and those of records that ranks without it have written (`engine.trace.flight`).
    A job holds its directory by a lock, so that one in use is never removed, however long it says nothing. No link is
    followed: what is looked at is what was opened. What cannot be looked at or removed is left to the next job.

    Parameters
    ----------
    temporary : Path
        Where they are.
    """
    cleared = 0
    try:
        names = [name for name in os.listdir(temporary) if name.startswith((PREFIX, flight.PREFIX))]
    except OSError:
        return  # making the job's own directory there will say what is wrong
    for name in names:
        with contextlib.suppress(OSError):  # in use, no directory, or gone since
            if not _is_old(os.lstat(temporary / name)):
                continue  # not even for a moment is a new one held, which its job is about to hold
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
    """Whether a directory is one of ranks' records by what is in it: others may have named theirs alike.

    Those of an elastic job are in directories of its worlds.
    """
    names = os.listdir(descriptor)
    return bool(names) and all(
        _in(name, descriptor, _holds_records_alone)
        if _OF_WORLD.fullmatch(name)
        else _OF_RANK.fullmatch(name) is not None and _in(name, descriptor, _is_of_records)
        for name in names
    )


def _in(name: str, descriptor: int, ask: Callable[[int], bool]) -> bool:
    """What is to be said of a directory within another."""
    inside = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=descriptor)
    try:
        return ask(inside)
    finally:
        os.close(inside)


def _is_of_records(descriptor: int) -> bool:
    """Whether a directory has records, or drafts of such, and nothing else."""
    known = (*RECORDS, *(f".{record}." for record in RECORDS))
    return all(name.startswith(known) for name in os.listdir(descriptor))


def _is_old(about: os.stat_result) -> bool:
    """Whether a file has not changed for long."""
    return about.st_mtime < time.time() - KEPT


def _is_abandoned(descriptor: int) -> bool:
    """Whether a directory is a job's of this user, and nothing in it has changed for long."""
    about = os.fstat(descriptor)
    if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) != 0o700:
        return False
    return _is_old(about) and all(
        _is_old(os.stat(name, dir_fd=inside, follow_symlinks=False))
        for _, directories, files, inside in os.fwalk(dir_fd=descriptor)
        for name in (*directories, *files)
    )
