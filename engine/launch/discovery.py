"""Which hosts an elastic job has: those of `-H`, or what a script prints, which is asked once a second.

The script runs in a process of its own, with a deadline, beside whatever the driver does. A thread starts it and waits
for it, and nobody for the thread: the program may be on a file system that stands still, and so may what it reads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from ..host import processes
from .errors import LaunchError
from .gatehouse import Selects
from .hosts import is_here, read_discovered
from .spawn import start_command
from .verdict import describe

EVERY = 1.0  # seconds from one question to the next
DEADLINE = 20.0  # seconds that a script has
MOMENT = 2.0  # seconds that a killed one has to end
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


class _Question:
    """One run of a script, in a thread of its own: whatever it waits for, nobody else does.

    Parameters
    ----------
    command : sequence of str
    slots : int
        Of a host that it names without.
    answered : callable
        Called in the thread when there is an answer, or will be none.

    Attributes
    ----------
    answer : dict of str to int, or None
        None: there is none, or not yet.
    trouble : str
        Why there is none.
    over : bool
        Whether the script has ended.
    """

    def __init__(self, command: Sequence[str], slots: int, answered: Callable[[], None]) -> None:
        self.answer: dict[str, int] | None = None
        self.trouble = ""
        self.over = False
        self._command, self._slots, self._answered = command, slots, answered
        self._process: subprocess.Popen[bytes] | None = None
        self._unwanted = False
        threading.Thread(target=self._ask, name="enginerun-discovery", daemon=True).start()

    def stop(self) -> None:
        """End the script, and what it has started. One that is in an uninterruptible wait ends later."""
        self._unwanted = True
        if self._process is not None:
            processes.send_group(self._process.pid, signal.SIGKILL)

    def who(self) -> str:
        """Name the process, as far as it has begun."""
        return "its program is still being loaded" if self._process is None else f"process {self._process.pid}"

    def _ask(self) -> None:
        try:
            with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
                self._process = self._start(self._command, out.fileno(), err.fileno())
                if self._unwanted:
                    self.stop()
                code = self._process.wait()
                self.stop()  # what it has started
                self._read(code, out.fileno(), err.fileno())
        except OSError as error:
            self.trouble = f"it cannot be started: {error.strerror or error}"
        finally:
            self.over = True
            self._answered()

    def _start(self, command: Sequence[str], out: int, err: int) -> subprocess.Popen[bytes]:
        """Start the script; one without a first line that names its interpreter by the shell, as a shell does."""
        try:
            return start_command(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)
        except OSError as error:
            if error.errno != errno.ENOEXEC or command is not self._command:
                raise
        return self._start(["/bin/sh", shutil.which(command[0]) or command[0], *command[1:]], out, err)

    def _read(self, code: int, out: int, err: int) -> None:
        """Take what it has written as its answer."""
        if os.fstat(out).st_size > ANSWER:
            self.trouble = f"its answer is longer than {ANSWER >> 20} MiB"
            return
        text, errors = (os.pread(file, ANSWER, 0).decode(errors="replace") for file in (out, err))
        said = f"; it said: {' / '.join(errors.split(chr(10))).strip(' /')[-SAID:]}" if errors.strip() else ""
        if code != 0:
            self.trouble = f"{describe(code)}{said}"
            return
        try:
            self.answer = read_discovered(text, self._slots)
        except ValueError as error:
            self.trouble = f"{error}{said}"


class Script:
    """A script of the user's. The first question without an answer ends the job; later ones keep the last answer.

    Parameters
    ----------
    command : sequence of str
    slots : int
        Of a host that it names without.
    selects : Selects
        Returns from its wait when there is an answer.
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
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._lock = threading.Lock()  # over `_wake`, which threads use that may outlive this
        self._selects.hear(self._woken, self._hear)
        self._question: _Question | None = None
        self._held: _Question | None = None  # of which was said that it cannot be ended
        self._late = False  # the question had its time, and the script has not ended yet
        self._since = float("-inf")
        self._answer: dict[str, int] | None = None
        self._new = False
        self._trouble = ""  # of the newest question
        self._told = ""

    def look(self, now: float) -> Mapping[str, int] | None:
        """As of `Discovery`."""
        question = self._question
        if question is not None and question.over:
            self._question = None
            if not self._late:
                self._take(question)
        elif question is not None and now - self._since >= self._deadline:
            self._wait_no_longer(question, now)
        elif question is None and now - self._since >= EVERY:
            self._since, self._late = now, False
            self._question = _Question(self._command, self._slots, self._answered)
        self._tell()
        new, self._new = self._new, False
        return self._answer if new else None

    def close(self) -> None:
        """End a script that runs; nobody waits for one that cannot be ended."""
        if self._question is not None:
            self._question.stop()
            self._question = None
        with self._lock:
            if self._wake >= 0:
                self._selects.forget(self._woken)
                os.close(self._woken)
                os.close(self._wake)
                self._wake = -1

    def _take(self, question: _Question) -> None:
        self._trouble = question.trouble
        if question.answer is not None:
            self._new = question.answer != self._answer
            self._answer = question.answer

    def _wait_no_longer(self, question: _Question, now: float) -> None:
        """End a script whose time is over, and say so if it cannot be ended."""
        if not self._late:
            self._late = True
            question.stop()
            self._trouble = f"it has not answered within {self._deadline:g} s"
        elif self._answer is not None and self._held != question and now - self._since >= self._deadline + MOMENT:
            self._held = question
            self._say(
                f"the host discovery script cannot be killed ({question.who()}): it waits in the kernel, as for a file "
                "system that stands still; it is asked again when it has ended"
            )

    def _tell(self) -> None:
        """Say what has changed with the script."""
        if self._trouble and self._answer is None:
            raise LaunchError(f"--host-discovery-script: {self._command[0]!r} tells no hosts: {self._trouble}")
        if self._trouble and not self._told:
            self._say(f"the host discovery script fails, its last answer counts: {self._trouble}")
        elif self._told and not self._trouble:
            self._say("the host discovery script answers again")
        self._told = self._trouble

    def _answered(self) -> None:
        """Wake whoever looks; called in the thread of a question."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._wake >= 0:
                os.write(self._wake, b".")

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 64)


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
