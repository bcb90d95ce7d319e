"""Stacks of a rank's threads, which it writes when it crashes and when it is asked: where it stands in its program.

A rank that was started with a directory of its own keeps a file open there. Python's `faulthandler` writes to it, from
a signal handler in C, so that it works while native code holds the interpreter's lock. `enginerun` asks a rank that
others blame for standing still, and reads the file for its report.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

from . import private_files

NAME = "stacks.txt"
# A signal that programs are unlikely to use, as they do SIGUSR1 and SIGUSR2.
SIGNAL = signal.SIGRTMIN + 9
CRASHES = (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)  # which `faulthandler` catches
BYTES = 1 << 18  # most bytes of a file that are read

_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line ([0-9]{1,9}) in (.*)$')
# Code that is not the user's: this package, the interpreter's library, what was installed, extensions.
NOT_THE_USERS = (
    f"{Path(__file__).parents[1]}{os.sep}",
    f"{os.sep}engine_ext{os.sep}",
    f"{os.sep}lib{os.sep}python3",
    "site-packages",
    "<frozen",
    "<engine",  # functions that are made of a table (engine/frameworks/surface.py), under both names of the package
    ".pyx",
)

_file: int | None = None


@dataclass(frozen=True)
class Place:
    """A line of a program.

    Attributes
    ----------
    file : str
    line : int
    function : str
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} in {self.function}"


def enable(directory: Path | None, rank: int) -> None:
    """Have this process write its stacks when it crashes and on `SIGNAL`. Does nothing a second time.

    Handlers of the program stay: a `faulthandler` that it has enabled, and whatever it does on that signal.

    Parameters
    ----------
    directory : Path or None
        Of the job. The file is made if the launcher has made `rank.N` in it.
    rank : int
    """
    global _file
    if _file is not None or directory is None:
        return
    try:
        _file = private_files.open_file(directory / f"rank.{rank}" / NAME, os.O_APPEND)
    except OSError:
        return  # no directory, or none that can be written to: other records say so when there is a failure to tell
    if not faulthandler.is_enabled():
        faulthandler.enable(_file)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(SIGNAL) == signal.SIG_DFL:
        # Ignored beneath: the interpreter takes the handler away as it ends, and who asks then must not kill it.
        signal.signal(SIGNAL, signal.SIG_IGN)
        faulthandler.register(SIGNAL, _file)


def where(path: Path) -> Place | None:
    """Find where the main thread of a rank stood when it last wrote its stacks.

    Parameters
    ----------
    path : Path
        The rank's file.

    Returns
    -------
    Place or None
        The innermost line of the user's own code, or of any if there is none; None without stacks.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - BYTES))
            lines = file.read().decode("utf-8", "backslashreplace").split("\n")
    except OSError:
        return None
    current: list[Place] = []
    reading = False
    for line in lines:
        if match := _THREAD.match(line):
            reading = match[1] == "Current thread"  # the one that handles a signal of the process is the main thread
            current = [] if reading else current
        elif reading and (match := _FRAME.match(line)):
            current.append(Place(match[1], int(match[2]), match[3]))
    own = [place for place in current if not any(part in place.file for part in NOT_THE_USERS)]
    return next(iter(own or current), None)


def wrote(path: Path) -> bool | None:
    """Whether a rank has written stacks; None if it was not prepared to."""
    with contextlib.suppress(OSError):
        return path.stat().st_size > 0
    return None
