"""Run a job on several hosts: start agents, have them start the ranks when all are ready, and wait for their end.

Each agent ends its own ranks in the stages of `supervisor`. The conductor sends agents the events of other hosts: the
first failure, the user's signals, the end of all ranks. It has one thread and one selector, like the supervisor.
"""

from __future__ import annotations

import functools
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ..config.forms import MOST_PORTS
from ..exit_report.report import ExitReport
from ..host import machine, network, private_files, processes
from ..host.patience import Patience
from ..host.signals import read_signals
from ..text import readable
from .cli.options import Options
from .errors import LaunchError
from .hosts import remote_files
from .hosts.channel import CODES, PIDS, ChannelError, Message
from .hosts.event_loop import AgentLoop
from .hosts.host_list import LOOPBACK
from .hosts.page_copies import Copies
from .hosts.remote import RemoteHost, agent_command
from .process.console import Console
from .process.output import Display, open_displays
from .process.plan import Job
from .process.supervisor import ENDING_SIGNALS, PASSED_SIGNALS, Outcome
from .process.writer import Writer
from .report.failure_cause import End, describe

OTHERS = 2.0  # seconds to wait for further failed hosts after the first, so that one error names them all
MARGIN = 15.0  # seconds beyond the grace periods in which agents must report the end of their ranks
COPIED_EVERY = 1.0  # seconds between two copies of all pages of counters
FAREWELL = 30.0  # seconds without a message after which an agent that is cleaning up is lost


def order(options: Options, job: Job, host: RemoteHost, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of an agent's message `prepare` that do not depend on its ranks.

    Parameters
    ----------
    options : Options
    job : Job
    host : RemoteHost
        The host of the agent.
    environment : mapping of str to str
        The launcher's environment.

    Returns
    -------
    dict
    """
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


class Interrupted(Exception):
    """The user has ended the job before its ranks were started, by the signal `signum`."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Conductor:
    """Driver of a job's ranks on several hosts. After any exception call `abandon`, which leaves no process behind.

    Parameters
    ----------
    options : Options
        Options that have `places`.
    job : Job
    consoles : sequence of Console
        The launcher's stdout and stderr.
    pages : sequence of int
        Descriptors by rank, to which the ranks' pages of counters are copied; empty if nothing is counted.
    say : callable
        Shows a line of the launcher's own.
    wakeup : socket.socket
        Socket that delivers the numbers of signals (`engine.host.signals`).
    seconds : float
        Seconds in which agents must answer.

    Attributes
    ----------
    displays : dict
        Display of each (rank, stream name), once ranks are started.
    problems : dict of str to OSError
        Files of ranks that could not be written here, and why.
    files : Writer
        Writer of the ranks' files.
    """

    def __init__(
        self,
        options: Options,
        job: Job,
        consoles: Sequence[Console],
        pages: Sequence[int],
        say: Callable[[str], None],
        wakeup: socket.socket,
        seconds: float,
    ) -> None:
        self.displays: dict[tuple[int, str], Display] = {}
        self.problems: dict[str, OSError] = {}
        self._options = options
        self._job = job
        self.files = Writer("files")
        self._consoles = list(consoles)
        self._writers = [self.files, *(console.writer for console in consoles)]
        self._counted = bool(pages)
        self._say = say
        self._wakeup = wakeup
        self._hosts = [
            RemoteHost(number, place, agent_command(place, options.reach, seconds))
            for number, place in enumerate(options.places)
        ]
        self._copies = [Copies(pages, place.ranks) for place in options.places]
        self._by_rank = {rank: host for host in self._hosts for rank in host.place.ranks}
        self._board = AgentLoop(self._hosts, self._writers, self._act, self._lost, self._heard)
        self._board.add_reader(wakeup.fileno(), self._signals)
        self._seconds = seconds
        self._ready: dict[int, dict[str, Any]] = {}
        self._ends: dict[int, End] = {}
        self._started = False
        self._ending = False
        self._finishing = False
        self._hurry = False
        self._signum: int | None = None
        self._patience: Patience | None = None
        self._asked: set[int] = set()
        self._told = ""
        self._refusal = ""

    @property
    def hosts(self) -> dict[int, str]:
        """Name of each rank's host."""
        return {rank: place.name for place in self._options.places for rank in place.ranks}

    @property
    def clocks(self) -> dict[int, float]:
        """Seconds by which the launcher's clock is ahead of the clock of each rank's host."""
        return {rank: host.ahead for rank, host in self._by_rank.items()}

    @property
    def shares(self) -> dict[str, tuple[int, int]]:
        """Numbers of ranks and usable processors of each host, by its name; available once agents are ready."""
        return {host.name: (len(host.place.ranks), self._ready[host.number]["processors"]) for host in self._hosts}

    def runs(self, rank: int) -> bool:
        """Return whether a rank has been started and has not ended."""
        return self._started and rank not in self._ends

    def add_reader(self, descriptor: int, act: Callable[[], None]) -> None:
        """Call `act` whenever a descriptor is readable; `act` reads it, and must not block."""
        self._board.add_reader(descriptor, act)

    def start(self, environment: Mapping[str, str]) -> None:
        """Start the agents, and the ranks as soon as all agents are ready.

        Parameters
        ----------
        environment : mapping of str to str
            The launcher's environment, which ranks inherit.

        Raises
        ------
        LaunchError
            A host cannot take part; the text names it, the command that was tried, and its output.
        Interrupted
            The user has ended the job.
        """
        private_files.write(self._job.directory / remote_files.TOKEN, self._job.name.encode())
        for host in self._hosts:
            if self._options.verbose:
                self._say(f"{host.name}: {readable.ranks(host.place.ranks)}, agent by {host.tried()}")
            self._board.start(host)
            self._prepare(host, environment)
        self._await_agents()
        self._start_ranks()

    def run(self) -> Outcome:
        """Serve the agents until every rank has ended and no process of theirs is left.

        Returns
        -------
        Outcome

        Raises
        ------
        LaunchError
            A rank cannot be started.
        """
        asked = time.monotonic()
        while not all(host.done or host.trouble for host in self._hosts):
            self._board.step(0.5 if self._patience is None else self._patience.wait())
            if self._refusal:
                raise LaunchError(self._refusal)
            if self._patience is not None and not self._patience.left():
                self._give_up()
            if not self._finishing and len(self._ends) == self._job.size:
                self._finishing = True
                self._patience = Patience(FAREWELL)
                self._board.tell("finish")
            if self._counted and not self._finishing and time.monotonic() - asked > COPIED_EVERY:
                asked = time.monotonic()
                self._board.tell("pages")
        self.abandon()
        return Outcome([self._ends[rank] for rank in sorted(self._ends)], self._signum, self._hurry)

    # ---- the start

    def _prepare(self, host: RemoteHost, environment: Mapping[str, str]) -> None:
        """Send an agent `prepare`, with everything but the hub's address, which the first host's agent determines."""
        options, job = self._options, self._job
        self._board.send(
            host,
            "prepare",
            sizes=[len(place.ranks) for place in options.places],
            ranks=host.place.ranks,
            hub=host.number == 0 and len(options.places) > 1,
            counted=self._counted,
            **order(options, job, host, environment),
        )
        if options.enclosed:
            for head, part in remote_files.enclosed_parts(options.enclosed):
                self._board.send(host, "file", part, **head)

    def _await_agents(self) -> None:
        """Wait until all agents are ready; a `LaunchError` names all hosts that fail within `OTHERS` of the first."""
        patience, others = Patience(self._seconds), None
        while not all(host.ready or host.trouble for host in self._hosts):
            self._board.step(patience.wait())
            if self._signum is not None:
                raise Interrupted(self._signum)
            if others is None and any(host.trouble for host in self._hosts):
                others = Patience(OTHERS)
            if not patience.left() or (others is not None and not others.left()):
                break
        late = [host for host in self._hosts if not host.ready and not host.trouble]
        if not patience.left():
            for host in late:
                host.trouble = f"did not answer within {self._seconds:g} s"
        troubled = [host for host in self._hosts if host.trouble]
        if troubled:
            raise LaunchError(_account(troubled, len(self._hosts)))

    def _start_ranks(self) -> None:
        """Send all agents the hub's address and the order to start their ranks."""
        ready = self._ready[0]
        address = str(ready["address"]) or self._reached_by()
        hub = f"[{address}]:{ready['hub']}" if ":" in address else f"{address}:{ready['hub']}"
        self._make_displays()
        self._started = True
        for host in self._hosts:
            if not self._options.quiet:
                self._say(f"{host.name}: {self._ready[host.number]['summary']}")
            self._board.send(host, "start", hub=hub if ready["hub"] else "", address=address, port=ready["port"])

    def _reached_by(self) -> str:
        """Return the name or address by which other hosts reach the first one."""
        first, *others = self._options.places
        if not first.local or not others:
            return first.address
        if first.address not in LOOPBACK:
            return first.address
        address = next(filter(None, (network.own_address(place.address) for place in others)), None)
        if address is None:
            raise LaunchError(
                f"--hosts: other hosts cannot reach {first.name!r}, and there is no way to {others[0].name!r} that "
                "would tell the address of this one: give it by the name or address that others know"
            )
        return address

    def _make_displays(self) -> None:
        timestamps = self._options.timestamps
        for rank in range(self._job.size):
            opened = open_displays(rank, self._job.directory, self._consoles, self.files, timestamps=timestamps)
            self.displays |= {(rank, name): display for name, display in opened.items()}
        for writer in self._writers:  # all agents are started, so threads may begin
            writer.start()

    # ---- what comes

    def _heard(self, host: RemoteHost, lines: list[str]) -> None:
        """Show an agent's lines on stderr; before the ranks are started, the host keeps them for the report."""
        if self._started and not host.trouble:
            for line in lines:
                self._say(f"{host.name}: {line}")

    def _act(self, host: RemoteHost, message: Message) -> None:
        kind, head = message.kind, message.head
        if self._finishing:
            self._patience = Patience(FAREWELL)
        if kind == "output":
            self.displays[_rank(host, message), str(head["stream"])].take(message.body)
        elif kind == "end":
            self._ended(host, message)
        elif kind == "pages":
            self._copies[host.number].keep(message)
        elif kind == "file":
            numbers = host.place.ranks
            remote_files.keep_later(message, self._job.directory, numbers, self.files, self.problems)
        elif kind == "say":
            self._relay(host, str(head["line"]))
        elif kind == "ready":
            ports = {name: message.number(name, 0, MOST_PORTS) for name in ("hub", "port")}
            host.ready = True
            self._ready[host.number] = head | ports | {"processors": message.number("processors", 1)}
        elif kind == "started":
            self._show_start(host, message)
        elif kind == "failed":
            self._failed(host, str(head["text"]))
        elif kind == "done":
            host.done = True
        else:
            raise ChannelError(f"it sends {kind!r}, which this launcher does not know; install the same version")

    def _show_start(self, host: RemoteHost, message: Message) -> None:
        if self._options.verbose:
            cpus = message.head["cpus"]
            bound = "any CPU" if cpus is None else f"CPUs {readable.cpus(cpus)}"
            rank = _rank(host, message)
            files = self._job.directory / f"rank.{rank}"
            self._say(f"rank {rank}: pid {message.number('pid', *PIDS)} on {host.name}, {bound}, files in {files}")

    def _failed(self, host: RemoteHost, text: str) -> None:
        """Note that an agent cannot start its ranks, either before any rank of the job is started or afterwards."""
        if not self._started:
            host.trouble = text
            return
        self._refusal = self._refusal or f"{host.name}: {text}"

    def _ended(self, host: RemoteHost, message: Message) -> None:
        """Record the end of a rank, with its time by the launcher's clock."""
        rank, code, now = _rank(host, message), message.number("code", *CODES), time.time()
        host.ahead = now - message.seconds("now")
        by_launcher = bool(message.head["by_launcher"]) and (self._ending or self._signum is not None)
        report = ExitReport.parse(message.body)
        self._ends[rank] = End(rank, code, now - message.seconds("age"), by_launcher, report=report)
        host.alive.discard(rank)
        for name in ("stdout", "stderr"):
            self.displays[rank, name].flush()
        if code != 0:
            self._end(f"after the first rank failed (rank {rank}, {describe(code)})")
        stalled = report.stalled_rank if code != 0 else None
        if stalled in self._by_rank and stalled not in self._asked:
            self._asked.add(stalled)
            self._board.send(self._by_rank[stalled], "where", rank=stalled)

    def _relay(self, host: RemoteHost, line: str) -> None:
        """Show a line of an agent, unless the launcher has shown the same one."""
        if line != self._told:
            self._say(f"{host.name}: {line}")

    # ---- the ending

    def _signals(self) -> None:
        """Pass on the signals that have come; a second signal to end kills the ranks."""
        for signum in read_signals(self._wakeup):
            if signum in PASSED_SIGNALS and self._started:
                self._board.tell("signal", number=signum)
            elif signum in ENDING_SIGNALS:
                self._end_by(signum)

    def _end_by(self, signum: int) -> None:
        grace = self._options.grace
        if not self._ending and self._signum is None:
            self._signum = signum
            if not self._started:
                return
            name = processes.signal_name(signum)
            self._told = f"{name}: passed on to the ranks, which have {grace:g} s to end; once more kills them now"
            self._say(self._told)
            self._patience = Patience(grace + MARGIN)
        else:
            self._hurry = True
            self._patience = Patience(MARGIN)
        self._board.tell("signal", number=signum)

    def _end(self, why: str) -> None:
        """End the ranks on all hosts after a failure on one; does nothing if the ending has begun."""
        if not self._ending and self._signum is None:
            self._ending = True
            self._patience = Patience(2 * self._options.grace + MARGIN)
            self._board.tell("end", why=why)

    def _lost(self, host: RemoteHost, how: str) -> None:
        """Record that an agent is lost, and with it its ranks, whose exit codes cannot be known."""
        if host.done or host.trouble:
            return
        if not self._started:
            said = host.said()
            host.trouble = f"{how}; it said: {said}" if said else f"{how} and said nothing"
            return
        said = host.said()
        host.trouble = how
        ranks = f"; {readable.ranks(host.alive)} with it" if host.alive else ""
        self._say(f"{host.name} was lost: its agent {how}{ranks}" + (f"; it said: {said}" if said else ""))
        now = time.time()
        by_launcher = self._signum is not None or self._hurry
        for rank in host.alive:
            self._ends[rank] = End(rank, -signal.SIGKILL, now, by_launcher, lost=how)
            for name in ("stdout", "stderr"):
                self.displays[rank, name].flush()
        if host.alive:
            self._end(f"after {host.name} was lost")
        host.alive.clear()

    def _give_up(self) -> None:
        """Treat agents that have not answered in time as lost."""
        self._patience = None
        for host in self._hosts:
            if not host.done and not host.trouble and (host.alive or self._finishing):
                self._board.ignore(host)
                self._lost(host, "did not answer in time")

    def abandon(self) -> None:
        """Close all channels, so that agents kill what still runs; no agent is left when this returns."""
        self._board.close()
        for display in self.displays.values():
            display.close()
        self.files.put(functools.partial(remote_files.remove_token, self._job.directory))
        self.files.finish()


def _rank(host: RemoteHost, message: Message) -> int:
    """Return the rank that a message names, which must be one of its host."""
    rank = message.number("rank")
    if rank not in host.place.ranks:
        raise ChannelError(f"it speaks of rank {rank}, which is not one of its ranks")
    return rank


def _account(hosts: Sequence[RemoteHost], of: int) -> str:
    """Return the error text on hosts that cannot take part, each with its output and the command that was tried."""
    lines = [host.account() for host in hosts]
    if len(lines) == 1:
        return lines[0]
    return f"{len(lines)} of {of} hosts cannot take part\n  " + "\n  ".join(lines)
