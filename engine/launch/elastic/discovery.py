"""Discovery of an elastic job's hosts: those of `-H`, or the output of a script that runs once a second.

The script runs in a child process with a deadline, while the driver goes on. A thread starts it and waits for it.
Nobody waits for the thread, because the script's program or its input may be on a file system that hangs.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from ...host import processes
from ...text.readable import format_count
from ..errors import LaunchError
from ..hosts.host_list import is_here, read_discovered
from ..process.rank_end import describe_code
from ..process.reader_loop import ReaderLoop
from ..process.spawn import start_command

EVERY = 1.0  # least seconds between the starts of two runs
DEADLINE = 20.0  # seconds that a run may take
MOMENT = 2.0  # seconds in which a killed script must end
ANSWER = 1 << 20  # largest size of the output in bytes
SAID = 500  # characters of its stderr that are shown


class Discovery(Protocol):
    """Source of an elastic job's hosts."""

    def poll_hosts(self, now: float) -> Mapping[str, int] | None:
        """Return the slots of each host if they have changed, else None. Does not block.

        A `LaunchError` is raised if discovery failed, and there is no earlier answer.
        """
        ...

    def close(self) -> None: ...


class Fixed:
    """The hosts of `-H`, which `poll_hosts` returns once."""

    def __init__(self, hosts: Mapping[str, int]) -> None:
        self._hosts: Mapping[str, int] | None = hosts

    def poll_hosts(self, now: float) -> Mapping[str, int] | None:
        """Same as in `Discovery`."""
        hosts, self._hosts = self._hosts, None
        return hosts

    def close(self) -> None:
        """Do nothing: no resource is open."""


class _Question:
    """One run of a script, in a thread of its own, so that nothing else waits for it.

    A host that the script names without a number has `slots` slots. `answered` is called in the thread when the run is
    over, with or without an answer.
    """

    def __init__(self, command: Sequence[str], slots: int, answered: Callable[[], None]) -> None:
        self.answer: dict[str, int] | None = None  # slots of each host; None: no answer, or not yet
        self.trouble = ""  # why there is no answer
        self.over = False  # whether the script has ended
        self._command, self._slots, self._answered = command, slots, answered
        self._process: subprocess.Popen[bytes] | None = None
        self._unwanted = False
        threading.Thread(target=self._run_script, name="enginerun-discovery", daemon=True).start()

    def stop(self) -> None:
        """Kill the script and its child processes. A process in an uninterruptible wait ends later."""
        self._unwanted = True
        if self._process is not None:
            processes.send_group(self._process.pid, signal.SIGKILL)

    def name_process(self) -> str:
        """Return a text that names the process, or says that it is still being loaded."""
        return "its program is still being loaded" if self._process is None else f"process {self._process.pid}"

    def _run_script(self) -> None:
        try:
            with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
                self._process = self._start(self._command, out.fileno(), err.fileno())
                if self._unwanted:
                    self.stop()
                code = self._process.wait()
                self.stop()  # its child processes
                self._read(code, out.fileno(), err.fileno())
        except OSError as error:
            self.trouble = f"it cannot be started: {error.strerror or error}"
        finally:
            self.over = True
            self._answered()

    def _start(self, command: Sequence[str], out: int, err: int) -> subprocess.Popen[bytes]:
        """Start the script; run one without an interpreter line by /bin/sh, as a shell does."""
        try:
            return start_command(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)
        except OSError as error:
            if error.errno != errno.ENOEXEC or command is not self._command:
                raise
        return self._start(["/bin/sh", shutil.which(command[0]) or command[0], *command[1:]], out, err)

    def _read(self, code: int, out: int, err: int) -> None:
        """Parse the script's output into `answer`, or set `trouble`."""
        if os.fstat(out).st_size > ANSWER:
            self.trouble = f"its answer is longer than {ANSWER >> 20} MiB"
            return
        text, errors = (os.pread(file, ANSWER, 0).decode(errors="replace") for file in (out, err))
        said = f"; it said: {' / '.join(errors.split(chr(10))).strip(' /')[-SAID:]}" if errors.strip() else ""
        if code != 0:
            self.trouble = f"{describe_code(code)}{said}"
            return
        try:
            self.answer = read_discovered(text, self._slots)
        except ValueError as error:
            self.trouble = f"{error}{said}"


class Script:
    """The user's discovery script.

    If its first run fails, the job ends; if later ones fail, the last answer is kept.
    """

    def __init__(
        self,
        command: Sequence[str],
        slots: int,
        loop: ReaderLoop,
        say: Callable[[str], None],
        deadline: float = DEADLINE,
    ) -> None:
        self._command = list(command)
        self._slots = slots  # slots of a host that the script names without a number
        self._loop = loop  # woken when there is an answer, so that its owner calls `poll_hosts`
        self._say = say  # shows a line
        self._deadline = deadline  # seconds that a run may take
        self._question: _Question | None = None
        self._held: _Question | None = None  # the run of which it was reported that it cannot be killed
        self._late = False  # whether the current run has exceeded its deadline
        self._since = float("-inf")
        self._answer: dict[str, int] | None = None
        self._new = False
        self._trouble = ""  # that of the latest run
        self._told = ""

    def poll_hosts(self, now: float) -> Mapping[str, int] | None:
        """Same as in `Discovery`."""
        question = self._question
        if question is not None and question.over:
            self._question = None
            if not self._late:
                self._take_answer(question)
        elif question is not None and now - self._since >= self._deadline:
            self._wait_no_longer(question, now)
        elif question is None and now - self._since >= EVERY:
            self._since, self._late = now, False
            self._question = _Question(self._command, self._slots, lambda: self._loop.wake(lambda: None))
        self._report_trouble()
        new, self._new = self._new, False
        return self._answer if new else None

    def close(self) -> None:
        """Kill a script that runs, without waiting for its end."""
        if self._question is not None:
            self._question.stop()
            self._question = None

    def _take_answer(self, question: _Question) -> None:
        self._trouble = question.trouble
        if question.answer is not None:
            self._new = question.answer != self._answer
            self._answer = question.answer

    def _wait_no_longer(self, question: _Question, now: float) -> None:
        """Kill a script that has exceeded its deadline, and report once if it does not end."""
        if not self._late:
            self._late = True
            question.stop()
            self._trouble = f"it has not answered within {self._deadline:g} s"
        elif self._answer is not None and self._held != question and now - self._since >= self._deadline + MOMENT:
            self._held = question
            self._say(
                f"the host discovery script cannot be killed ({question.name_process()}): it waits in the kernel, as "
                "for a file system that stands still; it is asked again when it has ended"
            )

    def _report_trouble(self) -> None:
        """Report that the script begins to fail or works again; raise a `LaunchError` if there is no answer at all."""
        if self._trouble and self._answer is None:
            raise LaunchError(f"--host-discovery-script: {self._command[0]!r} tells no hosts: {self._trouble}")
        if self._trouble and not self._told:
            self._say(f"the host discovery script fails, its last answer counts: {self._trouble}")
        elif self._told and not self._trouble:
            self._say("the host discovery script answers again")
        self._told = self._trouble


class Names:
    """Unification of this machine's names: the first one that was used replaces the others.

    `names` are those of `host_list.lay_out`.
    """

    def __init__(self, names: Collection[str] | None) -> None:
        self._names = names
        self._here: str | None = None

    def is_here(self, name: str) -> bool:
        """Return whether a host is this machine."""
        return self._names is not None and is_here(name, self._names)

    def merge(self, hosts: Mapping[str, int]) -> dict[str, int]:
        """Return the slots of each host, with all names of this machine merged into one."""
        merged: dict[str, int] = {}
        for name, slots in hosts.items():
            if self.is_here(name):
                self._here = name = self._here or name
            merged[name] = merged.get(name, 0) + slots
        return merged


def describe_changes(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Return a text on how the hosts have changed; empty if they have not."""
    said = [f"{name} is new, with {format_count(slots, 'slot')}" for name, slots in after.items() if name not in before]
    said += [f"{name} is gone" for name in before if name not in after]
    said += [
        f"{name} has {format_count(slots, 'slot')} instead of {before[name]}"
        for name, slots in after.items()
        if name in before and before[name] != slots
    ]
    return "; ".join(said)
