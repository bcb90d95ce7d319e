"""The ranks of a fixed job on one host, which its agent starts together."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..host import network
from .errors import LaunchError
from .process.guardian import Guardian
from .process.plan import plan
from .process.rank_end import RankEnd
from .process.spawn import RankProcess
from .process.supervisor import Supervisor

if TYPE_CHECKING:
    from .agent import Agent, Handler


class FixedRanks:
    """The ranks of this host, which start and end together; they implement `RankGroup` of the agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._hub: socket.socket | None = None
        self.places = len(agent.crew.ranks)
        self.trouble = ""
        self.lease: float | None = None
        self.handlers: Mapping[str, Handler] = {
            "end": lambda message: agent.supervisor.end(message.get_text("why")),
            "pages": lambda _: agent.copies.send(agent.channel),
            "where": lambda message: agent.supervisor.ask_where(message.get_number("rank")),
        }

    def prepare(self, address: str) -> dict[str, Any]:
        """Make the pages of counters, and open the socket on which rank 0 listens, if it is here."""
        agent = self._agent
        if agent.head["counted"]:
            for rank in agent.crew.ranks:
                agent.make_page(rank)
        if agent.head["hub"]:
            self._hub = _listen(address)
        return {"hub": self._hub.getsockname()[1] if self._hub else 0}

    def make_supervisor(self, guardian: Guardian, wakeup: socket.socket) -> Supervisor:
        """Implement `RankGroup.make_supervisor`."""
        agent = self._agent
        return Supervisor(agent.loop, guardian, wakeup, agent.grace, agent.show_line, self._send_end)

    def start(self, head: dict[str, Any]) -> None:
        """Start all ranks. The fields of `start` are `hub`, `address` and `port` of the job."""
        agent = self._agent
        agent.job = replace(agent.job, **head, counters=[agent.make_page(rank) for rank in agent.pages])
        for rank_plan in plan(agent.job, agent.allotment, agent.environment, agent.crew):
            inherited: tuple[int, ...] = ()
            if self._hub is not None and rank_plan.rank == 0:
                inherited = (self._hub.fileno(),)
                rank_plan.environment["ENGINE_HUB_FD"] = str(self._hub.fileno())
            rank = agent.start_rank(rank_plan, rank_plan.rank, inherited)
            if inherited:
                self.close()  # only rank 0 holds it, so that it closes when rank 0 ends
            agent.channel.send("started", rank=rank.number, pid=rank.pid, cpus=rank_plan.cpus)

    def close(self) -> None:
        """Close this process's copy of the socket."""
        if self._hub is not None:
            self._hub.close()
            self._hub = None

    def _send_end(self, rank: RankProcess, end: RankEnd) -> None:
        """Send the launcher a rank's exit code, the age of its end in seconds, and its exit report."""
        now = time.time()
        told = {
            "rank": rank.number,
            "code": end.code,
            "by_launcher": end.by_launcher,
            "age": now - end.time,
            "now": now,
        }
        self._agent.channel.send("end", end.report.to_bytes(), **told)


def _listen(address: str) -> socket.socket:
    """Open the socket on which rank 0 listens, on `address`, or on all addresses if that is empty."""
    try:
        return network.listen(address or None, 0, backlog=256)
    except OSError as error:
        raise LaunchError(f"no socket for the other hosts can be opened: {error.strerror}") from error
