"""The agent of a host, `python -m engine.launch.agent`: starts the ranks of its host and watches them.

The launcher starts one on each host of a job, by ssh or by a command of the user's, and speaks with it over its
standard input and output (`channel`). The end of that channel, for whatever reason, is the end of the ranks. Ranks are
started, watched and ended as on one host (`spawn`, `supervisor`); what they write, how they end and the files that they
leave go to the launcher, which shows, judges and keeps them.
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
from . import remote_files, spawn
from .channel import GREETING, Channel, ChannelError, Message
from .cpu_binding import Allotment, allot
from .devices import devices_here, share_devices
from .errors import LaunchError
from .guardian import Guardian
from .output import Stream
from .page_copies import Pages
from .plan import Crew, Job, RankPlan, plan, without_places
from .reach import network_of
from .spawn import Rank
from .supervisor import ENDING_SIGNALS, PASSED_SIGNALS, SIGNALS, Supervisor
from .verdict import End

# What describes the host or the session, and not the job: of these variables the agent's own count.
OF_THE_HOST = ("HOSTNAME", "LOGNAME", "USER", "HOME", "SHELL", "MAIL", "DISPLAY", "XAUTHORITY")
OF_THE_SESSION = ("SSH_", "XDG_", "DBUS_")


class Agent:
    """The ranks of this host.

    Parameters
    ----------
    channel : Channel
        To the launcher.
    order : Message
        Its `prepare`: the job, and which ranks of it are this host's.
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
        """Find out whether the ranks can be started, and tell the launcher, before any rank of the job is.

        Raises
        ------
        LaunchError
            They cannot; the text says how to mend it.
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
        """Start the ranks, and stay until nothing of them is left.

        Parameters
        ----------
        head : dict
            What is known only now that all hosts are ready: `hub`, `address`, `port`.
        """
        self.job = replace(self.job, **head, counters=[f"/proc/{os.getpid()}/fd/{self.pages[r]}" for r in self.pages])
        descriptors = spawn.raise_descriptor_limit(len(self.crew.ranks))
        self.files.settle()
        guardian = Guardian(self.job.name, lambda: None, str(self.crew.host))
        processes.prctl(processes.PR_SET_CHILD_SUBREAPER, 1)
        with caught(SIGNALS, lambda *_: None) as wakeup:
            supervisor = Supervisor(guardian, wakeup, (self.channel.out,), self.grace, self._say, self._ended)
            supervisor.hold()
            supervisor.hear(self.channel.reading, self._hear)
            self._supervisor = supervisor
            try:
                for rank_plan in plan(self.job, self.allotment, self.environment, self.crew):
                    self._start(supervisor, rank_plan, descriptors)
            except LaunchError as error:
                self.channel.send("failed", text=str(error))
                supervisor.release()
                supervisor.abandon()
            else:
                self._hear()  # what has come with the word to start
                supervisor.run()
        guardian.dismiss()
        self.copies.send(self.channel)

    def finish(self) -> None:
        """Hand over the files that the ranks have left, say that nothing is left, and remove them when all have."""
        if not self.channel.out.broken:
            self.files.send(self.channel)
            self.channel.send("done")
            self.channel.out.drain()
        for _ in self.channel.messages():  # until the launcher hangs up: other agents may use the directory as long
            pass
        self.files.remove()

    def _start(self, supervisor: Supervisor, rank_plan: RankPlan, descriptors: tuple[int, int]) -> None:
        inherited: list[int] = []
        if self.hub is not None and rank_plan.rank == 0:
            inherited.append(self.hub.fileno())
            rank_plan.environment["ENGINE_HUB_FD"] = str(self.hub.fileno())
        rank = spawn.start(rank_plan, self.command, self.program, descriptors, inherited)
        if inherited and self.hub is not None:
            self.hub.close()  # rank 0 alone holds it: with that it ends
        supervisor.add(rank)
        for name, pipe in (("stdout", rank.stdout), ("stderr", rank.stderr)):
            supervisor.listen(Stream(rank.number, pipe, Relay(self.channel, name, rank=rank.number)))
        self.channel.send("started", rank=rank.number, pid=rank.pid, cpus=rank_plan.cpus)

    def _ended(self, rank: Rank, end: End) -> None:
        """Tell of the end of a rank, how long ago that was, and what the rank has reported."""
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
        """Do what the launcher asks for; at the end of the channel, kill."""
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
        """Have ranks run with the Python that the user has named for this host, which runs the agent.

        Parameters
        ----------
        launchers : str
            Path of the launcher's Python: as a command, it stands for this one.
        """
        path = self.environment.get("PATH", os.defpath)
        self.environment["PATH"] = f"{os.path.dirname(sys.executable)}{os.pathsep}{path}"
        if self.command[0] == launchers:
            self.command[0] = sys.executable

    def _choose_interface(self) -> str:
        """The address of the interface that the user named, of several the first that is here; empty: none is named."""
        if not self.job.interface:
            return ""
        name, address = network_of(self.job.interface)
        self.job = replace(self.job, interface=name)
        return address

    def _facts(self) -> dict[str, str]:
        """What else the launcher is told of this host."""
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
    """Sends what a rank writes to the launcher, as it comes.

    Parameters
    ----------
    channel : Channel
    name : str
        Of the stream.
    **who
        The rank, or the worker, in a field of the messages.
    """

    def __init__(self, channel: Channel, name: str, **who: int) -> None:
        self._channel = channel
        self._head: dict[str, Any] = {**who, "stream": name}

    def take(self, data: bytes) -> None:
        self._channel.send("output", data, **self._head)

    def flush(self) -> None:
        """The launcher shows the unfinished line when it learns of the end."""

    def close(self) -> None:
        """The launcher closes the file."""


def _environment(sent: dict[str, str]) -> dict[str, str]:
    """The launcher's variables over the agent's own; those on the host or the session are the agent's."""
    own = without_places(os.environ)
    job = {name: value for name, value in sent.items() if not _of_this_host(name)}
    return own | job


def _of_this_host(name: str) -> bool:
    return name in OF_THE_HOST or name.startswith(OF_THE_SESSION)


def _listen(address: str) -> socket.socket:
    """Open the socket on which rank 0 listens: on one address, or on all if that is empty."""
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
    """Do what the launcher asks for, to the end.

    Parameters
    ----------
    channel : Channel

    Returns
    -------
    int
        Exit code: 1 if the launcher has gone before it was told everything.
    """
    agent: Agent | None = None
    try:
        for message in channel.messages():
            if message.kind == "examine":
                from .doctor import examine  # takes longer to import than an agent to start ranks

                examine(channel, message)
            elif message.kind == "witness":
                from .witness import testify

                testify(channel, message)
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
    os.dup2(2, 1)  # nothing that is printed gets into the channel
    os.close(null)
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)  # whatever the shell that started it has set
    channel.out.write(GREETING)
    return serve(channel)


if __name__ == "__main__":
    sys.exit(main())
