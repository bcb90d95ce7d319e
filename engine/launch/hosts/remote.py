"""The launcher's end of an agent: the command that starts it, its channel, and its output if it does not answer."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence

from ...host import linux, network, processes
from ...host.sockets import wait_readable
from ..process.rank_end import describe_code
from ..process.spawn import start_command
from .channel import Channel, ChannelError
from .host_list import HostRanks
from .reach import Reach

SAID_LINES = 5  # last lines of an agent's stderr that a report shows
SAID_READS = 64  # most reads of stderr for that: a process may go on writing
LINE_CHARACTERS = 500
EARLIER = 5.0  # seconds before the agent's deadline at which ssh must be connected
MOMENT = 1.0  # seconds in which the carrier process must end after its channel; other hosts' leases run meanwhile
PATIENCE = 5.0  # seconds in which an agent must end after its channel was closed
# ssh notices a dead host after 15 s. The user's options precede these, and so override them.
SSH_OPTIONS = ("BatchMode=yes", "StrictHostKeyChecking=accept-new", "ServerAliveInterval=5", "ServerAliveCountMax=3")


def agent_command(place: HostRanks, reach: Reach, seconds: float) -> list[str]:
    """Return the command that starts the agent of a host, which must answer within `seconds`.

    ssh gives up earlier, so that its reason is known by then.
    """
    # -P: a file of the user's in the working directory must not hide one of the engine's modules.
    agent = ["-P", "-m", "engine.launch.agent"]
    if place.local:
        return [sys.executable, *agent]
    remote = [*(reach.python or (sys.executable,)), *agent]
    if reach.launch_agent:
        return [*(word.replace("{host}", place.name) for word in reach.launch_agent), *remote]
    options = [*SSH_OPTIONS, f"ConnectTimeout={max(1, int(seconds - EARLIER))}"]
    given = [part for option in options for part in ("-o", option)]
    return ["ssh", *reach.ssh, *given, place.name, shlex.join(remote)]


class RemoteHost:
    """The launcher's state of one host of a job, and of its agent.

    The carrier is the process that the command starts and that carries the channel: ssh, or a local agent itself. If it
    is `tied`, it ends with the launcher, even while it still connects. That runs Python between fork and exec, and so
    needs a launcher with one thread. Otherwise a thread starts the command and waits for its end, so that nothing else
    blocks if the program's file system hangs.
    """

    def __init__(self, number: int, place: HostRanks, command: Sequence[str], tied: bool = True) -> None:
        self.number = number
        self.place = place
        self.command = list(command)
        self.channel: Channel | None = None  # None if the command could not be started
        self.errors = -1
        self.carrier = -1  # descriptor that is readable when the carrier has ended; -1 if there is none
        # Whether the carrier has ended while another process, such as the agent, holds the channel open
        self.cut_off = False
        self.alive = set(place.ranks)  # ranks of the host that have not ended
        self.ready = self.done = False  # whether the agent has sent this message
        self.trouble = ""  # why the host cannot take part; empty while it can, or a thread still starts the command
        self.ahead = 0.0  # seconds by which this host's clock is behind the launcher's
        self._said: deque[str] = deque(maxlen=SAID_LINES)
        self._rest = b""
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._unwanted = False  # whether a process that is still being started must end at once
        self._tied = tied

    @property
    def name(self) -> str:
        """Name of the host, as the user gave it."""
        return self.place.name

    def start(self) -> None:
        """Start the agent. If that fails, `trouble` says why, at once or, with a thread, when the channel has ended."""
        stdin, writing = os.pipe2(os.O_CLOEXEC)
        reading, stdout = os.pipe2(os.O_CLOEXEC)
        self.errors, stderr = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.errors, False)
        self.channel = Channel(reading, writing, greeted=False)
        agents = stdin, stdout, stderr
        if self._tied:
            self._start_command(*agents)
            if self._process is None:
                self._close_channel()
                self.channel = None
            else:
                self.carrier = linux.pidfd_open(self._process.pid)
            return
        self.carrier, ended = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(
            target=self._run_carrier, args=(*agents, ended), name=f"enginerun-{self.name}", daemon=True
        )
        self._thread.start()

    def _start_command(self, stdin: int, stdout: int, stderr: int) -> None:
        """Start the command, and close the launcher's copies of its descriptors."""
        # ssh ends with the launcher, even while it connects; agents on this host notice the launcher's end themselves.
        tied = functools.partial(processes.die_with, os.getpid(), signal.SIGTERM)
        try:
            # In a session of its own, Ctrl-C in the launcher's terminal does not reach ssh.
            self._process = start_command(
                self.command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=tied if self._tied and not self.place.local else None,
            )
        except OSError as error:
            mend = "install an ssh client, or give --launch-agent" if self.command[0] == "ssh" else "check its spelling"
            self.trouble = f"cannot start {self.command[0]!r}: {error.strerror}; {mend}"
        finally:
            for descriptor in (stdin, stdout, stderr):
                os.close(descriptor)

    def _run_carrier(self, stdin: int, stdout: int, stderr: int, ended: int) -> None:
        """Start the command and wait for its end; runs in a thread."""
        try:
            self._start_command(stdin, stdout, stderr)
            if self._process is not None:
                if self._unwanted:
                    self._process.kill()
                self._process.wait()
        finally:
            os.close(ended)

    def hear_errors(self) -> list[str]:
        """Read the stderr of ssh and the agent, and return the complete lines."""
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

    def last_output(self) -> str:
        """Return the host's last output in one line: its stderr, and other text on the channel than messages.

        The caller must have unregistered `errors` from selectors, since it is read here and may be closed.
        """
        self._drain_errors()
        noise = [] if self.channel is None else self.channel.decoder.noise.decode(errors="backslashreplace").split("\n")
        lines = [*(line.strip()[:LINE_CHARACTERS] for line in noise[-SAID_LINES:]), *self._said]
        return " / ".join(line for line in lines if line)

    def _drain_errors(self) -> None:
        """Read what stderr holds now, within limits."""
        for _ in range(SAID_READS):
            if self.errors < 0 or not wait_readable([self.errors], 0.0):
                break
            self.hear_errors()

    def describe_trouble(self) -> str:
        """Return one line on why it cannot take part: its output, the command that was tried, and what may mend it."""
        said = self.last_output()
        # The agent's own message is the cause, if there is one; else the last output of ssh is.
        more = f"; it said: {said}" if said and said not in self.trouble else ""
        mend = ""
        if self.command[0] == "ssh" and network.is_own_name(self.place.address):
            mend = f"; {self.place.address} is this machine: write localhost"
        return f"{self.name}: {self.trouble}{more} (tried: {self.format_command()}){mend}"

    def how_it_ended(self) -> str:
        """Return a text on how the carrier ended, after waiting up to `MOMENT` seconds for that."""
        if not self._await_end(MOMENT):
            return "closed its channel"
        if self._process is None:
            return self.trouble
        return f"ended ({describe_code(self._process.returncode)})"

    def format_command(self) -> str:
        """Return the command as it can be tried in a shell."""
        return shlex.join(self.command)

    def hang_up(self) -> None:
        """Close the channel, so that the agent ends its ranks and itself; terminate a carrier that still connects."""
        if self.channel is None:
            return
        self.channel.hang_up()
        if not self._has_answered():
            self._unwanted = True
            if self._process is not None:
                self._process.terminate()

    def give_up(self) -> None:
        """Hang up, and kill a local agent, which may be stopped; its guardian then kills its ranks."""
        self.hang_up()
        if self.place.local and not self.has_ended():
            self._unwanted = True
            if self._process is not None:
                self._process.kill()

    def has_ended(self) -> bool:
        """Return whether the carrier has ended, so that `close` does not wait."""
        return self._await_end(0.0)

    def _await_end(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end of the carrier, and return whether it has ended."""
        if self._thread is not None:
            self._thread.join(seconds)
            return not self._thread.is_alive()
        if self._process is not None:
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                return False
        return True

    def _has_answered(self) -> bool:
        """Return whether the agent's greeting has come by now."""
        assert self.channel is not None
        if not self.channel.decoder.greeted and not self.channel.ended:
            with contextlib.suppress(ChannelError):
                for _ in self.channel.receive():
                    pass
        return self.channel.decoder.greeted

    def close(self, patience: float = PATIENCE) -> None:
        """Hang up, wait `patience` seconds for the end of the carrier, and kill it if it does not end in time."""
        self.hang_up()
        if not self._await_end(patience):
            self._unwanted = True
            if self._process is not None:
                processes.send_group(self._process.pid, signal.SIGKILL)
            self._await_end(MOMENT)  # one in an uninterruptible wait ends later, and is not waited for
        if self.channel is not None and self.cut_off:
            self.channel.await_end(patience)
        self._close_channel()

    def _close_channel(self) -> None:
        self._drain_errors()  # the loop may have been told of the end before it read the last lines
        if self.channel is not None:
            self.channel.close()
        for descriptor in (self.errors, self.carrier):
            if descriptor >= 0:
                os.close(descriptor)
        self.errors = self.carrier = -1
