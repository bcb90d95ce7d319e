"""Stacks of a rank's threads, written when it crashes or is asked: its position in the program.

A rank with a directory of its own keeps a file open there. Python's `faulthandler` writes to it from a signal handler
in C, which works even while native code holds the GIL. `enginerun` asks ranks that others blame for standing still,
and reads the file for its report.
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
# Signal that programs rarely use, unlike SIGUSR1 and SIGUSR2.
SIGNAL = signal.SIGRTMIN + 9
CRASHES = (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)  # caught by `faulthandler`
BYTES = 1 << 18  # maximum bytes of a file that are read

_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line ([0-9]{1,9}) in (.*)$')
# Paths of code that is not the user's: this package, the standard library, installed packages, extensions.
NOT_THE_USERS = (
    f"{Path(__file__).parents[1]}{os.sep}",
    f"{os.sep}engine_ext{os.sep}",
    f"{os.sep}lib{os.sep}python3",
    "site-packages",
    "<frozen",
    "<engine",  # functions generated from a table (engine/frameworks/surface.py), under both names of the package
    ".pyx",
)

_file: int | None = None


@dataclass(frozen=True)
class Place:
    """Position in a program: a line of a file."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} in {self.function}"


def enable_stacks(directory: Path | None, rank: int) -> None:
    """Make this process write its stacks when it crashes and on `SIGNAL`; further calls do nothing.

    Handlers of the program stay: a `faulthandler` that it has enabled, and any handler of that signal. The file is
    created only if the launcher has created `rank.N` in the job's directory.
    """
    global _file
    if _file is not None or directory is None:
        return
    try:
        _file = private_files.open_file(directory / f"rank.{rank}" / NAME, os.O_APPEND)
    except OSError:
        return  # missing or not writable: other records report that if there is a failure
    if not faulthandler.is_enabled():
        faulthandler.enable(_file)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(SIGNAL) == signal.SIG_DFL:
        # SIG_IGN stays below: the interpreter removes the handler at its end, and a request then must not kill it.
        signal.signal(SIGNAL, signal.SIG_IGN)
        faulthandler.register(SIGNAL, _file)


def find_position(path: Path) -> Place | None:
    """Find the position of a rank's main thread when it last wrote its stacks into a file; None without stacks.

    It is the innermost line of the user's own code, or of any code if there is none.
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
            reading = match[1] == "Current thread"  # the main thread, because it handles the process's signals
            current = [] if reading else current
        elif reading and (match := _FRAME.match(line)):
            current.append(Place(match[1], int(match[2]), match[3]))
    own = [place for place in current if not any(part in place.file for part in NOT_THE_USERS)]
    return next(iter(own or current), None)


def has_stacks(path: Path) -> bool | None:
    """Return whether a rank has written stacks; None if it was not prepared to."""
    with contextlib.suppress(OSError):
        return path.stat().st_size > 0
    return None
