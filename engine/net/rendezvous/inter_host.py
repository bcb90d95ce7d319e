"""The rendezvous between hosts: the part that all leaders have in common, on the hub and elsewhere.

The *hub* is rank 0 on its host. Each other leader connects to it, and reports the ranks that it has gathered. When all
have come, the hub compares them and answers with the layout. Then leaders open the *lanes*: `sockets_per_lane`
connections for each pair of ranks that exchange data. The leader of the host with the higher number connects, that of
the lower one accepts. Each rank receives its connections from its leader. The connection between a leader and the hub
stays open as a *trunk*. With many hosts the trunks go to ranks of the hub's host that do not coordinate.

    leader -> hub    come: the processes of its host so far; crew: all their hellos, and its address for lanes
    hub -> leader    layout: each rank's host, pid and processors; each host's address for lanes; the kernels; the
                     seconds left
    leader -> hub    ready: its memory is made, its lanes are open
    hub -> leader    go: all are ready
                     either way, at any time, a refusal, which every rank raises

Ports are open only while ranks gather, and only in a job with a secret.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from ...config.world import World
from ...errors import RendezvousError
from ...host import linux, network
from ...host.network import Address
from ...host.patience import Patience
from ...host.sockets import retry_short
from ...text.logs import logger
from ...text.readable import format_ranks, plain_lines
from ..acceptor import WITHOUT_SECRET, Acceptor, Handler
from ..connection import Connection
from ..event_loop import CoroutineLoop
from ..frames import MALFORMED
from .layout import Layout
from .messages import KINDS, Hello, derive_leaders_key

STRANGERS = 128  # most unauthenticated connections at once; with more, one of them is closed
SECONDS = 1e9  # longest time limit of a start
REFUSAL_SECONDS = 2.0  # seconds in which the other side receives a refusal


def accept_ranks(loop: CoroutineLoop, listeners: Sequence[socket.socket], key: bytes, handle: Handler) -> Acceptor:
    """Open a port for ranks of other hosts; parameters are those of `Acceptor`."""

    def warn_once(host: str) -> None:
        acceptor.on_stranger = lambda _: None
        logger.warning(
            "somebody at %s %s, and is turned away: ENGINE_SECRET and ENGINE_JOB must be the same on all hosts, and "
            "the port this job's alone",
            host,
            WITHOUT_SECRET,
        )

    def end_start(error: OSError) -> None:
        raise RendezvousError(f"no other host can be heard: {linux.explain_refusal('accept', error)}") from None

    acceptor = Acceptor(loop, listeners, key, handle, STRANGERS)
    acceptor.on_stranger, acceptor.on_exhausted = warn_once, end_start
    return acceptor


@dataclass(frozen=True)
class HubDecision:
    """The hub's decisions, which it sends to every leader."""

    hosts: list[int]  # host number of each rank
    names: list[str]  # name of each host in messages
    # Address of each host at which its leader accepts lanes; None for the hub: the address of the trunk
    lane_addresses: list[Address | None]
    pids: list[int]  # process id of each rank
    processors: list[list[int]]  # processors to which each rank is bound
    kernels: str | None  # best kernels that all ranks have; None if all would choose the same anyway
    seconds: float  # time in which all lanes must be open
    generation: int  # number of the world

    @classmethod
    def read(cls, message: dict[str, Any]) -> HubDecision:
        """Parse and validate a message of the hub; ValueError if no hub sends such a message."""
        try:
            lane_addresses = [
                None if address is None else network.read_address(address) for address in message["lane_addresses"]
            ]
            found: dict[str, Any] = {entry.name: message[entry.name] for entry in fields(cls)} | {
                "lane_addresses": lane_addresses
            }
            hosts = len(found["names"])
            sound = (
                len(found["hosts"]) == len(found["pids"]) == len(found["processors"])
                and len(lane_addresses) == hosts
                and all(isinstance(name, str) for name in found["names"])
                and all(type(host) is int for host in found["hosts"])
                and {*found["hosts"]} == {*range(hosts)}
                and all(
                    type(number) is int and 0 <= number < 1 << 31 for number in (*found["pids"], found["generation"])
                )
                and all(type(number) is int and number >= 0 for each in found["processors"] for number in each)
                and isinstance(found["kernels"], str | None)
                and 0 < found["seconds"] < SECONDS
            )
        except MALFORMED:
            sound = False
        if not sound:
            raise ValueError("no decision of a hub")
        return cls(**found)


class InterHostRendezvous:
    """The rendezvous of a leader with other leaders, from `begin_meeting` to `close`.

    Its owner calls `handle_events` repeatedly.
    """

    def __init__(self, world: World, patience: Patience, timeout: float, interface: str | None, sockets: int) -> None:
        self.world = world
        self.patience = patience  # time limit of the whole rendezvous; messages of the hub may change it
        self.timeout = timeout  # time limit at first, in seconds
        self.key = derive_leaders_key(world)
        self.name = world.host_name or socket.gethostname()
        self.loop = CoroutineLoop()
        self.acceptor: Acceptor | None = None
        self.decision: HubDecision | None = None
        self.prepared = False  # whether the memory of this host's ranks is made
        self.done = False  # whether every host is ready
        self.open: dict[tuple[int, int, int], Connection] = {}  # lanes, by the rank here, the rank there, and number
        self.interface = interface  # interface or address of this host to which other hosts open lanes
        self.sockets = sockets  # number of connections of a lane
        self.failures: dict[int, str] = {}  # rank -> why it cannot start

    def note_failure(self, hello: Hello) -> None:
        """Note the failure of a rank of this host, if it has one."""
        if hello.failure:
            self.failures[hello.rank] = f"{hello.failure} on {self.name}"

    def begin_meeting(self) -> None:
        """Begin to listen for other leaders, or to call the hub.

        A port that is taken, or an interface that this host does not have, is a RendezvousError.
        """
        raise NotImplementedError

    def chosen_address(self) -> str | None:
        """Return the address of the chosen interface; None if none was chosen. Raises as `begin_meeting` does."""
        try:
            return None if self.interface is None else network.interface_address(self.interface)
        except ValueError as error:
            raise RendezvousError(f"rank {self.world.rank} on {self.name}: ENGINE_INTERFACE: {error}") from None

    def record_rank(self, hello: Hello) -> None:
        """Record a rank of this host that has come."""
        raise NotImplementedError

    def record_all_ranks(self, hellos: list[Hello]) -> None:
        """Record that all ranks of this host have come."""
        raise NotImplementedError

    def make_timeout_error(self, absent: int) -> RendezvousError:
        """Return the error of a timeout; `absent` is the number of this host's processes that have not come."""
        raise NotImplementedError

    def list_trunks(self) -> dict[int, Connection]:
        """Return the connections to leaders by host number: on the hub to all others, elsewhere to the hub."""
        raise NotImplementedError

    def fileno(self) -> int:
        """Return a descriptor that is readable when `handle_events` has work to do."""
        return self.loop.fileno()

    def wait(self) -> float:
        """Return the seconds that may pass before `handle_events` must be called again."""
        return min(self.patience.wait(), self.loop.next_timeout())

    def handle_events(self) -> None:
        """Handle what is ready, without blocking. A `RendezvousError` that it raises is for all ranks."""
        self.loop.run_ready()

    def record_memory(self) -> None:
        """Record that the memory of this host's ranks is made."""
        self.prepared = True

    @cached_property
    def layout(self) -> Layout:
        """Distribution of the ranks over hosts; available once the hub has decided."""
        assert self.decision is not None
        return Layout(tuple(self.decision.hosts))

    @cached_property
    def lanes(self) -> list[tuple[int, int]]:
        """Lanes of this host as pairs: a rank here and a rank elsewhere; available once the hub has decided."""
        crew = self.layout.crews[self.layout.hosts[self.world.rank]]
        return [(rank, other) for rank in crew for other in self.layout.lane_ranks(rank)]

    def lanes_are_open(self) -> bool:
        """Return whether all lanes of this host are open."""
        return len(self.open) == len(self.lanes) * self.sockets

    def answer_lane(self, connection: Connection, greeting: dict[str, Any], crew: Collection[int]) -> None:
        """Accept a lane that another leader has opened to one of the ranks here, `crew`."""
        numbers: list[Any] = [greeting.get(name) for name in ("to", "rank", "number")]
        if greeting.get("role") != "lane" or not all(type(number) is int for number in numbers):
            raise ValueError("a greeting of no lane")
        lane = numbers[0], numbers[1], numbers[2]
        if lane[0] not in crew:
            raise RendezvousError(
                f"rank {lane[1]} wants to reach rank {lane[0]} at {connection.here}, and comes to "
                f"{format_ranks(crew)} on {self.name}: two hosts have that address. Set ENGINE_INTERFACE to the "
                "interface between the hosts."
            )
        if lane in self.open:
            raise RendezvousError(
                f"connection {lane[2]} of rank {lane[0]} and rank {lane[1]} was opened twice, now from "
                f"{connection.there}"
            )
        self.open[lane] = connection
        connection.send_message({})

    def drop_unauthenticated(self) -> bool:
        """Close an unauthenticated connection to free a descriptor; return False if there is none."""
        return self.acceptor is not None and self.acceptor.drop_unauthenticated()

    def send_refusal(self, error: RendezvousError) -> None:
        """Send the other leaders the error with which this start fails."""
        message = make_refusal(error)
        await_closing([trunk for trunk in self.list_trunks().values() if try_to_send(trunk, message)])

    def close(self) -> None:
        """Close the port, and every connection that was not handed over."""
        self.loop.close()
        if self.acceptor is not None:
            self.acceptor.close()
        for connection in (*self.open.values(), *self.list_trunks().values()):
            connection.close()

    def detach_trunks(self, rank: int) -> dict[int, int]:
        """Hand the descriptors of the trunks of `rank` over to the caller, by the rank elsewhere."""
        taken: dict[int, int] = {}
        connections = self.list_trunks()
        for there in self.layout.trunk_ranks(rank):
            taken[there] = connections[self.layout.hosts[there]].socket.detach()
        return taken

    def detach_lanes(self, rank: int) -> dict[int, list[int]]:
        """Hand the descriptors of the lanes of `rank` over to the caller, by the rank elsewhere."""
        taken: dict[int, list[int]] = {}
        own = {lane: connection.socket for lane, connection in sorted(self.open.items()) if lane[0] == rank}
        for (_, there, _), connection in own.items():
            taken.setdefault(there, []).append(connection.detach())
        return taken


def make_refusal(error: RendezvousError) -> dict[str, Any]:
    """Return the message that makes other ranks raise an error by `raise_refusal`."""
    kind = next((name for name, kind in KINDS.items() if type(error) is kind), RendezvousError.__name__)
    return {"refused": kind, "message": str(error), "absent": error.absent}


def raise_refusal(message: dict[str, Any]) -> None:
    """Raise the error of a message, if it is a refusal."""
    if "refused" in message:
        kind = KINDS.get(str(message["refused"]), RendezvousError)
        error = kind(plain_lines(str(message.get("message"))))
        absent = message.get("absent")
        error.absent = absent if type(absent) is int and -1 <= absent < 1 << 16 else None
        raise error


def try_to_send(connection: Connection, message: dict[str, Any]) -> bool:
    """Send a last message, and return whether that succeeded."""
    try:
        connection.send_message(message)
    except OSError:
        return False
    return True


def await_closing(connections: Iterable[Connection]) -> None:
    """Wait up to `REFUSAL_SECONDS` seconds until the other sides have received the last message and closed.

    If a connection is closed with bytes unread, data that it has sent is lost.
    """
    end = time.monotonic() + REFUSAL_SECONDS
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            try:
                connection.socket.shutdown(socket.SHUT_WR)
            except OSError:
                continue
            selector.register(connection.socket, selectors.EVENT_READ)
        while selector.get_map() and (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                assert isinstance(key.fileobj, socket.socket)
                try:
                    if retry_short(key.fileobj.recv, 1 << 16):
                        continue
                except BlockingIOError:
                    continue
                except OSError:
                    pass
                selector.unregister(key.fileobj)
