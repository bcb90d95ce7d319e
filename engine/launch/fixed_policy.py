"""Policy of a fixed job on several hosts: all ranks start once all agents are ready, and end when one fails.

Each agent ends its own ranks in the stages of `process.supervisor`. The policy sends agents the events of other hosts:
the first failure, the user's signals, the end of all ranks.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..config.forms import MOST_PORTS
from ..exit_report.report import ExitReport
from ..host import network
from ..host.patience import Patience
from ..text import readable
from .driver import Driver, Handler, Interrupted, JobPolicy
from .errors import LaunchError
from .hosts.channel import CODES, PIDS, Message
from .hosts.host_list import reachable_address
from .hosts.remote import RemoteHost, agent_command
from .process.rank_end import RankEnd, describe_code
from .process.supervisor import Outcome

OTHERS = 2.0  # seconds to wait for further failed hosts after the first, so that one error names them all
MARGIN = 15.0  # seconds beyond the grace periods in which agents must report the end of their ranks
COPIED_EVERY = 1.0  # seconds between two copies of all pages of counters
LOOK = 0.5  # longest seconds between two calls of `advance_job`


class FixedPolicy(JobPolicy):
    """Policy of a job whose ranks are never replaced; the driver's options must have `places`."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        setup = self._setup
        self._hosts = [
            RemoteHost(number, place, agent_command(place, setup.options.reach, setup.seconds))
            for number, place in enumerate(setup.options.places)
        ]
        self._by_rank = {rank: host for host in self._hosts for rank in host.place.ranks}
        self._ready: dict[int, dict[str, Any]] = {}
        self._ends: dict[int, RankEnd] = {}
        self._patience: Patience | None = None
        self._copied = time.monotonic()
        self._asked: set[int] = set()
        self.handlers: Mapping[str, Handler] = {
            "end": self._note_end,
            "failed": self._note_refusal,
            "ready": self._note_ready,
            "started": self._note_start,
        }

    @property
    def agents(self) -> Collection[RemoteHost]:
        """Agents of all hosts."""
        return self._hosts

    @property
    def hosts(self) -> dict[int, str]:
        """Name of each rank's host."""
        return {rank: place.name for place in self._setup.options.places for rank in place.ranks}

    @property
    def clocks(self) -> dict[int, float]:
        """Seconds by which the launcher's clock is ahead of the clock of each rank's host."""
        return {rank: host.ahead for rank, host in self._by_rank.items()}

    @property
    def shares(self) -> dict[str, tuple[int, int]]:
        """Numbers of ranks and usable processors of each host, by its name; available once agents are ready."""
        return {host.name: (len(host.place.ranks), self._ready[host.number]["processors"]) for host in self._hosts}

    def start(self) -> None:
        """Start the agents, and the ranks as soon as all agents are ready."""
        setup = self._setup
        sizes = [len(place.ranks) for place in setup.options.places]
        for host in self._hosts:
            if setup.options.verbose:
                setup.say(f"{host.name}: {readable.format_ranks(host.place.ranks)}, agent by {host.format_command()}")
            self._driver.start_agent(host, host.place.ranks, sizes=sizes, hub=host.number == 0 and len(self._hosts) > 1)
        self._await_agents()
        self._start_ranks()

    def advance_job(self) -> float | None:
        """Give up agents that are late, and ask for counters; return None once all ranks have ended."""
        if self._patience is not None and not self._patience.seconds_left():
            self._give_up()
        if len(self._ends) == self._setup.job.size:
            return None
        if self._setup.pages and time.monotonic() - self._copied > COPIED_EVERY:
            self._copied = time.monotonic()
            self._driver.loop.tell("pages")
        return LOOK if self._patience is None else self._patience.wait()

    def owned_numbers(self, agent: RemoteHost) -> Collection[int]:
        """Return the ranks of an agent's host."""
        return agent.place.ranks

    def is_running(self, number: int) -> bool:
        """Return whether a rank has been started and has not ended."""
        return self._driver.started and number not in self._ends

    def make_outcome(self) -> Outcome:
        """Return the ends of all ranks."""
        ends = [self._ends[rank] for rank in sorted(self._ends)]
        return Outcome(ends, self._driver.signum, self._driver.hurried)

    # ---- the start

    def _await_agents(self) -> None:
        """Wait until all agents are ready; a `LaunchError` names all hosts that fail within `OTHERS` of the first."""
        seconds, others = self._setup.seconds, None
        patience = Patience(seconds)
        while not all(host.ready or host.trouble for host in self._hosts):
            self._driver.loop.step(patience.wait())
            if self._driver.signum is not None:
                raise Interrupted(self._driver.signum)
            if others is None and any(host.trouble for host in self._hosts):
                others = Patience(OTHERS)
            if not patience.seconds_left() or (others is not None and not others.seconds_left()):
                break
        late = [host for host in self._hosts if not host.ready and not host.trouble]
        if not patience.seconds_left():
            for host in late:
                host.trouble = f"did not answer within {seconds:g} s"
        troubled = [host for host in self._hosts if host.trouble]
        if troubled:
            raise LaunchError(_describe_troubles(troubled, len(self._hosts)))

    def _start_ranks(self) -> None:
        """Send all agents the hub's address and the order to start their ranks."""
        driver, setup, ready = self._driver, self._setup, self._ready[0]
        address = str(ready["address"]) or self._reached_by()
        hub = f"[{address}]:{ready['hub']}" if ":" in address else f"{address}:{ready['hub']}"
        for rank in range(setup.job.size):
            driver.output.open(rank)
        driver.start_output()  # all agents are started, so threads may begin
        for host in self._hosts:
            if not setup.options.quiet:
                setup.say(f"{host.name}: {self._ready[host.number]['summary']}")
            driver.loop.send(host, "start", hub=hub if ready["hub"] else "", address=address, port=ready["port"])
        for rank in range(setup.job.size):
            setup.note_start(rank)

    def _reached_by(self) -> str:
        """Return the name or address by which other hosts reach the first one."""
        first, *others = self._setup.options.places
        if not others:
            return first.address
        address = reachable_address(first, (network.own_address(place.address) for place in others))
        if address is None:
            raise LaunchError(
                f"--hosts: other hosts cannot reach {first.name!r}, and there is no way to {others[0].name!r} that "
                "would tell the address of this one: give it by the name or address that others know"
            )
        return address

    # ---- messages

    def _note_ready(self, host: RemoteHost, message: Message) -> None:
        ports = {name: message.get_number(name, 0, MOST_PORTS) for name in ("hub", "port")}
        host.ready = True
        self._ready[host.number] = message.head | ports | {"processors": message.get_number("processors", 1)}

    def _note_refusal(self, host: RemoteHost, message: Message) -> None:
        """Note that an agent cannot start its ranks, either before any rank of the job is started or afterwards."""
        text = str(message.head["text"])
        if not self._driver.started:
            host.trouble = text
            return
        self._driver.refuse_job(f"{host.name}: {text}")

    def _note_start(self, host: RemoteHost, message: Message) -> None:
        rank = self._driver.check_number(host, message, "rank")
        pid, cpus = message.get_number("pid", *PIDS), message.head["cpus"]
        self._driver.say_started(f"rank {rank}", rank, pid, cpus, f" on {host.name}")

    def _note_end(self, host: RemoteHost, message: Message) -> None:
        """Record the end of a rank, with its time by the launcher's clock."""
        driver, code, now = self._driver, message.get_number("code", *CODES), time.time()
        rank = driver.check_number(host, message, "rank")
        host.ahead = now - message.get_seconds("now")
        by_launcher = bool(message.head["by_launcher"]) and (driver.ending or driver.signum is not None)
        report = ExitReport.parse(message.body)
        self._ends[rank] = RankEnd(rank, code, now - message.get_seconds("age"), by_launcher, report=report)
        host.alive.discard(rank)
        driver.output.flush(rank)
        if code != 0:
            self._end_ranks(f"after the first rank failed (rank {rank}, {describe_code(code)})")
        stalled = report.stalled_rank if code != 0 else None
        if stalled in self._by_rank and stalled not in self._asked:
            self._asked.add(stalled)
            driver.loop.send(self._by_rank[stalled], "where", rank=stalled)

    # ---- the ending

    def end_by(self, signum: int, again: bool) -> None:
        """Allow the ranks the grace period, or no time if it was not the first signal."""
        if self._driver.started:
            self._patience = Patience(MARGIN if again else self._setup.options.grace + MARGIN)

    def _end_ranks(self, why: str) -> None:
        """End the ranks on all hosts after a failure on one; does nothing if the ending has begun."""
        if self._driver.begin_ending():
            self._patience = Patience(2 * self._setup.options.grace + MARGIN)
            self._driver.loop.tell("end", why=why)

    def agent_lost(self, agent: RemoteHost, how: str) -> None:
        """Record that an agent is lost, and with it its ranks, whose exit codes cannot be known."""
        driver, host = self._driver, agent
        if host.trouble or (host.done and not host.alive):
            return
        said = host.last_output()
        if not driver.started:
            host.trouble = f"{how}; it said: {said}" if said else f"{how} and said nothing"
            return
        host.trouble = how
        ranks = f"; {readable.format_ranks(host.alive)} with it" if host.alive else ""
        self._setup.say(f"{host.name} was lost: its agent {how}{ranks}" + (f"; it said: {said}" if said else ""))
        now = time.time()
        by_launcher = driver.signum is not None or driver.hurried
        for rank in host.alive:
            self._ends[rank] = RankEnd(rank, -signal.SIGKILL, now, by_launcher, lost=how)
            driver.output.flush(rank)
        if host.alive:
            self._end_ranks(f"after {host.name} was lost")
        host.alive.clear()

    def _give_up(self) -> None:
        """Treat agents whose ranks have not ended in time as lost."""
        self._patience = None
        for host in self._hosts:
            if not host.trouble and host.alive:
                self._driver.loop.unregister_host(host)
                self.agent_lost(host, "did not answer in time")


def _describe_troubles(hosts: Sequence[RemoteHost], of: int) -> str:
    """Return the error text on hosts that cannot take part, each with its output and the command that was tried."""
    lines = [host.describe_trouble() for host in hosts]
    if len(lines) == 1:
        return lines[0]
    return f"{len(lines)} of {of} hosts cannot take part\n  " + "\n  ".join(lines)
