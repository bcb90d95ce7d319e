"""Leader of a host without rank 0: it calls the hub, reports its ranks, and opens lanes to hosts of lower number."""

from __future__ import annotations

import os
from typing import Any

from ...config.world import World
from ...errors import RendezvousError
from ...errors.formatting import exception_text
from ...host import network
from ...host.network import Address
from ...host.patience import Patience
from ...host.sockets import wait_readable
from ...text import readable
from ...text.bounded_reader import ReadError, get_number
from ...text.logs import logger
from ..connection import GRACE, Connection, connect, connect_again
from ..event_loop import Coroutine, Wait
from ..stream import AuthenticationError
from .inter_host import (
    REFUSAL_SECONDS,
    SECONDS,
    STRANGERS,
    HubDecision,
    InterHostRendezvous,
    accept_ranks,
    raise_refusal,
)
from .messages import Hello

_TRIED = 4  # most addresses of the hub that a message names
_ANSWERING = 4 * GRACE  # longest wait for the answer of a side that has sent its opening, in seconds
_SOON = 5.0  # seconds after which a leader that has not reached the hub logs a warning


class HubClient(InterHostRendezvous):
    """The lowest rank of its host; it takes the parameters of `InterHostRendezvous`."""

    def __init__(self, world: World, patience: Patience, timeout: float, interface: str | None, sockets: int) -> None:
        super().__init__(world, patience, timeout, interface, sockets)
        assert world.hub is not None
        self.address = world.hub
        self.connection: Connection | None = None
        self.hub_name = ""
        self.pids = {world.rank: os.getpid()}
        self.hellos: list[Hello] = []
        self.said_ready = False
        self.tried: dict[str, str] = {}  # address of the hub -> result of the last try
        self.calling: Coroutine[None] | None = None  # the conversation with the hub

    def begin_meeting(self) -> None:
        """Begin calling the hub; raises as `InterHostRendezvous.begin_meeting` does."""
        self.calling = self._talk_to_hub(self.chosen_address())
        self.loop.start(self.calling)

    def record_rank(self, hello: Hello) -> None:
        """Record a rank of this host that has come, and report it to the hub."""
        self.pids[hello.rank] = hello.pid
        self.note_failure(hello)
        self._report_processes()

    def record_all_ranks(self, hellos: list[Hello]) -> None:
        """Record that all ranks of this host have come, and send their hellos to the hub."""
        self.hellos = hellos
        self._report_crew()

    def list_trunks(self) -> dict[int, Connection]:
        """Return the connection to the hub; empty before it is open."""
        return {} if self.connection is None else {0: self.connection}

    def record_memory(self) -> None:
        """Record that the memory of this host's ranks is made."""
        super().record_memory()
        self._report_ready()

    def make_timeout_error(self, absent: int) -> RendezvousError:
        """Return the error of a timeout; `absent` is the number of this host's processes that have not come."""
        if self.calling is not None:
            self.loop.cancel(self.calling)
        if self.connection is not None:
            return RendezvousError(f"rank 0 on {self.hub_name} fell silent while the ranks were gathering")
        tried = self._describe_tries()
        text = (
            f"rank 0 did not come within {self.timeout:g} s (ENGINE_START_TIMEOUT): rank {self.world.rank} on "
            f"{self.name} did not reach it at {self.address}"
        )
        if absent:
            tried.append(f"of {self.name} itself, {absent} of {self.world.local_size} processes did not come either")
        return RendezvousError("\n  ".join([text, *tried]), absent=0)

    def _describe_tries(self) -> list[str]:
        tried = [f"{address}: {what}" for address, what in list(self.tried.items())[:_TRIED]]
        if any("loopback" in each for each in tried):
            tried.append("an address of the loopback never leads to another host: see /etc/hosts, or set ENGINE_HUB")
        return tried

    def send_refusal(self, error: RendezvousError) -> None:
        """Tell the hub why this start fails. If a call is still pending, wait `REFUSAL_SECONDS` for its answer."""
        patience = Patience(REFUSAL_SECONDS)
        try:
            while self.connection is None and self.calling in self.loop and patience.seconds_left():
                wait_readable([self.fileno()], min(patience.wait(), self.loop.next_timeout()))
                self.loop.run_ready()
        except RendezvousError:
            pass  # `error` is the first cause.
        super().send_refusal(error)

    def _talk_to_hub(self, chosen: str | None) -> Coroutine[None]:
        """Call the hub, and handle its messages until all hosts are ready."""
        connection, answer = yield from self._reach_hub()
        self.connection, self.hub_name = connection, readable.replace_unprintable(str(answer.get("name")))
        try:
            seconds = get_number(answer, "seconds", 0, SECONDS)
        except ReadError as error:
            raise self._not_a_hub(error) from None
        self.patience.reset(seconds + 2 * GRACE)  # The hub knows which ranks are missing.
        listener = network.listen(chosen or connection.here.host, 0, self.world.size + STRANGERS)
        self.acceptor = accept_ranks(self.loop, [listener], self.key, self._accept_lane)
        self._report_processes()
        self._report_crew()
        while not self.done:
            try:
                message = yield from connection.receive_message()
            except (OSError, ValueError):
                raise RendezvousError(
                    f"rank 0 on {self.hub_name} ended or was cut off while the ranks were gathering"
                ) from None
            raise_refusal(message)
            if "layout" in message:
                try:
                    decision = HubDecision.read(message["layout"])
                    if len(decision.hosts) != self.world.size:
                        raise ValueError(f"a layout of {len(decision.hosts)} ranks")
                    own = [rank for rank, host in enumerate(decision.hosts) if host == decision.hosts[self.world.rank]]
                    if own != sorted(self.pids):
                        raise ValueError(f"{readable.format_ranks(own)} on {self.name}")
                except ValueError as error:
                    raise self._not_a_hub(error) from None
                self._open_lanes(decision, connection)
            self.done = "go" in message

    def _not_a_hub(self, error: ValueError) -> RendezvousError:
        return RendezvousError(
            f"rank 0 on {self.hub_name} says what no rank 0 says ({error}): install the same version on all hosts"
        )

    def _reach_hub(self) -> Coroutine[tuple[Connection, dict[str, Any]]]:
        """Try all addresses of the hub repeatedly: nothing announces that it has begun to listen."""
        world = self.world
        greeting = {
            "role": "leader",
            "rank": world.rank,
            "size": world.size,
            "processes": world.local_size,
            "pid": os.getpid(),
            "name": self.name,
        }
        pause, answering = 0.01, GRACE
        soon = Patience(_SOON)
        said = False
        while True:
            addresses, unproven = self._resolve_addresses(), 0
            for address in addresses:
                kind = ", on the loopback of this host" if network.is_loopback(address.host) else ""
                try:
                    return (yield from connect(address, self.key, greeting, Patience(GRACE), Patience(answering)))
                except AuthenticationError:
                    unproven += 1
                    self.tried[f"{address}{kind}"] = "whoever listens there does not know this job's secret"
                except (OSError, ValueError) as error:
                    self.tried[f"{address}{kind}"] = _error_text(error)
            if addresses and unproven == len(addresses):  # Else rank 0 may still begin to listen at another address.
                raise RendezvousError(
                    f"rank {world.rank} on {self.name}: whoever listens at {addresses[-1]} for rank 0 does not know "
                    "this job's secret. Are ENGINE_SECRET and ENGINE_JOB the same on all hosts, and is the port free "
                    "for this job?"
                )
            if not said and not soon.seconds_left():
                said = True
                logger.warning(
                    "rank %d on %s has not reached rank 0 at %s yet; it may take %g s (ENGINE_START_TIMEOUT):\n  %s",
                    world.rank,
                    self.name,
                    self.address,
                    self.timeout,
                    "\n  ".join(self._describe_tries()),
                )
            answering = min(2 * answering, _ANSWERING)  # rank 0 may be slow
            yield Wait(Patience(pause))
            pause = min(pause * 1.5, 0.25)

    def _resolve_addresses(self) -> list[Address]:
        """Resolve the addresses at which the hub may listen."""
        found = []
        for host in (self.address.host, *self.address.others):
            try:
                found += network.resolve(host, self.address.port)
            except OSError as error:
                self.tried[host] = f"no such host ({error.strerror})"
        return found

    def _accept_lane(self, connection: Connection, greeting: dict[str, Any]) -> None:
        """Accept a lane from the leader of a host of higher number."""
        self.answer_lane(connection, greeting, self.pids)
        self._report_ready()

    def _open_lanes(self, decision: HubDecision, connection: Connection) -> None:
        """Take the layout, and open lanes to the leaders of hosts of lower number."""
        self.decision = decision
        self.patience.reset(decision.seconds + 2 * GRACE)
        for rank, other in self.lanes:
            host = decision.hosts[other]
            for socket_number in range(self.sockets if host < decision.hosts[rank] else 0):
                lane = (rank, other, socket_number)
                self.loop.start(self._open_lane(lane, host, decision.lane_addresses[host] or connection.there))
        self._report_ready()

    def _open_lane(self, lane: tuple[int, int, int], host: int, address: Address) -> Coroutine[None]:
        assert self.decision is not None
        rank, other, number = lane
        patience = Patience(self.decision.seconds)
        greeting = {"role": "lane", "rank": rank, "to": other, "number": number}
        try:
            self.open[lane] = yield from connect_again(address, self.key, greeting, patience)
        except (OSError, ValueError) as error:
            # A host that fails closes its port before the hub tells the others why: wait for that reason.
            yield Wait(Patience(REFUSAL_SECONDS))
            raise RendezvousError(
                f"rank {rank} on {self.name} cannot reach rank {other} on {self.decision.names[host]} at {address}: "
                f"{_error_text(error)}. Every host must reach every other, also through a firewall: ENGINE_INTERFACE "
                "chooses on which network."
            ) from None
        self._report_ready()

    def _report_ready(self) -> None:
        """If memory and lanes of this host are ready, tell the hub once."""
        if self.said_ready or self.decision is None or not self.prepared or not self.lanes_are_open():
            return
        self.said_ready = True
        self._send_to_hub({"ready": True})

    def _report_processes(self) -> None:
        self._send_to_hub({"come": list(self.pids.items()), "failures": list(self.failures.items())})

    def _report_crew(self) -> None:
        if self.hellos and self.acceptor is not None:
            self._send_to_hub(
                {"crew": [hello.to_message() for hello in self.hellos], "lane_address": list(self.acceptor.address)}
            )

    def _send_to_hub(self, message: dict[str, Any]) -> None:
        """Send a message to the hub, if it is connected."""
        if self.connection is not None:
            try:
                self.connection.send_message(message)
            except OSError:
                return  # Its end will be noticed after its earlier messages are read.


def _error_text(error: Exception) -> str:
    """Return the text of an error: the system's message, the exception's text, or its class name."""
    return (isinstance(error, OSError) and error.strerror) or exception_text(error) or type(error).__name__
