"""Assignment of ranks to the tasks of a Spark job, and detection of tasks that share a host."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..config.forms import MOST_PORTS
from ..host import machine
from ..launch.process.plan import Crew
from ..net import frames
from ..text.bounded_reader import get_text as words
from ..text.bounded_reader import get_whole


@dataclass(frozen=True)
class TaskInfo:
    """Description of a task, which it sends to all others."""

    host: str  # equal exactly for tasks that can share memory
    name: str  # name of the host for messages
    address: str  # address at which other executors reach this one, as Spark knows it
    hub: int  # free port on which the other hosts meet
    port: int  # free port for `MASTER_PORT`

    @classmethod
    def of_this_process(cls, address: str, hub: int) -> TaskInfo:
        """Create the description of the task that runs in this process."""
        return cls(machine.identify_host(), socket.gethostname(), address, hub, machine.free_port(""))

    def to_json(self) -> str:
        """Return the description as a line of JSON, for `read`."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> TaskInfo:
        """Parse a description that `to_json` has written."""
        told = frames.parse_object(text.encode())
        host, name, address = (words(told, field) for field in ("host", "name", "address"))
        hub, port = (get_whole(told, field, 0, MOST_PORTS) for field in ("hub", "port"))
        return cls(host, name, address, hub, port)


@dataclass(frozen=True)
class RankAssignment:
    """Place of one task among the ranks."""

    rank: int
    crew: Crew  # ranks of its host
    hub: str  # `ADDRESS:PORT` at which the hosts meet; empty: there is one host
    address: str  # `MASTER_ADDR`
    port: int  # `MASTER_PORT`


def assign_ranks(infos: Sequence[TaskInfo]) -> list[RankAssignment]:
    """Assign the ranks, by task: those of a host are consecutive, and the first task has rank 0."""
    hosts: dict[str, list[int]] = {}
    for task, info in enumerate(infos):
        hosts.setdefault(info.host, []).append(task)
    first, sizes = infos[0], tuple(map(len, hosts.values()))
    several = len(hosts) > 1
    address = f"[{first.address}]" if ":" in first.address else first.address
    places: dict[int, RankAssignment] = {}
    for number, tasks in enumerate(hosts.values()):
        ranks = tuple(range(len(places), len(places) + len(tasks)))
        crew = Crew(number, sizes, ranks, infos[tasks[0]].name)
        for rank, task in zip(ranks, tasks, strict=True):
            hub = f"{address}:{first.hub}" if several else ""
            places[task] = RankAssignment(rank, crew, hub, first.address if several else "127.0.0.1", first.port)
    return [places[task] for task in range(len(infos))]
