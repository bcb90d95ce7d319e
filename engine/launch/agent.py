"""The agent of a host, `python -m engine.launch.agent`: it starts the ranks of its host and watches them.

The launcher starts one agent on each host of a job, by ssh or by a command of the user's. They exchange messages over
the agent's standard input and output (`channel`). If that channel ends, for whatever reason, the agent kills its ranks.
It starts, watches and ends ranks as the launcher does on one host (`spawn`, `supervisor`). It sends their output, exit
codes, reports and files to the launcher.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..host import linux, machine, network, processes
from ..host.signals import caught
from ..metrics import page
from .errors import LaunchError
from .hosts import remote_files
from .hosts.channel import GREETING, Channel, ChannelError, Message
from .hosts.page_copies import Pages
from .hosts.reach import network_of
from .process import spawn
from .process.cpu_binding import Allotment, allot
from .process.devices import devices_here, share_devices
from .process.guardian import Guardian
from .process.output import Stream
from .process.plan import Crew, Job, RankPlan, plan, without_places
from .process.spawn import Rank
from .process.supervisor import ENDING_SIGNALS, PASSED_SIGNALS, SIGNALS, Supervisor
from .report.failure_cause import End

# Variables of the host or the session: ranks get the agent's values of these, not the launcher's.
OF_THE_HOST = ("HOSTNAME", "LOGNAME", "USER", "HOME", "SHELL", "MAIL", "DISPLAY", "XAUTHORITY")
OF_THE_SESSION = ("SSH_", "XDG_", "DBUS_")


class Agent:
    """Manager of the ranks of this host.

    Parameters
    ----------
    channel : Channel
        Channel to the launcher.
    order : Message
        The launcher's message `prepare`: the job, and the numbers of this host's ranks.
    """

    def __init__(self, channel: Channel, order: Message) -> None:
        head = order.head
        self.channel = channel
        self.job = Job(**head["job"] | {"directory": Path(head["job"]["directory"])})
        self.crew = Crew(
            order.number("host"), tuple(order.numbers("sizes")), tuple(order.numbers("ranks")), head["name"]
        )
        self.head = head
        self.grace = order.seconds("grace", 0)
        self.command = [str(word) for word in head["command"]]
        self.hub: socket.socket | None = None
        self.pages: dict[int, int] = {}
        self.copies = Pages(self.pages)
        self.files = remote_files.Directory(self.job.directory, self.job.name, self.crew.ranks)
        self._supervisor: Supervisor | None = None

    def prepare(self) -> None:
        """Check that the ranks can be started, and report `ready` to the launcher, before any rank of the job starts.

        Raises
        ------
        LaunchError
            They cannot be started; the text says how to mend it.
        """
        if not processes.visible():
            raise LaunchError(
                "/proc does not show the processes of the agent: mount it, with that of its PID namespace"
            )
        try:
            os.chdir(self.head["cwd"])
        except OSError as error:
            raise LaunchError(
                f"no working directory {self.head['cwd']!r} ({error.strerror}): make it, or name another one with "
                "--remote-directory"
            ) from error
        self.environment = _environment(self.head["environment"])
        if self.head["python"]:
            self._prefer_own_python(self.head["python"])
        self.program = spawn.find_command(self.command, self.environment)
        address = self._choose_interface()
        self.allotment = self._allot()
        if self.job.gpus is not None:
            visible = devices_here(self.environment.get("CUDA_VISIBLE_DEVICES"))
            devices = share_devices(*self.job.gpus, len(self.crew.ranks), visible)
            self.job = replace(self.job, devices=devices)
        self.files.make()
        if self.head["counted"]:
            self._make_pages()
        if self.head["hub"]:
            self.hub = _listen(address)
        self.channel.send(
            "ready",
            hub=self.hub.getsockname()[1] if self.hub else 0,
            port=spawn.find_port(""),
            address=address,
            summary=self.allotment.summary,
            processors=machine.facts().usable,
            **self._facts(),
        )

    def run(self, head: dict[str, Any]) -> None:
        """Start the ranks, and return when no process of theirs is left.

        Parameters
        ----------
        head : dict
            Fields of the job that are known once all hosts are ready: `hub`, `address`, `port`.
        """
        self.job = replace(self.job, **head, counters=[f"/proc/{os.getpid()}/fd/{self.pages[r]}" for r in self.pages])
        descriptors = spawn.raise_descriptor_limit(len(self.crew.ranks))
        self.files.settle()
        guardian = Guardian(self.job.name, lambda: None, str(self.crew.host))
        processes.prctl(processes.PR_SET_CHILD_SUBREAPER, 1)
        with caught(SIGNALS, lambda *_: None) as wakeup:
            supervisor = Supervisor(guardian, wakeup, (self.channel.out,), self.grace, self._say, self._ended)
            supervisor.hold()
            supervisor.add_reader(self.channel.reading, self._hear)
            self._supervisor = supervisor
            try:
                for rank_plan in plan(self.job, self.allotment, self.environment, self.crew):
                    self._start(supervisor, rank_plan, descriptors)
            except LaunchError as error:
                self.channel.send("failed", text=str(error))
                supervisor.release()
                supervisor.abandon()
            else:
                self._hear()  # messages that came together with `start`
                supervisor.run()
        guardian.dismiss()
        self.copies.send(self.channel)

    def finish(self) -> None:
        """Send the ranks' files to the launcher, then `done`; remove the files once the launcher closes the channel."""
        if not self.channel.out.broken:
            self.files.send(self.channel)
            self.channel.send("done")
            self.channel.out.drain()
        for _ in self.channel.messages():  # until the launcher hangs up: other agents may use the directory till then
            pass
        self.files.remove()

    def _start(self, supervisor: Supervisor, rank_plan: RankPlan, descriptors: tuple[int, int]) -> None:
        inherited: list[int] = []
        if self.hub is not None and rank_plan.rank == 0:
            inherited.append(self.hub.fileno())
            rank_plan.environment["ENGINE_HUB_FD"] = str(self.hub.fileno())
        rank = spawn.start(rank_plan, self.command, self.program, descriptors, inherited)
        if inherited and self.hub is not None:
            self.hub.close()  # only rank 0 holds it, so that it closes when rank 0 ends
        supervisor.add(rank)
        for name, pipe in (("stdout", rank.stdout), ("stderr", rank.stderr)):
            supervisor.listen(Stream(rank.number, pipe, Relay(self.channel, name, rank=rank.number)))
        self.channel.send("started", rank=rank.number, pid=rank.pid, cpus=rank_plan.cpus)

    def _ended(self, rank: Rank, end: End) -> None:
        """Send the launcher a rank's exit code, the age of its end in seconds, and its exit report."""
        now = time.time()
        told = {
            "rank": rank.number,
            "code": end.code,
            "by_launcher": end.by_launcher,
            "age": now - end.time,
            "now": now,
        }
        self.channel.send("end", end.report.data(), **told)

    def _say(self, line: str) -> None:
        self.channel.send("say", line=line)

    def _hear(self) -> None:
        """Handle the launcher's messages; at the end of the channel, kill the ranks."""
        assert self._supervisor is not None
        supervisor, descriptor = self._supervisor, self.channel.reading
        for message in self.channel.receive():
            if message.kind == "end":
                supervisor.end(str(message.head["why"]))
            elif message.kind == "signal" and message.number("number") in (*ENDING_SIGNALS, *PASSED_SIGNALS):
                signal.raise_signal(message.number("number"))
            elif message.kind == "where":
                supervisor.ask_where(message.number("rank"))
            elif message.kind == "pages":
                self.copies.send(self.channel)
            elif message.kind in ("hold", "go_on"):
                supervisor.hold_back(message.kind == "hold")
            elif message.kind == "finish":
                supervisor.release()
            else:
                raise ChannelError(f"the launcher asks for {message.kind!r}, which this agent does not know")
        if self.channel.ended:
            supervisor.forget(descriptor)
            self.channel.out.give_up()
            supervisor.release()
            supervisor.kill()

    def _prefer_own_python(self, launchers: str) -> None:
        """Make ranks run with the Python that runs this agent, which the user has chosen for this host.

        Parameters
        ----------
        launchers : str
            Path of the launcher's Python, which is replaced if the command begins with it.
        """
        path = self.environment.get("PATH", os.defpath)
        self.environment["PATH"] = f"{os.path.dirname(sys.executable)}{os.pathsep}{path}"
        if self.command[0] == launchers:
            self.command[0] = sys.executable

    def _choose_interface(self) -> str:
        """Return the address of the first interface here that the user named; empty if none was named."""
        if not self.job.interface:
            return ""
        name, address = network_of(self.job.interface)
        self.job = replace(self.job, interface=name)
        return address

    def _facts(self) -> dict[str, str]:
        """Return further fields of the message `ready`."""
        return {}

    def _allot(self) -> Allotment:
        return allot(
            machine.facts(),
            len(self.crew.ranks),
            self.environment,
            binding=self.head["binding"],
            cpus_per_rank=self.head["cpus_per_rank"],
        )

    def _make_pages(self) -> None:
        try:
            for rank in self.crew.ranks:
                self.pages[rank] = page.make()
        except OSError as error:
            raise LaunchError(f"there is no memory for counters: {linux.refusal('memfd_create', error)}") from error


class Relay:
    """Sink of a rank's stream that sends the output to the launcher as it comes.

    Parameters
    ----------
    channel : Channel
    name : str
        Name of the stream.
    **who
        Field of the messages that names the rank, or the worker.
    """

    def __init__(self, channel: Channel, name: str, **who: int) -> None:
        self._channel = channel
        self._head: dict[str, Any] = {**who, "stream": name}

    def take(self, data: bytes) -> None:
        self._channel.send("output", data, **self._head)

    def flush(self) -> None:
        """Do nothing: the launcher shows the unfinished line when it learns of the rank's end."""

    def close(self) -> None:
        """Do nothing: the launcher closes the file."""


def _environment(sent: dict[str, str]) -> dict[str, str]:
    """Return the agent's environment, overridden by the launcher's variables except those of host and session."""
    own = without_places(os.environ)
    job = {name: value for name, value in sent.items() if not _of_this_host(name)}
    return own | job


def _of_this_host(name: str) -> bool:
    return name in OF_THE_HOST or name.startswith(OF_THE_SESSION)


def _listen(address: str) -> socket.socket:
    """Open the socket on which rank 0 listens, on `address`, or on all addresses if that is empty."""
    try:
        return network.listen(address or None, 0, backlog=256)
    except OSError as error:
        raise LaunchError(f"no socket for the other hosts can be opened: {error.strerror}") from error


def _agent(channel: Channel, order: Message) -> Agent:
    if "slots" not in order.head:
        return Agent(channel, order)
    from .elastic_agent import ElasticAgent

    return ElasticAgent(channel, order)


def serve(channel: Channel) -> int:
    """Serve the launcher until the job ends.

    Parameters
    ----------
    channel : Channel

    Returns
    -------
    int
        Exit code: 1 if the launcher has gone before it received everything.
    """
    agent: Agent | None = None
    try:
        for message in channel.messages():
            if message.kind == "examine":
                from .cli.doctor import examine  # a slow import, not needed for jobs

                examine(channel, message)
            elif message.kind == "witness":
                from .hosts.dead_workers import confirm_dead_workers

                confirm_dead_workers(channel, message)
                break
            elif message.kind == "prepare":
                agent = _agent(channel, message)
                agent.prepare()
            elif message.kind == "file" and agent is not None:
                agent.files.take(message)
            elif message.kind == "start" and agent is not None:
                agent.run(message.head)
                agent.finish()
                break
            else:
                raise ChannelError(f"the launcher asks for {message.kind!r} out of turn")
    except LaunchError as error:
        channel.send("failed", text=str(error))
        channel.out.drain()
        for _ in channel.messages():  # until the launcher hangs up
            pass
    finally:
        if agent is not None:
            agent.files.remove()
    return int(channel.out.broken)


def main() -> int:
    """Run the agent on this process's standard input and output.

    Returns
    -------
    int
        Exit code.
    """
    linux.open_standard_descriptors()
    channel = Channel(os.dup(0), os.dup(1))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)  # printed text must not get into the channel
    os.close(null)
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)  # the shell that started it may have set others
    channel.out.write(GREETING)
    return serve(channel)


if __name__ == "__main__":
    sys.exit(main())
