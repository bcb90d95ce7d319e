"""The agents of an elastic job: one on each host, started when its first worker is to start."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...elastic.places import Slot
from ...host import network
from ...host.patience import Patience
from ..cli.elastic_options import MARGIN
from ..driver import Driver, Handler
from ..hosts.channel import PIDS, WORLDS, Message
from ..hosts.host_list import HostRanks, reachable_address
from ..hosts.remote import RemoteHost, agent_command
from .discovery import Discovery, Names


@dataclass
class _Inquiry:
    """Pending inquiry whether workers of a lost agent still run."""

    agent: RemoteHost
    where: str  # result of `dead_workers.process_view`
    workers: dict[int, list[int]]  # pid and start time of each worker; empty if it may not have started
    patience: Patience  # until certainly no worker runs


class ClusterBackend(Protocol):
    """Cluster that discovers hosts and starts processes on them itself, instead of `-H`, a discovery script and ssh."""

    @property
    def discovery(self) -> Discovery: ...  # names hosts `NAME@ADDRESS`; other hosts reach a host at that address

    def make_agent(self, number: int, host: str) -> RemoteHost:
        """Return the launcher's end of a host's agent, which has not been started."""
        ...

    def list_variables(self, slot: Slot) -> dict[str, str]:
        """Return environment variables of a worker in a slot, such as the GPUs reserved for it."""
        ...

    def take_logged_value(self, value: str) -> None:
        """Take a value that the program has logged."""
        ...


class PoolListener(Protocol):
    """Receiver of what happens to the agents of an elastic job."""

    def host_lost(self, host: str, why: str, within: float) -> None:
        """Handle the loss of a host's agent; none of its workers runs after `within` seconds.

        The host has no agent any more by then.
        """
        ...

    def host_refused(self, host: str, text: str) -> None:
        """Handle that a host's agent cannot start workers."""
        ...

    def workers_cleared(self, workers: list[int]) -> None:
        """Handle that workers of a lost or given-up agent certainly do not run."""
        ...


class AgentPool:
    """The agents of an elastic job, which come and go; the driver's options must have `elastic`.

    `names` are those of this machine, and `several` says whether workers may be on several hosts. `cluster` starts
    agents, instead of ssh or a command.
    """

    def __init__(
        self, driver: Driver, names: Names, several: bool, listener: PoolListener, cluster: ClusterBackend | None = None
    ) -> None:
        options = driver.setup.options
        assert options.elastic is not None and driver.renewer is not None
        self._driver, self._listener, self._cluster = driver, listener, cluster
        self._loop, self._renewer, self._options = driver.loop, driver.renewer, options
        self._lease = options.elastic.lease
        self._names, self._several = names, several
        self._seconds = driver.setup.seconds
        self._agents: dict[str, RemoteHost] = {}
        self._patience: dict[str, Patience] = {}  # time until an agent that starts, or is silent, counts as lost
        self._waiting: dict[str, list[dict[str, Any]]] = {}  # workers to be started once the agent is ready
        self._addresses: dict[str, str] = {}
        # Addresses of this machine as other hosts see it, by their names; None: not known yet
        self._routes: dict[str, str | None] = {}
        self._where: dict[str, str] = {}  # host -> result of `dead_workers.process_view` there
        self._running: dict[str, dict[int, list[int]]] = {}  # host -> worker -> pid and start time
        self._inquiries: dict[RemoteHost, _Inquiry] = {}  # by the agent that makes the inquiry
        self._numbered = 0
        self.handlers: Mapping[str, Handler] = {
            "beat": self._check_heartbeat,
            "failed": self._note_refusal,
            "ready": self._note_ready,
        }

    @property
    def agents(self) -> Collection[RemoteHost]:
        """Agents of all hosts that have one."""
        return list(self._agents.values())

    def start_worker(self, host: str, slots: int, fields: dict[str, Any]) -> None:
        """Start a worker on a host with `slots` slots; its agent is started first, if it is not running."""
        if host not in self._agents:
            self._start_agent(host, slots)
        agent = self._agents.get(host)
        if agent is not None:
            self._running[host][fields["worker"]] = []
        if agent is not None and agent.ready:
            self._loop.send(agent, "launch", **fields)
        elif agent is not None:
            self._waiting[host].append(fields)

    def cancel_start(self, host: str, worker: int) -> bool:
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
            self._loop.send(self._agents[host], "kill", worker=worker)

    def tell(self, host: str, worker: int, kind: str, /, **fields: Any) -> None:
        """Send a message to a worker through its agent."""
        if host in self._agents:
            self._loop.send(self._agents[host], "tell", worker=worker, kind=kind, fields=fields)

    def __len__(self) -> int:
        """Return the number of agents."""
        return len(self._agents)

    def give_up_host(self, host: str) -> None:
        """Give up the agent of a host. It kills its workers when its channel closes or its lease expires."""
        if host in self._agents:
            self._start_inquiry(self._give_up_agent(self._agents[host]))

    def give_up_silent(self) -> None:
        """Give up agents that have been silent for too long."""
        for inquirer in [each for each, inquiry in self._inquiries.items() if not inquiry.patience.seconds_left()]:
            self._close_inquirer(inquirer)
        # Iterate over agents, not hosts: the loss of one may cause another to be given up and started anew.
        for agent in [self._agents[host] for host, patience in self._patience.items() if not patience.seconds_left()]:
            late = f"has not answered for {self._lease:g} s", f"did not answer within {self._seconds:g} s"
            self.agent_lost(agent, late[not agent.ready])

    def reached_by(self, host: str, others: Sequence[str]) -> str:
        """Return the name or address by which workers on `others` reach a host; empty if there is no other host."""
        others = [other for other in others if other != host]
        if not others:
            return ""
        if self._addresses.get(host):
            return self._addresses[host]
        found = (self._routes.get(HostRanks(other, (), False).address) for other in others)
        return reachable_address(self._agents[host].place, found) or socket.gethostname()

    def give_up_unready(self) -> None:
        """Give up agents that have started no worker, and may never answer."""
        for agent in [agent for agent in self._agents.values() if not agent.ready]:
            self._give_up_agent(agent)

    def admit_message(self, agent: RemoteHost, message: Message) -> bool:
        """Return whether a message is from the present agent of its host; renew the time that it may be silent.

        An answer to an inquiry is handled here.
        """
        if agent in self._inquiries:
            self._end_inquiry(agent, message)
        if self._agents.get(agent.name) is not agent:
            return False
        if agent.ready:
            self._patience[agent.name].reset(self._lease)
        return True

    def note_start(self, agent: RemoteHost, message: Message) -> None:
        """Note the process of a worker that an agent has started."""
        worker = message.get_number("worker", *WORLDS)
        self._running[agent.name][worker] = [message.get_number("pid", *PIDS), message.get_number("born", *WORLDS)]

    def note_end(self, agent: RemoteHost, message: Message) -> None:
        """Note the end of a worker."""
        self._running[agent.name].pop(message.get_number("worker", *WORLDS), None)

    def agent_lost(self, agent: RemoteHost, how: str) -> None:
        """Handle the loss of an agent, because its channel has ended or it is silent."""
        host = agent.name
        if agent in self._inquiries:
            self._close_inquirer(agent)
        if self._agents.get(host) is not agent or agent.done:
            return
        inquiry = self._give_up_agent(agent)
        said = agent.last_output()
        if not self._driver.finishing:
            why = f"its agent {how}" + (f"; it said: {said}" if said else "")
            self._listener.host_lost(host, why, inquiry.patience.seconds_left())
            self._start_inquiry(inquiry)

    # ---- agents

    def _start_agent(self, host: str, slots: int) -> None:
        agent = self._make_agent(host, self._seconds)
        self._agents[host] = agent
        self._patience[host] = Patience(self._seconds)
        self._waiting[host] = []
        self._running[host] = {}
        if self._options.verbose:
            self._driver.setup.say(f"{host}: agent by {agent.format_command()}")
        self._driver.start_agent(
            agent,
            range(self._options.most),
            sizes=[],
            hub=False,
            slots=min(slots, self._options.most),
            most=self._options.most,
            several=self._several,
            lease=None if agent.place.local else self._lease,  # pipes on one machine need no lease
        )
        if agent.trouble:
            self.agent_lost(agent, agent.trouble)
        elif not agent.place.local:
            self._start_look_up(agent.place.address)

    def _start_look_up(self, other: str) -> None:
        """Find the address that a host sees, in a thread, because a name server may be slow or dead.

        The start of the host's agent takes longer than a look-up that succeeds.
        """

        def look_up() -> None:
            self._routes[other] = network.own_address(other)

        if self._routes.get(other) is None:
            threading.Thread(target=look_up, daemon=True).start()

    def _make_agent(self, host: str, seconds: float) -> RemoteHost:
        """Make an agent of a host, which must answer within `seconds` once it is started."""
        number, self._numbered = self._numbered, self._numbered + 1
        if self._cluster is not None:
            return self._cluster.make_agent(number, host)
        place = HostRanks(host, (), self._names.is_here(host))
        return RemoteHost(number, place, agent_command(place, self._options.reach, seconds), tied=False)

    def _check_heartbeat(self, agent: RemoteHost, message: Message) -> None:
        message.get_seconds("at")  # the renewer has confirmed it

    def _note_refusal(self, agent: RemoteHost, message: Message) -> None:
        host, text = agent.name, message.get_text("text")
        self._remove_agent(host).hang_up()
        self._loop.close_later(agent)
        self._listener.host_refused(host, text)

    def _note_ready(self, agent: RemoteHost, message: Message) -> None:
        where, address, summary = (message.get_text(name) for name in ("where", "address", "summary"))
        agent.ready = True
        self._patience[agent.name].reset(self._lease)
        self._where[agent.name], self._addresses[agent.name] = where, address
        if not self._options.quiet:
            self._driver.setup.say(f"{agent.name}: {summary}")
        self._loop.send(agent, "start")
        for fields in self._waiting.pop(agent.name):
            self._loop.send(agent, "launch", **fields)
        self._waiting[agent.name] = []

    # ---- workers of lost agents

    def _give_up_agent(self, agent: RemoteHost) -> _Inquiry:
        """Give an agent up, and return the inquiry on its workers.

        Its workers run at most until the lease, counted from the agent's last heartbeat, has expired.
        """
        host = agent.name
        heard = self._renewer.stop(agent.channel)
        spent = 0.0 if heard is None else time.monotonic() - heard
        patience = Patience(max(MARGIN, self._lease + MARGIN - spent))
        inquiry = _Inquiry(agent, self._where.get(host, ""), self._running[host], patience)
        self._remove_agent(host).give_up()
        self._loop.close_later(agent)
        return inquiry

    def _start_inquiry(self, inquiry: _Inquiry) -> None:
        """Start another agent that makes sure that the workers of a lost one do not run."""
        agent = inquiry.agent
        if inquiry.workers and not agent.ready:  # it never got the order to start them
            self._listener.workers_cleared(list(inquiry.workers))
        if not inquiry.workers or not agent.ready:
            return
        inquirer = self._make_agent(agent.name, max(inquiry.patience.seconds_left(), self._seconds))
        self._inquiries[inquirer] = inquiry
        self._loop.start(inquirer)
        if inquirer.trouble:
            self._close_inquirer(inquirer)
            return
        workers = [process for process in inquiry.workers.values() if process]
        job = self._driver.setup.job.name
        self._loop.send(inquirer, "confirm_dead", job=job, host=agent.number, where=inquiry.where, workers=workers)

    def _end_inquiry(self, inquirer: RemoteHost, message: Message) -> None:
        inquiry = self._inquiries[inquirer]
        self._close_inquirer(inquirer)
        if message.kind == "clear":
            self._listener.workers_cleared(list(inquiry.workers))

    def _close_inquirer(self, inquirer: RemoteHost) -> None:
        del self._inquiries[inquirer]
        self._loop.close_later(inquirer)  # before hang_up, which closes the descriptor by which the loop knows it
        inquirer.hang_up()

    def _remove_agent(self, host: str) -> RemoteHost:
        agent = self._agents.pop(host)
        del self._patience[host], self._waiting[host], self._running[host]
        self._where.pop(host, None)
        self._loop.unregister_host(agent)
        self._driver.forget_agent(agent)
        agent.trouble = agent.trouble or "given up"
        return agent
