"""The agent of a host, `python -m engine.launch.agent`: it starts the ranks of its host and watches them.

The launcher starts one agent on each host of a job, by ssh or by a command of the user's. They exchange messages over
the agent's standard input and output (`hosts.channel`). If that channel ends, for whatever reason, the agent kills its
ranks. It starts, watches and ends ranks as the launcher does on one host (`process`). It sends their output, exit
codes, reports and files to the launcher.

The agent of a fixed job starts all its ranks at once (`fixed_ranks`). That of an elastic job starts workers in the
slots of its host when the driver asks for them (`elastic.workers`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ..host import linux, machine, processes
from ..host.signals import ENDING_SIGNALS, catch_signals
from ..metrics import page
from .errors import LaunchError
from .fixed_ranks import FixedRanks
from .hosts import remote_files
from .hosts.channel import GREETING, Channel, ChannelError, Message
from .hosts.page_copies import Pages
from .hosts.reach import network_of
from .process import spawn
from .process.cpu_binding import allot_cpus
from .process.devices import devices_here, share_devices
from .process.guardian import Guardian
from .process.job_signals import PASSED_SIGNALS, SIGNALS
from .process.output import Stream
from .process.plan import Crew, Job, RankPlan, without_places
from .process.reader_loop import ReaderLoop
from .process.spawn import RankProcess
from .process.supervisor import Supervisor

# Variables of the host or the session: ranks get the agent's values of these, not the launcher's.
OF_THE_HOST = ("HOSTNAME", "LOGNAME", "USER", "HOME", "SHELL", "MAIL", "DISPLAY", "XAUTHORITY")
OF_THE_SESSION = ("SSH_", "XDG_", "DBUS_")

Handler = Callable[[Message], None]


class RankGroup(Protocol):
    """Processes that an agent starts: the ranks of a fixed job, or the workers of an elastic one."""

    places: int  # number of processes among which the host's CPUs are divided
    trouble: str  # why the agent must end; empty while it need not
    # Seconds without a confirmed heartbeat after which the guardian ends agent and workers; None: no lease
    lease: float | None
    handlers: Mapping[str, Handler]  # handlers of messages that only this kind of job has, by the messages' kind

    def prepare(self, address: str) -> dict[str, Any]:
        """Get what ranks need on this host, and return further fields of the message `ready`."""
        ...

    def make_supervisor(self, guardian: Guardian, wakeup: socket.socket) -> Supervisor:
        """Return a supervisor, before any process is started."""
        ...

    def start(self, head: dict[str, Any]) -> None:
        """Begin, with the fields of the message `start`; raise a `LaunchError` if a rank cannot be started."""
        ...

    def close(self) -> None:
        """Close what `prepare` and `start` have opened."""
        ...


class Agent:
    """Manager of the ranks of this host; `order` is the launcher's message `prepare`.

    That of an elastic job has `slots`, the number of slots of this host; its `ranks` are the job's possible slot
    numbers.
    """

    def __init__(self, channel: Channel, order: Message) -> None:
        head = order.head
        self.channel = channel
        self.job = Job(**head["job"] | {"directory": Path(head["job"]["directory"])})
        self.crew = Crew(
            order.get_number("host"),
            tuple(order.get_numbers("sizes")),
            tuple(order.get_numbers("ranks")),
            head["name"],
        )
        self.head = head
        self.grace = order.get_seconds("grace", 0)
        self.command = [str(word) for word in head["command"]]
        self.pages: dict[int, int] = {}
        self.copies = Pages(self.pages)
        self.files = remote_files.Directory(self.job.directory, self.job.name, self.crew.ranks)
        self.loop: ReaderLoop
        self.supervisor: Supervisor
        self.ranks = _make_ranks(self, order)
        self._handlers: dict[str, Handler] = {
            "finish": lambda _: self.supervisor.release(),
            "go_on": lambda _: self.supervisor.hold_back(False),
            "hold": lambda _: self.supervisor.hold_back(True),
            "signal": self._handle_signal,
            **self.ranks.handlers,
        }

    def prepare(self) -> None:
        """Check that the ranks can be started, and report `ready` to the launcher, before any rank of the job starts.

        If they cannot be started, a `LaunchError` says how to mend it.
        """
        if not processes.is_proc_usable():
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
        self.environment = _merge_environments(self.head["environment"])
        if self.head["python"]:
            self._prefer_own_python(self.head["python"])
        self.program = spawn.find_command(self.command, self.environment)
        address = self._choose_interface()
        self.allotment = allot_cpus(
            machine.collect_facts(),
            self.ranks.places,
            self.environment,
            binding=self.head["binding"],
            cpus_per_rank=self.head["cpus_per_rank"],
        )
        if self.job.gpus is not None:
            visible = devices_here(self.environment.get("CUDA_VISIBLE_DEVICES"))
            devices = share_devices(*self.job.gpus, len(self.crew.ranks), visible)
            self.job = replace(self.job, devices=devices)
        self.files.make()
        prepared = self.ranks.prepare(address)  # Binds its port before a free one is looked for.
        self.channel.send(
            "ready",
            port=spawn.find_port(""),
            address=address,
            summary=self.allotment.summary,
            processors=machine.collect_facts().usable,
            **{"hub": 0} | prepared,
        )

    def run(self, head: dict[str, Any]) -> None:
        """Start the ranks, and return when no process of theirs is left.

        `head` has the fields of the job that are known once all hosts are ready.
        """
        self.descriptors = spawn.raise_descriptor_limit(len(self.crew.ranks))
        self.files.finish_enclosed()
        guardian = Guardian(self.job.name, lambda: None, str(self.crew.host), self.ranks.lease)
        processes.call_prctl(processes.PR_SET_CHILD_SUBREAPER, 1)
        with (
            contextlib.closing(ReaderLoop([self.channel.out])) as self.loop,
            catch_signals(SIGNALS, lambda *_: None) as wakeup,
        ):
            self.supervisor = supervisor = self.ranks.make_supervisor(guardian, wakeup)
            supervisor.hold_open()
            self.loop.add_reader(self.channel.reading, self.receive)
            try:
                self.ranks.start(head)
            except LaunchError as error:
                self.channel.send("failed", text=str(error))
                supervisor.release()
                supervisor.kill()
                supervisor.run()
            else:
                self.receive()  # messages that came together with `start`
                supervisor.run()
            finally:
                self.ranks.close()
        guardian.stop()
        if self.ranks.trouble:
            raise LaunchError(self.ranks.trouble)
        self.copies.send(self.channel)

    def finish(self) -> None:
        """Send the ranks' files to the launcher, then `done`; remove the files once the launcher closes the channel."""
        if not self.channel.out.broken:
            self.files.send(self.channel)
            self.channel.send("done")
            self.channel.out.drain()
        for _ in (
            self.channel.wait_for_messages()
        ):  # until the launcher hangs up: other agents may use the directory till then
            pass
        self.files.remove()

    def receive(self) -> None:
        """Handle the launcher's messages; at the end of the channel, kill the ranks."""
        descriptor = self.channel.reading
        for message in self.channel.receive():
            handler = self._handlers.get(message.kind)
            if handler is None:
                raise ChannelError(f"the launcher asks for {message.kind!r}, which this agent does not know")
            handler(message)
        if self.channel.ended:
            self.loop.remove_reader(descriptor)
            self.channel.out.give_up()
            self.supervisor.release()
            self.supervisor.kill()

    def start_rank(
        self, rank_plan: RankPlan, number: int, inherited: tuple[int, ...] = (), awaited: bool = True
    ) -> RankProcess:
        """Start a process or raise a `LaunchError`; relay its output to the launcher, which knows it by a number."""
        rank = spawn.start(rank_plan, self.command, self.program, self.descriptors, inherited, awaited)
        self.supervisor.add(rank)
        for name, pipe in (("stdout", rank.stdout), ("stderr", rank.stderr)):
            self.supervisor.listen(Stream(rank.number, pipe, functools.partial(self._relay_output, number, name)))
        return rank

    def _relay_output(self, number: int, name: str, data: bytes) -> None:
        """Send output of a rank's stream to the launcher, which shows an unfinished line when it learns of the end."""
        self.channel.send("output", data, number=number, stream=name)

    def make_page(self, number: int) -> str:
        """Return the path of a rank's or slot's page of counters, which is made when it is first needed.

        A `LaunchError` is raised if there is no memory for it.
        """
        if number not in self.pages:
            try:
                self.pages[number] = page.make()
            except OSError as error:
                raise LaunchError(
                    f"there is no memory for counters: {linux.explain_refusal('memfd_create', error)}"
                ) from error
        return f"/proc/{os.getpid()}/fd/{self.pages[number]}"

    def show_line(self, line: str) -> None:
        """Show a line in the launcher's output."""
        self.channel.send("say", line=line)

    def _handle_signal(self, message: Message) -> None:
        """Handle a signal of the user to the job."""
        signum = message.get_number("number")
        if signum in ENDING_SIGNALS:
            self.supervisor.end_job_by(signum)
        elif signum in PASSED_SIGNALS:
            self.supervisor.pass_on(signum)
        else:
            raise ChannelError(f"the launcher passes signal {signum} on, which it does not pass on")

    def _prefer_own_python(self, launchers: str) -> None:
        """Make ranks run with the Python that runs this agent, which the user has chosen for this host.

        It also replaces the launcher's Python, whose path is `launchers`, if the command begins with it.
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


def _merge_environments(sent: dict[str, str]) -> dict[str, str]:
    """Return the agent's environment, overridden by the launcher's variables except those of host and session."""
    own = without_places(os.environ)
    kept = {name for name in sent if name in OF_THE_HOST or name.startswith(OF_THE_SESSION)}
    return own | {name: value for name, value in sent.items() if name not in kept}


def _make_ranks(agent: Agent, order: Message) -> RankGroup:
    if "slots" not in order.head:
        return FixedRanks(agent)
    from .elastic.workers import Workers  # a slow import, not needed for fixed jobs

    return Workers(agent, order)


def serve(channel: Channel) -> int:
    """Serve the launcher until the job ends; return 1 if it has gone before it received everything, else 0."""
    agent: Agent | None = None
    try:
        for message in channel.wait_for_messages():
            if message.kind == "examine":
                from .cli.doctor import examine_host  # a slow import, not needed for jobs

                examine_host(channel, message)
            elif message.kind == "confirm_dead":
                from .hosts.dead_workers import confirm_dead_workers

                confirm_dead_workers(channel, message)
                break
            elif message.kind == "prepare":
                agent = Agent(channel, message)
                agent.prepare()
            elif message.kind == "file" and agent is not None:
                agent.files.take_part(message)
            elif message.kind == "start" and agent is not None:
                agent.run(message.head)
                agent.finish()
                break
            else:
                raise ChannelError(f"the launcher asks for {message.kind!r} out of turn")
    except LaunchError as error:
        channel.send("failed", text=str(error))
        channel.out.drain()
        for _ in channel.wait_for_messages():  # until the launcher hangs up
            pass
    finally:
        if agent is not None:
            agent.files.remove()
    return int(channel.out.broken)


def main() -> int:
    """Run the agent on this process's standard input and output, and return its exit code."""
    linux.open_standard_descriptors()
    channel = Channel(os.dup(0), os.dup(1))
    null = linux.open_empty_input()
    os.dup2(null, 0)
    os.dup2(2, 1)  # printed text must not get into the channel
    os.close(null)
    for signum in ENDING_SIGNALS:
        signal.signal(signum, signal.SIG_DFL)  # the shell that started it may have set others
    channel.out.write(GREETING)
    return serve(channel)


if __name__ == "__main__":
    sys.exit(main())
