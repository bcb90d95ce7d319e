"""Connections of a process set whose ranks are on several hosts; its ranks open them while the set is formed."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

from ...config.world import World
from ...errors import RendezvousError
from ...host import network
from ...host.network import Address, read_address
from ...host.patience import Patience
from ...text.bounded_reader import get_text, get_whole
from ..acceptor import Acceptor
from ..connection import Connection, connect_again
from ..event_loop import Coroutine, CoroutineLoop
from ..frames import parse
from ..stream import AuthenticationError, derive_key
from .inter_host import accept_ranks
from .layout import Layout
from .messages import Gathered

Exchange = Callable[[bytes], list[bytes]]
Ended = Callable[[], bool]
Connections = tuple[dict[int, list[int]], dict[int, int]]
_Name = tuple[str, int, int]  # of a connection: its kind, the rank at the other end, and its number


class SetConnector:
    """Opener of the connections of process sets, in a world on several hosts.

    `gathered` is the result of the world's rendezvous, which keeps its lanes. A set's ranks have `timeout` seconds to
    connect.
    """

    def __init__(self, world: World, gathered: Gathered, timeout: float) -> None:
        self._rank = world.rank
        self._layout = gathered.layout
        self._key = derive_key(world.proof, f"process sets of world {gathered.generation}")
        self._timeout = timeout
        first = next(iter(gathered.lanes.values()))
        self._sockets = len(first)
        lane = socket.socket(fileno=first[0])
        self._own = network.address_of(lane.getsockname()).host
        lane.detach()

    @property
    def hosts(self) -> tuple[int, ...]:
        """Host of each rank of the world."""
        return self._layout.hosts

    def open(self, ranks: tuple[int, ...], name: str, exchange: Exchange, ended: Ended) -> Connections:
        """Connect the ranks of a set. Collective over those that take part in `exchange`.

        `ranks` are world ranks in the order of their numbers in the set. `name` is equal on all ranks and used for no
        other set of this world. `exchange` takes this rank's bytes, and returns those of each of `ranks`. `ended`
        returns whether the world has ended, so that no rank can connect any more.

        The result, lanes and trunks, has descriptors by rank of the set, which the caller owns: one for a trunk, and
        several for a lane, as many as the world's lanes have. It is empty on ranks outside the set, and if the set is
        on one host. A RendezvousError says that a rank cannot be reached, or that the world has ended.
        """
        hosts: dict[int, int] = {}
        layout = Layout(tuple(hosts.setdefault(self._layout.hosts[rank], len(hosts)) for rank in ranks))
        if len(hosts) == 1:
            return {}, {}
        key = derive_key(self._key, name)
        me = ranks.index(self._rank) if self._rank in ranks else -1
        meeting = _SetRendezvous(layout, me, key, self._sockets)
        try:
            said = meeting.listen(self._own)  # A rank that cannot take part says so to those that wait for it.
            addresses = exchange(json.dumps(said).encode())
            meeting.connect(addresses, Patience(self._timeout), ended)
            return meeting.detach_connections()
        finally:
            meeting.close()


class _SetRendezvous:
    """State of one rank while the ranks of a set connect. Ranks call those on hosts of lower number."""

    def __init__(self, layout: Layout, me: int, key: bytes, sockets: int) -> None:
        self.layout, self.me, self.key = layout, me, key
        self.loop = CoroutineLoop()
        self.connections: dict[_Name, Connection] = {}
        self.wanted = _name_connections(layout, me, sockets) if me >= 0 else set()
        self.failures: dict[int, str] = {}  # rank -> why the call to it failed
        self.acceptor: Acceptor | None = None

    def listen(self, own: str) -> Address | str | None:
        """Open a port at address `own`, if another rank is to call this one.

        Returns its address, None without one, or a text about why it cannot be opened.
        """
        if not any(self._is_called_by(other) for _, other, _ in self.wanted):
            return None
        try:
            listener = network.listen(own, 0, backlog=256)
        except OSError as error:
            return f"can open no port at {own}: {error.strerror or error}"
        self.acceptor = accept_ranks(self.loop, [listener], self.key, self._take_connection)
        return self.acceptor.address

    def _is_called_by(self, other: int) -> bool:
        return self.layout.hosts[self.me] < self.layout.hosts[other]

    def connect(self, addresses: list[bytes], patience: Patience, ended: Ended) -> None:
        """Call and answer until all connections are open; raise a `RendezvousError` if one fails, or the world ends."""
        told = _parse_addresses(addresses)
        for name in sorted(self.wanted):
            if not self._is_called_by(name[1]):
                address = told[name[1]]
                if address is None:
                    raise RendezvousError(f"rank {name[1]} of the set has said no address for a {name[0]}")
                self.loop.start(self._open_connection(name, address, patience))
        while missing := self.wanted - self.connections.keys():
            if ended():
                raise RendezvousError("the world has ended")
            if self.failures or not patience.seconds_left():
                lost = sorted({(kind, other) for kind, other, _ in missing})
                raise RendezvousError("; ".join(self._describe_failure(kind, other) for kind, other in lost))
            self.loop.poll(min(patience.wait(), self.loop.next_timeout()))
            self.loop.run_ready()

    def _describe_failure(self, kind: str, other: int) -> str:
        return f"no {kind} to rank {other} of the set: {self.failures.get(other, 'it did not come in time')}"

    def _open_connection(self, name: _Name, address: Address, patience: Patience) -> Coroutine[None]:
        kind, other, number = name
        greeting = {"kind": kind, "rank": self.me, "to": other, "number": number}
        try:
            self.connections[name] = yield from connect_again(address, self.key, greeting, patience)
        except AuthenticationError:
            self.failures[other] = f"whoever answers at {address} is not of this job"
        except (OSError, ValueError) as error:
            self.failures[other] = f"{address}: {error}"

    def _take_connection(self, connection: Connection, greeting: dict[str, Any]) -> None:
        found = get_text(greeting, "kind"), get_whole(greeting, "rank"), get_whole(greeting, "number")
        if greeting.get("to") != self.me or found not in self.wanted or found in self.connections:
            connection.close()
            return
        self.connections[found] = connection
        connection.send_message({})

    def detach_connections(self) -> Connections:
        """Hand the descriptors of lanes and trunks, by rank, over to the caller."""
        lanes: dict[int, list[int]] = {}
        trunks: dict[int, int] = {}
        for kind, other, number in sorted(self.connections):
            descriptor = self.connections.pop((kind, other, number)).socket.detach()
            if kind == "trunk":
                trunks[other] = descriptor
            else:
                lanes.setdefault(other, []).append(descriptor)
        return lanes, trunks

    def close(self) -> None:
        """Close the port, and every connection that was not handed over."""
        self.loop.close()
        if self.acceptor is not None:
            self.acceptor.close()
        for connection in self.connections.values():
            connection.close()


def _parse_addresses(texts: list[bytes]) -> list[Address | None]:
    """Parse what the ranks of a set have said; raise a `RendezvousError` if one of them cannot take part."""
    found: list[Address | None] = []
    for rank, text in enumerate(texts):
        try:
            told = parse(text)
            if isinstance(told, str):
                raise RendezvousError(f"rank {rank} of the set {told}")
            found.append(None if told is None else read_address(told))
        except ValueError as error:
            raise RendezvousError(f"rank {rank} of the set has said no address: {error}") from None
    return found


def _name_connections(layout: Layout, rank: int, sockets: int) -> set[_Name]:
    """Return the names of the connections of a rank: its lanes and trunks."""
    lanes = {("lane", other, number) for other in layout.lane_ranks(rank) for number in range(sockets)}
    return lanes | {("trunk", other, 0) for other in layout.trunk_ranks(rank)}
