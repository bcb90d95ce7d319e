"""Which tasks of a Spark job share a host, and which rank each starts: from what all tasks tell each other."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from .. import frames
from ..bounded_reader import text as words
from ..bounded_reader import whole
from ..forms import MOST_PORTS
from ..host import machine
from ..launch.plan import Crew


@dataclass(frozen=True)
class Card:
    """What a task tells the others about itself.

    Attributes
    ----------
    host : str
        Equal for those that can share memory, and for no others.
    name : str
        The host as messages name it.
    address : str
        By which executors reach this one, as Spark knows it.
    hub, port : int
        Ports that are free for the other hosts to meet on, and for `MASTER_PORT`.
    """

    host: str
    name: str
    address: str
    hub: int
    port: int

    @classmethod
    def of_this_process(cls, address: str, hub: int) -> Card:
        """The card of a task that runs in this process."""
        return cls(host_here(), socket.gethostname(), address, hub, machine.free_port(""))

    def text(self) -> str:
        """The card as a line, which `read` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Card:
        """The card that `text` has written."""
        told = frames.parse_object(text.encode())
        host, name, address = (words(told, field) for field in ("host", "name", "address"))
        hub, port = (whole(told, field, 0, MOST_PORTS) for field in ("hub", "port"))
        return cls(host, name, address, hub, port)


def host_here() -> str:
    """What is equal for processes that can share memory: of one boot, one network namespace and one user.

    Names and addresses do not tell: several executors of a machine have the same, containers of one machine differ.
    """
    return f"{machine.boot()} {os.stat('/proc/self/ns/net').st_ino} {os.geteuid()}"


@dataclass(frozen=True)
class Place:
    """One task's place among the ranks.

    Attributes
    ----------
    rank : int
    crew : Crew
        The ranks of its host.
    hub : str
        `ADDRESS:PORT` where the hosts meet; empty: there is one host.
    address : str
        `MASTER_ADDR`.
    port : int
        `MASTER_PORT`.
    """

    rank: int
    crew: Crew
    hub: str
    address: str
    port: int


def arrange(cards: Sequence[Card]) -> list[Place]:
    """Number the ranks: those of a host follow each other, and the first task has rank 0.

    Parameters
    ----------
    cards : sequence of Card
        By task.

    Returns
    -------
    list of Place
        By task.
    """
    hosts: dict[str, list[int]] = {}
    for task, card in enumerate(cards):
        hosts.setdefault(card.host, []).append(task)
    first, sizes = cards[0], tuple(map(len, hosts.values()))
    several = len(hosts) > 1
    address = f"[{first.address}]" if ":" in first.address else first.address
    places: dict[int, Place] = {}
    for number, tasks in enumerate(hosts.values()):
        ranks = tuple(range(len(places), len(places) + len(tasks)))
        crew = Crew(number, sizes, ranks, cards[tasks[0]].name)
        for rank, task in zip(ranks, tasks, strict=True):
            hub = f"{address}:{first.hub}" if several else ""
            places[task] = Place(rank, crew, hub, first.address if several else "127.0.0.1", first.port)
    return [places[task] for task in range(len(cards))]
