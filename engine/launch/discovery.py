"""Which hosts an elastic job has: those of `-H`, or what a script prints, which is asked once a second.

The script runs in a process of its own, with a deadline, beside whatever the driver does: nobody waits for it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from ..host import linux, processes
from .errors import LaunchError
from .gatehouse import Selects
from .hosts import is_here, read_discovered
from .verdict import describe

EVERY = 1.0  # seconds from one question to the next
DEADLINE = 20.0  # seconds that a script has
ANSWER = 1 << 20  # bytes of an answer
SAID = 500  # characters of what it wrote to stderr that are shown


class Discovery(Protocol):
    """Tells which hosts there are."""

    def look(self, now: float) -> Mapping[str, int] | None:
        """The slots of each host, if there is a new answer. Does not block.

        Raises
        ------
        LaunchError
            There is no answer, and there was none before.
        """
        ...

    def close(self) -> None: ...


class Fixed:
    """The hosts of `-H`, which are told once.

    Parameters
    ----------
    hosts : mapping of str to int
    """

    def __init__(self, hosts: Mapping[str, int]) -> None:
        self._hosts: Mapping[str, int] | None = hosts

    def look(self, now: float) -> Mapping[str, int] | None:
        """As of `Discovery`."""
        hosts, self._hosts = self._hosts, None
        return hosts

    def close(self) -> None:
        """Nothing is open."""


class Script:
    """A script of the user's. The first question without an answer ends the job; later ones keep the last answer.

    Parameters
    ----------
    command : sequence of str
    slots : int
        Of a host that it names without.
    selects : Selects
    say : callable
        Shows a line.
    deadline : float
        Seconds that it has.
    """

    def __init__(
        self,
        command: Sequence[str],
        slots: int,
        selects: Selects,
        say: Callable[[str], None],
        deadline: float = DEADLINE,
    ) -> None:
        self._command = list(command)
        self._slots = slots
        self._selects = selects
        self._say = say
        self._deadline = deadline
        self._process: subprocess.Popen[bytes] | None = None
        self._ending: subprocess.Popen[bytes] | None = None  # was killed, and has not ended yet
        self._pidfd = -1
        self._since = float("-inf")
        self._answer: dict[str, int] | None = None
        self._new = False
        self._trouble = ""  # of the newest question
        self._told = ""

    def look(self, now: float) -> Mapping[str, int] | None:
        """As of `Discovery`."""
        if self._ending is not None and self._ending.poll() is not None:
            self._ending = None
        if self._process is None and self._ending is None and now - self._since >= EVERY:
            self._since = now
            self._ask()
        elif self._process is not None and now - self._since >= self._deadline:
            self._stop()
            self._failed(f"it has not answered within {self._deadline:g} s")
        if self._trouble and self._answer is None:
            raise LaunchError(f"--host-discovery-script: {self._command[0]!r} tells no hosts: {self._trouble}")
        if self._trouble and not self._told:
            self._say(f"the host discovery script fails, its last answer counts: {self._trouble}")
        elif self._told and not self._trouble:
            self._say("the host discovery script answers again")
        self._told = self._trouble
        new, self._new = self._new, False
        return self._answer if new else None

    def close(self) -> None:
        """End a script that runs."""
        if self._process is not None:
            self._stop()

    def _ask(self) -> None:
        try:
            with contextlib.ExitStack() as opened:
                self._out = opened.enter_context(tempfile.TemporaryFile())
                self._err = opened.enter_context(tempfile.TemporaryFile())
                self._process = self._start(self._command)
                opened.pop_all()  # they live until the answer has been read
        except OSError as error:
            self._failed(f"it cannot be started: {error.strerror or error}")
            return
        try:
            self._pidfd = linux.pidfd_open(self._process.pid)
        except OSError as error:
            self._stop()
            self._failed(f"it cannot be watched: {linux.refusal('pidfd_open', error)}")
            return
        self._selects.hear(self._pidfd, self._ended)

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start the script; one without a first line that names its interpreter by the shell, as a shell does."""
        try:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._err, start_new_session=True
            )
        except OSError as error:
            if error.errno != errno.ENOEXEC or command is not self._command:
                raise
        return self._start(["/bin/sh", shutil.which(command[0]) or command[0], *command[1:]])

    def _ended(self) -> None:
        """It has ended, and what it has written is its answer."""
        assert self._process is not None
        code = self._process.poll()
        if code is None:  # its threads still end, or whoever traces it holds it
            self._stop()
            self._failed("it has ended, and the system does not say how")
            return
        if os.fstat(self._out.fileno()).st_size > ANSWER:
            self._stop()
            self._failed(f"its answer is longer than {ANSWER >> 20} MiB")
            return
        out, err = (os.pread(file.fileno(), ANSWER, 0).decode(errors="replace") for file in (self._out, self._err))
        self._stop()
        said = f"; it said: {' / '.join(err.split(chr(10))).strip(' /')[-SAID:]}" if err.strip() else ""
        if code != 0:
            self._failed(f"{describe(code)}{said}")
            return
        try:
            answer = read_discovered(out, self._slots)
        except ValueError as error:
            self._failed(f"{error}{said}")
            return
        self._trouble = ""
        self._new = answer != self._answer
        self._answer = answer

    def _stop(self) -> None:
        """End it, and what it has started. One that is in an uninterruptible wait ends later: nobody waits for it."""
        assert self._process is not None
        processes.send_group(self._process.pid, signal.SIGKILL)
        if self._process.poll() is None:
            self._ending = self._process
        self._process = None
        if self._pidfd >= 0:
            self._selects.forget(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._out.close()
        self._err.close()

    def _failed(self, trouble: str) -> None:
        self._trouble = trouble


class Names:
    """Makes one host of all names of this machine: the first that was told stands for the others.

    Parameters
    ----------
    names : collection of str or None
        As of `lay_out`.
    """

    def __init__(self, names: Collection[str] | None) -> None:
        self._names = names
        self._here: str | None = None

    def is_here(self, name: str) -> bool:
        """Whether a host is this machine."""
        return self._names is not None and is_here(name, self._names)

    def merge(self, hosts: Mapping[str, int]) -> dict[str, int]:
        """The slots of each host, under the name by which it is known."""
        merged: dict[str, int] = {}
        for name, slots in hosts.items():
            if self.is_here(name):
                self._here = name = self._here or name
            merged[name] = merged.get(name, 0) + slots
        return merged


def changes(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Say how the hosts have changed; empty if they have not."""
    said = [f"{name} is new, with {_slots(slots)}" for name, slots in after.items() if name not in before]
    said += [f"{name} is gone" for name in before if name not in after]
    said += [
        f"{name} has {_slots(slots)} instead of {before[name]}"
        for name, slots in after.items()
        if name in before and before[name] != slots
    ]
    return "; ".join(said)


def _slots(number: int) -> str:
    return f"{number} slot{'s' * (number != 1)}"
