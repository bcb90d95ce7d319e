"""The launcher's end of an agent: the command that starts it, its channel, and what it said if it did not answer."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence

from ..host import linux, network, processes
from .channel import Channel, ChannelError
from .hosts import Place
from .reach import Reach
from .spawn import start_command
from .verdict import describe

SAID_LINES = 5  # last lines of an agent's stderr that a report shows
SAID_READS = 64  # portions of it that are read for that: something may go on writing
LINE_CHARACTERS = 500
EARLIER = 5.0  # seconds before the end of the time to answer, at which ssh has to be connected
MOMENT = 1.0  # seconds that what carries a channel has to end behind it; other hosts' leases run meanwhile
PATIENCE = 5.0  # seconds that an agent has to end after its channel has been closed
# Between ssh and a host: a host that is gone is noticed after 15 s. What the user gives goes first and counts.
SSH_OPTIONS = ("BatchMode=yes", "StrictHostKeyChecking=accept-new", "ServerAliveInterval=5", "ServerAliveCountMax=3")


def agent_command(place: Place, reach: Reach, seconds: float) -> list[str]:
    """The command that starts the agent of a host.

    Parameters
    ----------
    place : Place
    reach : Reach
    seconds : float
        That the agent has to answer; ssh gives up earlier, so that its reason is known by then.

    Returns
    -------
    list of str
    """
    # -P: a file of the user's in the working directory must not be taken for a module of ours.
    agent = ["-P", "-m", "engine.launch.agent"]
    if place.local:
        return [sys.executable, *agent]
    remote = [*(reach.python or (sys.executable,)), *agent]
    if reach.launch_agent:
        return [*(word.replace("{host}", place.name) for word in reach.launch_agent), *remote]
    options = [*SSH_OPTIONS, f"ConnectTimeout={max(1, int(seconds - EARLIER))}"]
    given = [part for option in options for part in ("-o", option)]
    return ["ssh", *reach.ssh, *given, place.name, shlex.join(remote)]


def _ends_with(launcher: int) -> Callable[[], None]:
    """Have what reaches a host end with the launcher, even while it still tries to; agents here see its end."""

    def prepare() -> None:
        processes.prctl(processes.PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != launcher:
            os._exit(128 + signal.SIGTERM)

    return prepare


class RemoteHost:
    """One host of a job, as the launcher sees it.

    Parameters
    ----------
    number : int
        Of the host.
    place : Place
    command : sequence of str
        Starts the agent.
    tied : bool
        End what reaches the host with the launcher, even while it still tries to. That runs Python between fork and
        exec, and so needs a launcher with one thread. Otherwise a thread starts the command, waits for its end, and
        ends then: nobody else stands still while its program is on a file system that does.

    Attributes
    ----------
    channel : Channel or None
        None if the command could not be started.
    carrier : int
        Readable when the process that carries the channel has ended; -1 if there is none.
    cut_off : bool
        Whether that process has ended while somebody else, as its agent, holds the channel open.
    alive : set of int
        Its ranks that have not ended.
    ready, done : bool
        Whether the agent has told so.
    trouble : str
        Why it cannot take part; empty as long as it can, and while a thread still starts the command.
    ahead : float
        Seconds by which this host's clock is behind the launcher's.
    """

    def __init__(self, number: int, place: Place, command: Sequence[str], tied: bool = True) -> None:
        self.number = number
        self.place = place
        self.command = list(command)
        self.channel: Channel | None = None
        self.errors = -1
        self.carrier = -1
        self.cut_off = False
        self.alive = set(place.ranks)
        self.ready = self.done = False
        self.trouble = ""
        self.ahead = 0.0
        self._said: deque[str] = deque(maxlen=SAID_LINES)
        self._rest = b""
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._unwanted = False  # a process that has not started yet shall end as it does
        self._tied = tied

    @property
    def name(self) -> str:
        """The host, as the user calls it."""
        return self.place.name

    def start(self) -> None:
        """Start the agent; if that is impossible, `trouble` says why, or the channel ends and it does by then."""
        stdin, writing = os.pipe2(os.O_CLOEXEC)
        reading, stdout = os.pipe2(os.O_CLOEXEC)
        self.errors, stderr = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.errors, False)
        self.channel = Channel(reading, writing, greeted=False)
        agents = stdin, stdout, stderr
        if self._tied:
            self._execute(*agents)
            if self._process is None:
                self._close_channel()
                self.channel = None
            else:
                self.carrier = linux.pidfd_open(self._process.pid)
            return
        self.carrier, ended = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(
            target=self._carry, args=(*agents, ended), name=f"enginerun-{self.name}", daemon=True
        )
        self._thread.start()

    def _execute(self, stdin: int, stdout: int, stderr: int) -> None:
        """Start the command, and close these ends of its pipes."""
        try:
            # A session of its own: Ctrl-C in the launcher's terminal must not reach ssh.
            self._process = start_command(
                self.command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=_ends_with(os.getpid()) if self._tied and not self.place.local else None,
            )
        except OSError as error:
            mend = "install an ssh client, or give --launch-agent" if self.command[0] == "ssh" else "check its spelling"
            self.trouble = f"cannot start {self.command[0]!r}: {error.strerror}; {mend}"
        finally:
            for descriptor in (stdin, stdout, stderr):
                os.close(descriptor)

    def _carry(self, stdin: int, stdout: int, stderr: int, ended: int) -> None:
        """Start the command in a thread, and stay until it has ended."""
        try:
            self._execute(stdin, stdout, stderr)
            if self._process is not None:
                if self._unwanted:
                    self._process.kill()
                self._process.wait()
        finally:
            os.close(ended)

    def hear_errors(self) -> list[str]:
        """Take what ssh and the agent wrote to stderr.

        Returns
        -------
        list of str
            Lines that are whole.
        """
        if self.errors < 0:
            return []
        try:
            data = os.read(self.errors, 1 << 16)
        except BlockingIOError:
            return []
        if not data:
            data = b"\n" if self._rest else b""
            os.close(self.errors)
            self.errors = -1
        *whole, self._rest = (self._rest + data).split(b"\n")
        lines = [line.decode(errors="backslashreplace").strip()[:LINE_CHARACTERS] for line in whole if line.strip()]
        self._rest = self._rest[-LINE_CHARACTERS:]
        self._said.extend(lines)
        return lines

    def said(self) -> str:
        """The last that it said, in one line: its stderr, and what came in the place of messages.

        Nothing may listen to `errors` any more: its end is looked for.
        """
        for _ in range(SAID_READS):
            if self.errors < 0 or not self.hear_errors():
                break
        noise = [] if self.channel is None else self.channel.decoder.noise.decode(errors="backslashreplace").split("\n")
        lines = [*(line.strip()[:LINE_CHARACTERS] for line in noise[-SAID_LINES:]), *self._said]
        return " / ".join(line for line in lines if line)

    def account(self) -> str:
        """Why it cannot take part, in one line: what it said, the command that was tried, and what may mend it."""
        said = self.said()
        # What the agent itself has told is the cause; else the end of what ssh said is.
        more = f"; it said: {said}" if said and said not in self.trouble else ""
        mend = ""
        if self.command[0] == "ssh" and network.is_own_name(self.place.address):
            mend = f"; {self.place.address} is this machine: write localhost"
        return f"{self.name}: {self.trouble}{more} (tried: {self.tried()}){mend}"

    def how_it_ended(self) -> str:
        """How the process that carries the channel ended; it gets a moment to."""
        if not self._await_end(MOMENT):
            return "closed its channel"
        if self._process is None:
            return self.trouble
        return f"ended ({describe(self._process.returncode)})"

    def tried(self) -> str:
        """The command, as it can be tried in a shell."""
        return shlex.join(self.command)

    def hang_up(self) -> None:
        """Close the channel to the agent, at which it ends its ranks and itself; end what still tries to reach it."""
        if self.channel is None:
            return
        self.channel.hang_up()
        if not self._answered():
            self._unwanted = True
            if self._process is not None:
                self._process.terminate()

    def give_up(self) -> None:
        """Hang up; a process of this machine is killed, as it may be stopped, and its guardian ends its ranks."""
        self.hang_up()
        if self.place.local and not self.has_ended():
            self._unwanted = True
            if self._process is not None:
                self._process.kill()

    def has_ended(self) -> bool:
        """Whether the process that carried the channel is no more, so that `close` waits for nothing."""
        return self._await_end(0.0)

    def _await_end(self, seconds: float) -> bool:
        """Wait for the end of the process that carries the channel; whether it has come."""
        if self._thread is not None:
            self._thread.join(seconds)
            return not self._thread.is_alive()
        if self._process is not None:
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                return False
        return True

    def _answered(self) -> bool:
        """Whether there is an agent, as far as can be known by now."""
        assert self.channel is not None
        if not self.channel.decoder.greeted and not self.channel.ended:
            with contextlib.suppress(ChannelError):
                for _ in self.channel.receive():
                    pass
        return self.channel.decoder.greeted

    def close(self, patience: float = PATIENCE) -> None:
        """Hang up, wait for the end of the agent, and kill what carried the channel if that does not come.

        Parameters
        ----------
        patience : float
            Seconds to wait.
        """
        self.hang_up()
        if not self._await_end(patience):
            self._unwanted = True
            if self._process is not None:
                processes.send_group(self._process.pid, signal.SIGKILL)
            self._await_end(MOMENT)  # one in an uninterruptible wait ends later, and nobody waits for it
        if self.channel is not None and self.cut_off:
            self.channel.await_end(patience)
        self._close_channel()

    def _close_channel(self) -> None:
        if self.channel is not None:
            self.channel.close()
        for descriptor in (self.errors, self.carrier):
            if descriptor >= 0:
                os.close(descriptor)
        self.errors = self.carrier = -1
