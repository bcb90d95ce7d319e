"""The agents of an elastic job: one on each host, started when its first worker is to start."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...host import network
from ...host.patience import Patience
from ..cli.elastic_options import MARGIN
from ..cli.options import Options
from ..hosts import remote_files
from ..hosts.channel import PIDS, WORLDS, Message
from ..hosts.event_loop import AgentLoop
from ..hosts.host_list import LOOPBACK, Place
from ..hosts.lease_renewal import LeaseRenewer
from ..hosts.page_copies import Copies
from ..hosts.remote import RemoteHost, agent_command
from ..job_driver import FAREWELL, order
from ..process.plan import Job
from ..process.writer import Writer
from .cluster import Cluster
from .discovery import Names

BEAT = 1.0  # longest time between two heartbeats to each agent, in seconds


@dataclass
class _Inquiry:
    """Pending inquiry whether workers of a lost agent still run."""

    agent: RemoteHost
    where: str  # result of `witness.where`
    workers: dict[int, list[int]]  # pid and start time of each worker; empty if it may not have started
    patience: Patience  # until certainly no worker runs


class _Routes:
    """Addresses of this machine as other hosts see it. Threads find them, because a name server may be slow or dead.

    A thread starts together with the agent of a host, whose start takes longer than a look-up that succeeds.
    """

    def __init__(self) -> None:
        self._known: dict[str, str | None] = {}

    def ask(self, other: str) -> None:
        """Begin looking up the address that a host (a name or an address) sees, unless it is known."""
        if self._known.get(other) is None:
            self._known[other] = None
            threading.Thread(target=self._find, args=(other,), daemon=True).start()

    def known(self, other: str) -> str | None:
        """Return the address that a host sees; None if it is not known yet."""
        return self._known.get(other)

    def _find(self, other: str) -> None:
        self._known[other] = network.own_address(other)


class Fleet:
    """The agents of a job; it starts them, and carries messages between them and the driver.

    Parameters
    ----------
    options : Options
        Options that have `elastic`.
    job : Job
    names : Names
        Names of this machine.
    several : bool
        Whether workers may be on several hosts.
    environment : mapping of str to str
        The launcher's environment, which workers inherit.
    writers : sequence of Writer
        Writers of files and consoles, which receive the output of workers.
    pages : sequence of int
        Descriptors by slot number of copies of the pages of counters; empty if nothing is counted.
    seconds : float
        Seconds in which a new agent must answer.
    told : callable
        Called with a host and a message of its agent.
    lost : callable
        Called when an agent is lost, with its host, the reason, and the seconds after which none of its workers runs.
        The host has no agent any more by then.
    cleared : callable
        Called with workers of a lost or given-up agent once it is certain that they do not run.
    refused : callable
        Called with a host and the reason why its agent cannot start workers.
    say : callable
        Shows a line.
    cluster : Cluster, optional
        Cluster that starts agents, instead of ssh or a command.
    """

    def __init__(
        self,
        options: Options,
        job: Job,
        names: Names,
        several: bool,
        environment: Mapping[str, str],
        writers: Sequence[Writer],
        pages: Sequence[int],
        seconds: float,
        told: Callable[[str, Message], None],
        lost: Callable[[str, str, float], None],
        cleared: Callable[[list[int]], None],
        refused: Callable[[str, str], None],
        say: Callable[[str], None],
        cluster: Cluster | None = None,
    ) -> None:
        self._cluster = cluster
        assert options.elastic is not None
        self._lease = options.elastic.lease
        self._relay = LeaseRenewer(min(BEAT, self._lease / 5))
        self.board = AgentLoop((), writers, self._act, self._lose, self._heard, self._relay)
        self._options, self._job, self._names, self._several = options, job, names, several
        self._environment = environment
        self._pages = pages
        self._seconds = seconds
        self._told, self._lost, self._cleared, self._refused, self._say = told, lost, cleared, refused, say
        self._agents: dict[str, RemoteHost] = {}
        self._patience: dict[str, Patience] = {}  # time until an agent that starts, or is silent, counts as lost
        self._copies: dict[str, Copies] = {}
        self._holders: dict[int, str] = {}  # slot number -> host on which it was used last
        self._waiting: dict[str, list[dict[str, Any]]] = {}  # workers to be started once the agent is ready
        self._addresses: dict[str, str] = {}
        self._routes = _Routes()
        self._where: dict[str, str] = {}  # host -> result of `witness.where` there
        self._running: dict[str, dict[int, list[int]]] = {}  # host -> worker -> pid and start time
        self._inquiries: dict[RemoteHost, _Inquiry] = {}  # by the agent that makes the inquiry
        self._numbered = 0
        self._finishing = False

    def launch(self, host: str, slots: int, fields: dict[str, Any]) -> None:
        """Start a worker on a host with `slots` slots; its agent is started first, if it is not running."""
        if host not in self._agents:
            self._start(host, slots)
        agent = self._agents.get(host)
        self._holders[fields["number"]] = host
        if agent is not None:
            self._running[host][fields["worker"]] = []
        if agent is not None and agent.ready:
            self.board.send(agent, "launch", **fields)
        elif agent is not None:
            self._waiting[host].append(fields)

    def withdraw(self, host: str, worker: int) -> bool:
        """Cancel the start of a worker, and return whether that came in time."""
        waiting = self._waiting.get(host, [])
        found = [fields for fields in waiting if fields["worker"] == worker]
        for fields in found:
            waiting.remove(fields)
            del self._running[host][worker]
        return bool(found)

    def kill(self, host: str, worker: int) -> None:
        """Ask a host's agent to kill a worker."""
        if host in self._agents:
            self.board.send(self._agents[host], "kill", worker=worker)

    def tell(self, host: str, worker: int, kind: str, /, **fields: Any) -> None:
        """Send a message to a worker through its agent."""
        if host in self._agents:
            self.board.send(self._agents[host], "tell", worker=worker, kind=kind, fields=fields)

    def __len__(self) -> int:
        """Return the number of agents."""
        return len(self._agents)

    def signal(self, signum: int) -> None:
        """Pass a signal on to all workers; agents that are not ready have none."""
        for agent in self._agents.values():
            if agent.ready:
                self.board.send(agent, "signal", number=signum)

    def disown(self, host: str) -> None:
        """Give up the agent of a host. It kills its workers when its channel closes or its lease expires."""
        if host in self._agents:
            self._inquire(self._part(self._agents[host]))

    def step(self, seconds: float) -> None:
        """Wait up to `seconds` for events and handle them; then give up agents that have been silent for too long."""
        self.board.step(seconds)
        for witness in [each for each, inquiry in self._inquiries.items() if not inquiry.patience.left()]:
            self._dismiss(witness)
        # Iterate over agents, not hosts: the loss of one may cause another to be given up and started anew.
        for agent in [self._agents[host] for host, patience in self._patience.items() if not patience.left()]:
            late = f"has not answered for {self._lease:g} s", f"did not answer within {self._seconds:g} s"
            self._lose(agent, late[not agent.ready])

    def reached_by(self, host: str, others: Sequence[str]) -> str:
        """Return the name or address by which workers on `others` reach a host; empty if there is no other host."""
        others = [other for other in others if other != host]
        if not others:
            return ""
        if self._addresses.get(host):
            return self._addresses[host]
        place = self._agents[host].place
        if not place.local or place.address not in LOOPBACK:
            return place.address
        found = (self._routes.known(Place(other, (), False).address) for other in others)
        return next(filter(None, found), None) or socket.gethostname()

    def finish(self) -> None:
        """Let agents send the remaining output and files, then end them; none is left when this returns."""
        self._finishing = True
        for agent in [agent for agent in self._agents.values() if not agent.ready]:
            self._part(agent)  # it has started no worker, and may never answer
        for agent in self._agents.values():
            self.board.send(agent, "finish")
        patience = Patience(FAREWELL)
        while self._agents and not all(agent.done for agent in self._agents.values()) and patience.left():
            self.board.step(patience.wait())
        self.close()

    def close(self) -> None:
        """Close all channels, so that agents kill what still runs; no agent is left when this returns."""
        self.board.close()

    # ---- agents

    def _start(self, host: str, slots: int) -> None:
        agent = self._agent(host, self._seconds)
        self._agents[host] = agent
        self._patience[host] = Patience(self._seconds)
        self._waiting[host] = []
        self._running[host] = {}
        self._copies[host] = Copies(self._pages, range(len(self._pages)))
        if self._options.verbose:
            self._say(f"{host}: agent by {agent.tried()}")
        self.board.start(agent)
        if agent.trouble:
            self._lose(agent, agent.trouble)
            return
        if not agent.place.local:
            self._routes.ask(agent.place.address)
        self.board.send(
            agent,
            "prepare",
            sizes=[],
            ranks=list(range(self._options.most)),
            hub=False,
            counted=bool(self._pages),
            slots=min(slots, self._options.most),
            most=self._options.most,
            several=self._several,
            lease=None if agent.place.local else self._lease,  # pipes on one machine need no lease
            **order(self._options, self._job, agent, self._environment),
        )
        if self._options.enclosed:
            for head, part in remote_files.enclosed_parts(self._options.enclosed):
                self.board.send(agent, "file", part, **head)

    def _agent(self, host: str, seconds: float) -> RemoteHost:
        """Make an agent of a host, which must answer within `seconds` once it is started."""
        number, self._numbered = self._numbered, self._numbered + 1
        if self._cluster is not None:
            return self._cluster.agent(number, host)
        place = Place(host, (), self._names.is_here(host))
        return RemoteHost(number, place, agent_command(place, self._options.reach, seconds), tied=False)

    def _act(self, agent: RemoteHost, message: Message) -> None:
        host = agent.name
        if agent in self._inquiries:
            self._testified(agent, message)
        if self._agents.get(host) is not agent:
            return
        if agent.ready:
            self._patience[host].begin(self._lease)
        if message.kind == "ready":
            self._ready(agent, message)
        elif message.kind == "failed":
            self._drop(host).hang_up()
            self.board.part(agent)
            self._refused(host, message.text("text"))
        elif message.kind == "pages":
            self._copies[host].keep(message, [slot for slot, holder in self._holders.items() if holder == host])
        elif message.kind == "done":
            agent.done = True
        elif message.kind == "beat":
            message.seconds("at")  # validated here; the relay has confirmed it
        else:
            if message.kind == "started":
                worker = message.number("worker", *WORLDS)
                self._running[host][worker] = [message.number("pid", *PIDS), message.number("born", *WORLDS)]
            elif message.kind == "end":
                self._running[host].pop(message.number("worker", *WORLDS), None)
            self._told(host, message)

    def _ready(self, agent: RemoteHost, message: Message) -> None:
        where, address, summary = (message.text(name) for name in ("where", "address", "summary"))
        agent.ready = True
        self._patience[agent.name].begin(self._lease)
        self._where[agent.name], self._addresses[agent.name] = where, address
        if not self._options.quiet:
            self._say(f"{agent.name}: {summary}")
        self.board.send(agent, "start")
        for fields in self._waiting.pop(agent.name):
            self.board.send(agent, "launch", **fields)
        self._waiting[agent.name] = []

    def _lose(self, agent: RemoteHost, how: str) -> None:
        """Record that an agent is lost, because its channel has ended or it is silent."""
        host = agent.name
        if agent in self._inquiries:
            self._dismiss(agent)
        if self._agents.get(host) is not agent or agent.done:
            return
        inquiry = self._part(agent)
        said = agent.said()
        if not self._finishing:
            self._lost(host, f"its agent {how}" + (f"; it said: {said}" if said else ""), inquiry.patience.left())
            self._inquire(inquiry)

    # ---- workers of lost agents

    def _part(self, agent: RemoteHost) -> _Inquiry:
        """Give an agent up, and return the inquiry on its workers.

        Its workers run at most until the lease, counted from the agent's last heartbeat, has expired.
        """
        host = agent.name
        heard = self._relay.stop(agent.channel)
        spent = 0.0 if heard is None else time.monotonic() - heard
        patience = Patience(max(MARGIN, self._lease + MARGIN - spent))
        inquiry = _Inquiry(agent, self._where.get(host, ""), self._running[host], patience)
        self._drop(host).give_up()
        self.board.part(agent)
        return inquiry

    def _inquire(self, inquiry: _Inquiry) -> None:
        """Start another agent that makes sure that the workers of a lost one do not run."""
        agent = inquiry.agent
        if inquiry.workers and not agent.ready:  # it never got the order to start them
            self._cleared(list(inquiry.workers))
        if not inquiry.workers or not agent.ready:
            return
        witness = self._agent(agent.name, max(inquiry.patience.left(), self._seconds))
        self._inquiries[witness] = inquiry
        self.board.start(witness)
        if witness.trouble:
            self._dismiss(witness)
            return
        workers = [process for process in inquiry.workers.values() if process]
        self.board.send(witness, "witness", job=self._job.name, host=agent.number, where=inquiry.where, workers=workers)

    def _testified(self, witness: RemoteHost, message: Message) -> None:
        inquiry = self._inquiries[witness]
        self._dismiss(witness)
        if message.kind == "clear":
            self._cleared(list(inquiry.workers))

    def _dismiss(self, witness: RemoteHost) -> None:
        del self._inquiries[witness]
        self.board.part(witness)  # before hang_up, which closes the descriptor by which the board knows it
        witness.hang_up()

    def _drop(self, host: str) -> RemoteHost:
        agent = self._agents.pop(host)
        del self._patience[host], self._waiting[host], self._copies[host], self._running[host]
        self._where.pop(host, None)
        self.board.ignore(agent)
        agent.trouble = agent.trouble or "given up"
        return agent

    def _heard(self, agent: RemoteHost, lines: list[str]) -> None:
        if agent.ready and not agent.trouble:
            for line in lines:
                self._say(f"{agent.name}: {line}")
