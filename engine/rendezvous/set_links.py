"""Connections of a process set whose ranks are on several hosts: opened while it is formed, by its ranks themselves."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable
from typing import Any

from ..bounded_reader import text, whole
from ..errors import RendezvousError
from ..frames import parse
from ..host import network
from ..host.network import Address, read_address
from ..host.patience import Patience
from ..world import World
from .between import Door
from .layout import Layout
from .links import AGAIN, Link, Unproven, call
from .messages import Gathered
from .talks import Steps, Talks, Wait

Exchange = Callable[[bytes], list[bytes]]
Ended = Callable[[], bool]
Connections = tuple[dict[int, list[int]], dict[int, int]]
_Name = tuple[str, int, int]  # of a connection: what it is, the rank there, and which of several


class SetLinks:
    """Opens connections between ranks of a world on several hosts.

    Parameters
    ----------
    world : World
    gathered : Gathered
        How the world's ranks met. Its lanes still belong to it.
    timeout : float
        Seconds for the ranks of a set to connect.
    """

    def __init__(self, world: World, gathered: Gathered, timeout: float) -> None:
        self._rank = world.rank
        self._layout = gathered.layout
        self._key = world.proof + f"world {gathered.generation}".encode()
        self._timeout = timeout
        self._formed = 0
        first = next(iter(gathered.lanes.values()))
        self._sockets = len(first)
        lane = socket.socket(fileno=first[0])
        self._own = network.address_of(lane.getsockname()).host
        lane.detach()

    def open(self, ranks: tuple[int, ...], exchange: Exchange, ended: Ended) -> Connections:
        """Connect the ranks of a set. Collective over the world.

        Parameters
        ----------
        ranks : tuple of int
            Those of the set, sorted.
        exchange : callable
            Gives a text of every rank of the world to all of them.
        ended : callable
            Whether the world has ended, so that nobody comes any more.

        Returns
        -------
        lanes, trunks : dict
            Descriptors, by rank of the set: of a lane as many as the world's have, of a trunk one; the caller's. Empty
            on other ranks.

        Raises
        ------
        RendezvousError
            A rank of the set was not reached, or the world has ended.
        """
        self._formed += 1
        hosts: dict[int, int] = {}
        layout = Layout(tuple(hosts.setdefault(self._layout.hosts[rank], len(hosts)) for rank in ranks))
        if len(hosts) == 1:
            return {}, {}
        key = hashlib.sha256(self._key + f"process set {self._formed}".encode()).digest()
        me = ranks.index(self._rank) if self._rank in ranks else -1
        meeting = _Meeting(layout, me, key, self._sockets)
        try:
            meeting.listen(self._own)
            told = exchange(json.dumps(meeting.address).encode())
            meeting.connect([told[rank] for rank in ranks], Patience(self._timeout), ended)
            return meeting.taken()
        finally:
            meeting.close()


class _Meeting:
    """One rank while the ranks of a set connect. Of two hosts, the higher one's ranks call."""

    def __init__(self, layout: Layout, me: int, key: bytes, sockets: int) -> None:
        self.layout, self.me, self.key = layout, me, key
        self.talks = Talks()
        self.links: dict[_Name, Link] = {}
        self.wanted = _connections(layout, me, sockets) if me >= 0 else set()
        self.failures: dict[int, str] = {}  # by rank, what came of calling it
        self.door: Door | None = None
        self.address: Address | None = None

    def listen(self, own: str) -> None:
        """Open a port at that address, if somebody is to call."""
        if any(self._answers(other) for _, other, _ in self.wanted):
            listener = network.listen(own, 0, backlog=256)
            self.door = Door(self.talks, [listener], self.key, self._welcome)
            self.address = self.door.address

    def _answers(self, other: int) -> bool:
        return self.layout.hosts[self.me] < self.layout.hosts[other]

    def connect(self, told: list[bytes], patience: Patience, ended: Ended) -> None:
        """Call and answer until all connections are open, or the world has ended."""
        for name in sorted(self.wanted):
            if not self._answers(name[1]):
                self.talks.begin(self._call(name, read_address(parse(told[name[1]])), patience))
        while missing := self.wanted - self.links.keys():
            if ended():
                raise RendezvousError("the world has ended")
            if self.failures or not patience.left():
                lost = sorted({(kind, other) for kind, other, _ in missing})
                raise RendezvousError("; ".join(self._told(kind, other) for kind, other in lost))
            self.talks.sleep(min(patience.wait(), self.talks.wait()))
            self.talks.turn()

    def _told(self, kind: str, other: int) -> str:
        return f"no {kind} to rank {other} of the set: {self.failures.get(other, 'it did not come in time')}"

    def _call(self, name: _Name, address: Address, patience: Patience) -> Steps[None]:
        kind, other, number = name
        greeting = {"kind": kind, "rank": self.me, "to": other, "number": number}
        while True:
            try:
                self.links[name], _ = yield from call(address, self.key, greeting, patience, patience)
            except Unproven:
                self.failures[other] = f"whoever answers at {address} is not of this job"
            except (OSError, ValueError) as error:
                # Strangers may have pushed it out of the queue before it was heard.
                if isinstance(error, ConnectionResetError | BrokenPipeError) and patience.left():
                    yield Wait(Patience(AGAIN))
                    continue
                self.failures[other] = f"{address}: {error}"
            return

    def _welcome(self, link: Link, greeting: dict[str, Any]) -> None:
        found = text(greeting, "kind"), whole(greeting, "rank"), whole(greeting, "number")
        if greeting.get("to") != self.me or found not in self.wanted or found in self.links:
            link.close()
            return
        self.links[found] = link
        link.send({})

    def taken(self) -> Connections:
        """The descriptors, by rank, of which the caller is the owner now: lanes and trunks."""
        lanes: dict[int, list[int]] = {}
        trunks: dict[int, int] = {}
        for kind, other, number in sorted(self.links):
            descriptor = self.links.pop((kind, other, number)).connection.detach()
            if kind == "trunk":
                trunks[other] = descriptor
            else:
                lanes.setdefault(other, []).append(descriptor)
        return lanes, trunks

    def close(self) -> None:
        """Close what nobody has taken."""
        self.talks.close()
        if self.door is not None:
            self.door.close()
        for link in self.links.values():
            link.close()


def _connections(layout: Layout, rank: int, sockets: int) -> set[_Name]:
    """What a rank is connected to: by lanes and by trunks."""
    lanes = {("lane", other, number) for other in layout.lanes(rank) for number in range(sockets)}
    return lanes | {("trunk", other, 0) for other in layout.trunks(rank)}
