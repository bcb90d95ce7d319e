"""The driver of a job: it starts agents on hosts, handles what they report, and does what the job's policy decides.

It has one thread and one selector, and never blocks. There are three policies. A fixed job starts all ranks once, and
ends them all when one fails: by agents (`fixed_policy`), or as children of this process if all are on this host
(`local_policy`). An elastic job (`elastic.policy`) has agents and replaces workers; `engine.elastic.machine` decides.
"""

from __future__ import annotations

import functools
import io
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..host import machine, private_files
from ..host.patience import Patience
from ..text import readable
from .cli.options import Options
from .errors import LaunchError
from .hosts import remote_files
from .hosts.channel import ChannelError, Message
from .hosts.event_loop import AgentLoop
from .hosts.lease_renewal import LeaseRenewer
from .hosts.page_copies import Copies
from .hosts.remote import RemoteHost
from .process.console import Console
from .process.job_signals import ending_line, handle_signals
from .process.output import RankOutput
from .process.plan import Job
from .process.supervisor import Outcome

FAREWELL = 30.0  # seconds without a message after which an agent that is cleaning up is lost
BEAT = 1.0  # longest time between two heartbeats to each agent of an elastic job, in seconds

Handler = Callable[[RemoteHost, Message], None]


class Interrupted(Exception):
    """The user has ended the job before its ranks were started, by the signal `signum`."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@dataclass(frozen=True)
class JobSetup:
    """Facts about a job that its driver works with."""

    options: Options
    job: Job
    consoles: Sequence[Console]  # the launcher's stdout and stderr
    # Descriptors of pages for copied counters, by rank or slot number; empty if nothing is counted
    pages: Sequence[int]
    environment: Mapping[str, str]  # the launcher's, which ranks inherit
    wakeup: socket.socket  # delivers the numbers of signals (`engine.host.signals`)
    seconds: float  # time in which a new agent must answer
    say: Callable[[str], None]  # shows a line of the launcher's own
    # Called with a rank's or slot's number before a process is started there
    note_start: Callable[[int], None] = lambda number: None


class JobPolicy(ABC):
    """Decisions of a driver: what is started where, and what follows from messages and losses."""

    handlers: Mapping[str, Handler]  # handlers of agents' messages, by kind; the driver handles some kinds itself
    local = False  # whether there are no agents: this process starts the ranks, and the policy reads the user's signals

    def __init__(self, driver: Driver) -> None:
        self._driver, self._setup = driver, driver.setup

    @property
    @abstractmethod
    def agents(self) -> Collection[RemoteHost]: ...  # those that take part

    @property
    def members(self) -> Sequence[int]:
        """N of each rank's directory `rank.N`, by rank; that of a fixed job is the rank."""
        return range(self._setup.job.size)

    @abstractmethod
    def start(self) -> None:
        """Start what must run before `advance_job` is called."""

    @abstractmethod
    def advance_job(self) -> float | None:
        """Do what is due, and return the seconds until more may be; None once all ranks have ended."""

    @abstractmethod
    def is_running(self, number: int) -> bool:
        """Return whether a process runs with that number."""

    @abstractmethod
    def make_outcome(self) -> Outcome:
        """Return the outcome, once no process is left."""

    @property
    def hosts(self) -> dict[int, str] | None:
        """Name of each rank's host, in a fixed job with agents; else None."""
        return None

    @property
    def clocks(self) -> dict[int, float]:
        """Seconds by which the launcher's clock is ahead of the clock of each rank's host, where they differ."""
        return {}

    @property
    def shares(self) -> dict[str, tuple[int, int]]:
        """Numbers of ranks and usable processors of each host, by its name, in a fixed job with agents; else empty."""
        return {}

    def owned_numbers(self, agent: RemoteHost) -> Collection[int]:
        """Return the numbers of the ranks, or slots, whose files an agent may write."""
        raise NotImplementedError

    def agent_lost(self, agent: RemoteHost, how: str) -> None:
        """Handle the loss of an agent, whose channel has ended or which is silent."""
        raise NotImplementedError

    def end_by(self, signum: int, again: bool) -> None:
        """Handle the user's signal to end the job, which has been passed on; `again`: it was not the first."""
        raise NotImplementedError

    def counted_numbers(self, agent: RemoteHost) -> Collection[int] | None:
        """Return the numbers whose counters an agent may report; None: all that it was started with."""
        return None

    def admit_message(self, agent: RemoteHost, message: Message) -> bool:
        """Return whether a message counts; it does not if it is from an agent that was given up."""
        return True

    def prepare_finish(self) -> None:  # noqa: B027  # most have none
        """Give up agents that have nothing to clean up."""

    def close(self) -> None:  # noqa: B027  # most have opened nothing
        """Release what the policy has opened."""


class Driver:
    """Driver of a job's ranks. It is a context manager, whose end leaves no process behind."""

    def __init__(self, setup: JobSetup, make_policy: Callable[[Driver], JobPolicy]) -> None:
        options = setup.options
        self.setup = setup
        self.output = RankOutput(setup.job.directory, setup.consoles, timestamps=options.timestamps)
        self._started = self._ending = False
        self._refusal = ""
        self.signum: int | None = None  # signal by which the user has ended the job
        self.hurried = False  # whether a second signal came
        self.finishing = False
        self._told = ""  # line that agents need not repeat
        self._waited: dict[RemoteHost, Patience] = {}  # agents that have yet to say that they are done
        self._copies: dict[RemoteHost, Copies] = {}
        elastic = options.elastic
        self.renewer = None if elastic is None else LeaseRenewer(min(BEAT, elastic.lease / 5))  # of agents' leases
        self.loop = AgentLoop(self.output.writers, self, self.renewer)
        self.policy = make_policy(self)
        if not self.policy.local:
            self.loop.add_reader(setup.wakeup.fileno(), lambda: handle_signals(setup.wakeup, self))
        self._handlers: dict[str, Handler] = {
            "done": self._note_done,
            "file": self._keep_file,
            "output": self._show_output,
            "pages": self._copy_pages,
            "say": self._relay_line,
            **self.policy.handlers,
        }

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_all()

    def start(self) -> None:
        """Start the agents of a fixed job, and its ranks when all agents are ready.

        If a host cannot take part, a `LaunchError` names it, the command that was tried, and its output. `Interrupted`
        is raised if the user ends the job.
        """
        if not self.policy.local:
            private_files.write(self.setup.job.directory / remote_files.TOKEN, self.setup.job.name.encode())
        self.policy.start()

    def run(self) -> Outcome:
        """Run until the job is over and no process of its ranks is left.

        A `LaunchError` is raised if there are no hosts, or they cannot start a rank.
        """
        while True:
            seconds = self.policy.advance_job()
            self._check_refusal()
            if seconds is None:
                break
            self.loop.step(seconds)
        self._finish()
        self._end_all()
        return self.policy.make_outcome()

    def _end_all(self) -> None:
        """End all agents and ranks; none is left when this returns. A second call does nothing."""
        self.policy.close()
        self.loop.close()
        self.output.files.put(functools.partial(remote_files.remove_token, self.setup.job.directory))
        self.output.close()

    def start_agent(self, agent: RemoteHost, numbers: Collection[int], **fields: Any) -> None:
        """Start an agent and tell it to prepare; if that fails, its `trouble` says why.

        `numbers` are the ranks or slot numbers that it may start, and `fields` further fields of the message `prepare`.
        """
        setup = self.setup
        self._copies[agent] = Copies(setup.pages, numbers)
        self.loop.start(agent)
        if agent.trouble:
            return
        order = prepare_order(setup.options, setup.job, agent, setup.environment)
        self.loop.send(agent, "prepare", ranks=list(numbers), counted=bool(setup.pages), **order | fields)
        if setup.options.enclosed:
            for head, part in remote_files.read_parts(io.BytesIO(setup.options.enclosed), remote_files.ENCLOSED):
                self.loop.send(agent, "file", part, **head)

    def forget_agent(self, agent: RemoteHost) -> None:
        """Forget an agent that was given up."""
        self._copies.pop(agent, None)

    def say_started(self, who: str, number: int, pid: int, cpus: Collection[int] | None, where: str = "") -> None:
        """Show the start of a process, if the user wants to know so much."""
        if self.setup.options.verbose:
            bound = "any CPU" if cpus is None else f"CPUs {readable.format_cpus(cpus)}"
            files = self.setup.job.directory / f"rank.{number}"
            self.setup.say(f"{who}: pid {pid}{where}, {bound}, files in {files}")

    # ---- what the job has come to: policies report it

    @property
    def started(self) -> bool:
        """Return whether ranks may have been started; before, agents keep their lines for the report on the start."""
        return self._started

    @property
    def ending(self) -> bool:
        """Return whether a failure is ending the job, so that the user's first signal kills its ranks."""
        return self._ending

    @property
    def refused(self) -> bool:
        """Return whether the job cannot go on."""
        return bool(self._refusal)

    def start_output(self) -> None:
        """Start the threads that write the ranks' output, since ranks are started from now on."""
        self.output.start()
        self._started = True

    def begin_ending(self) -> bool:
        """Note that a failure ends the job; return False if that, or the user, is ending it already."""
        if self._ending or self.signum is not None:
            return False
        self._ending = True
        return True

    def refuse_job(self, why: str) -> None:
        """Let `run` raise a `LaunchError`: the job cannot go on. The first reason counts."""
        self._refusal = self._refusal or why

    # ---- the agents: this implements `AgentListener`

    def handle_message(self, agent: RemoteHost, message: Message) -> None:
        """Handle a message of an agent."""
        if not self.policy.admit_message(agent, message):
            return
        if agent in self._waited:
            self._waited[agent].reset(FAREWELL)
        handler = self._handlers.get(message.kind)
        if handler is None:
            raise ChannelError(
                f"it sends {message.kind!r}, which this launcher does not know; install the same version"
            )
        handler(agent, message)

    def agent_lost(self, agent: RemoteHost, how: str) -> None:
        """Handle the end of an agent's channel."""
        self.policy.agent_lost(agent, how)

    def agent_printed(self, agent: RemoteHost, lines: list[str]) -> None:
        """Show an agent's lines on stderr; before it can start ranks, the host keeps them for the report."""
        if self._started and agent.ready and not agent.trouble:
            for line in lines:
                self.setup.say(f"{agent.name}: {line}")

    def check_number(self, agent: RemoteHost, message: Message, name: str = "number") -> int:
        """Return the rank or slot number that a message names, which must be one of its host's."""
        number = message.get_number(name)
        if number not in self.policy.owned_numbers(agent):
            raise ChannelError(f"it speaks of {name} {number}, which is not one of its ranks or slots")
        return number

    def _show_output(self, agent: RemoteHost, message: Message) -> None:
        number, stream = self.check_number(agent, message), message.get_text("stream")
        if (number, stream) not in self.output.displays:
            raise ChannelError(f"it writes to {stream!r}")
        self.output.displays[number, stream].write_output(message.body)

    def _keep_file(self, agent: RemoteHost, message: Message) -> None:
        numbers, output = self.policy.owned_numbers(agent), self.output
        remote_files.keep_part(message, output.directory, numbers, output.files, output.problems)

    def _copy_pages(self, agent: RemoteHost, message: Message) -> None:
        self._copies[agent].write_pages(message, self.policy.counted_numbers(agent))

    def _relay_line(self, agent: RemoteHost, message: Message) -> None:
        """Show a line of an agent, unless the launcher has shown the same one."""
        if (line := message.get_text("line")) != self._told:
            self.setup.say(f"{agent.name}: {line}")

    def _note_done(self, agent: RemoteHost, message: Message) -> None:
        agent.done = True

    # ---- signals: this implements `SignalHandler`

    def pass_on(self, signum: int) -> None:
        """Pass a signal on to all ranks; agents that are not ready have none."""
        for agent in self.policy.agents:
            if self._started and agent.ready:
                self.loop.send(agent, "signal", number=signum)

    def end_by(self, signum: int) -> None:
        """Pass a signal to end the job on to the ranks; a second one kills them."""
        again = self.hurried = self._ending or self.signum is not None
        if not again:
            self.signum = signum
            if self._started:
                self._told = ending_line(signum, self.setup.options.grace)
                self.setup.say(self._told)
        self.pass_on(signum)
        self.policy.end_by(signum, again)

    # ---- the end

    def _check_refusal(self) -> None:
        if self._refusal:
            raise LaunchError(self._refusal)

    def _finish(self) -> None:
        """Let agents send the remaining output and files; those that stay silent are lost."""
        self.finishing = True
        self.policy.prepare_finish()
        for agent in self.policy.agents:
            self.loop.send(agent, "finish")
        self._waited = {agent: Patience(FAREWELL) for agent in self.policy.agents}
        while self._waited:
            self._check_refusal()
            for agent, patience in [*self._waited.items()]:
                if agent.done or agent.trouble or agent not in self.policy.agents:
                    del self._waited[agent]
                elif not patience.seconds_left():
                    del self._waited[agent]
                    self.loop.unregister_host(agent)
                    self.policy.agent_lost(agent, "did not answer in time")
            if self._waited:
                self.loop.step(min(patience.wait() for patience in self._waited.values()))


def prepare_order(options: Options, job: Job, host: RemoteHost, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of an agent's message `prepare` that do not depend on its ranks."""
    reach = options.reach
    job = replace(job, interface=reach.interface or "")
    return {
        "job": asdict(job) | {"directory": str(job.directory), "settings": dict(job.settings)},
        "host": host.number,
        "name": host.name,
        "cwd": str(machine.working_directory()) if host.place.local or reach.directory is None else reach.directory,
        "environment": dict(environment),
        "command": options.command,
        "python": "" if host.place.local or not reach.python else sys.executable,
        "binding": options.binding,
        "cpus_per_rank": options.cpus_per_rank,
        "grace": options.grace,
    }
