"""A process that listens or connects as one part of the engine does: `python -m tests.hosts.listeners_program hub`.

It prints its address, and its result at the end. `--room N` leaves it N free descriptors. `come` is the legitimate
peer.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from engine.config.hub_address import HubAddress
from engine.config.world import World
from engine.elastic.worker.gate import Gate
from engine.host.patience import Patience
from engine.metrics.export.endpoint import Endpoint
from engine.net.rendezvous import Gathered, RendezvousOptions, gather_ranks
from engine.net.rendezvous import hub_client as leading
from engine.net.rendezvous.layout import Layout
from engine.net.rendezvous.messages import make_socket_name
from engine.net.rendezvous.set_connections import _SetRendezvous
from engine.spark import task_channel
from engine.spark.task_channel import reach_driver
from engine.spark.task_listener import TaskListener
from engine.spark.task_registry import TaskRegistry

from ..elastic.fake_driver import FakeDriver
from ..waiting import until
from .meeting import BUILD, create

HERE, SECRET, KEY, LAYOUT = "127.0.0.1", "a secret of tests", bytes(32), Layout((0, 1))
CREW = (*(0,) * 10, 1)  # host of each rank
SECONDS = 60.0
PATIENCE = 1.0  # seconds allowed to a peer that answers a call
Say = Callable[[Any], None]  # reports where the process listens: a name, or a port


def world(rank: int, hosts: tuple[int, ...], key: str, hub: HubAddress | None) -> World:
    """World of a rank, given the host of each rank."""
    crew = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    return World(
        *(rank, len(hosts), crew.index(rank), len(crew), key, SECRET, "test"),
        *((hub, str(hosts[rank])) if len(set(hosts)) > 1 else ()),
    )


def meet(own: World) -> str:
    """Meet the other ranks; return the result."""
    try:
        found = gather_ranks(own, RendezvousOptions(1, BUILD, SECONDS, create))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    found.close()
    return "met" if isinstance(found, Gathered) else "?"


# ---- each kind of listener: listens, says where, and returns what came of it


def hub(say: Say) -> str:
    """Rank 0 of two hosts."""
    key, listener = uuid.uuid4().hex, socket.create_server((HERE, 0))
    port = listener.getsockname()[1]
    say([port, key])
    return meet(world(0, (0, 1), key, HubAddress(HERE, port, listener.detach())))


def crew(say: Say) -> str:
    """Rank 0 of two hosts, leader of so many ranks that strangers at the port must leave descriptors for them."""
    key, listener = uuid.uuid4().hex, socket.create_server((HERE, 0))
    port = listener.getsockname()[1]
    say([port, key])
    return meet(world(0, CREW, key, HubAddress(HERE, port, listener.detach())))


def host(say: Say) -> str:
    """Rank 0 of one host."""
    key = uuid.uuid4().hex
    say([make_socket_name(world(0, (0, 0), key, None)), key])
    return meet(world(0, (0, 0), key, None))


def lanes(say: Say) -> str:
    """Leader of the second of three hosts, which accepts connections to its ranks."""
    port, key = json.loads(sys.stdin.readline())
    say([0, key, port])
    return meet(world(1, (0, 1, 2), key, HubAddress(HERE, port)))


def sets(say: Say) -> str:
    """Rank of a process set on two hosts."""
    meeting = _SetRendezvous(LAYOUT, 0, KEY, 1)
    try:
        meeting.listen(HERE)
        assert meeting.address is not None
        say([meeting.address.port])
        meeting.connect([b"null", b"null"], Patience(SECONDS), lambda: False)
        return "met"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        meeting.close()


def gate(say: Say) -> str:
    """Agent of a host of an elastic job."""
    with FakeDriver() as driver:
        say([f"\0{driver.server.name}"])
        driver.wait_for("done", 1)
    return "met"


def spark(say: Say) -> str:
    """Driver of a Spark job."""
    with TaskListener(1, SECRET, HERE, (io.StringIO(), io.StringIO())) as listener:
        say([listener.port])
        until(lambda: listener.came, "a task comes")
    return "met"


def offers(say: Say) -> str:
    """Driver of an elastic Spark job."""
    with tempfile.TemporaryDirectory() as home, TaskRegistry(1, SECRET, HERE, Path(home)) as offers:
        say([offers.port])
        until(lambda: offers.came, "a task comes")
    return "met"


def metrics(say: Say) -> str:
    """Metrics endpoint."""
    endpoint = Endpoint(HERE, 0, "test", lambda accept: (b"engine_size 4\n", "text/plain"))
    endpoint.start()
    try:
        say([endpoint.port])
        until(lambda: endpoint.scraped, "somebody asks")
    finally:
        endpoint.stop()
    return "met"


LISTENERS: dict[str, Callable[[Say], str]] = {
    each.__name__: each for each in (hub, crew, host, lanes, sets, gate, spark, offers, metrics)
}


# ---- each that calls: hears of addresses, and returns what came of it


def leader(say: Say) -> str:
    """Leader of a host that connects to rank 0."""
    leading.GRACE = PATIENCE
    say([])
    addresses, port, key = json.loads(sys.stdin.readline())
    return meet(world(1, (0, 1), key, HubAddress(addresses[0], port, others=tuple(addresses[1:]))))


def task(say: Say) -> str:
    """Spark task that connects to the driver."""
    task_channel.TRY, task_channel.SEARCH = PATIENCE, 10 * PATIENCE
    say([])
    addresses, port, _ = json.loads(sys.stdin.readline())
    channel = reach_driver([(address, port) for address in addresses], SECRET, 0)
    if channel is None:
        return "not reached"
    channel.close()
    return "met"


CALLERS: dict[str, Callable[[Say], str]] = {each.__name__: each for each in (leader, task)}


# ---- whoever belongs


def _come_to_a_set(port: int) -> None:
    meeting = _SetRendezvous(LAYOUT, 1, KEY, 1)
    try:
        meeting.connect([json.dumps([HERE, port]).encode()] * 2, Patience(SECONDS), lambda: False)
    finally:
        meeting.close()


def _come_to_the_gate(name: str) -> None:
    from ..elastic.fake_driver import SECRET as OF_THE_GATE

    names = {"ENGINE_GATE": name[1:], "ENGINE_SECRET": OF_THE_GATE, "ENGINE_WORKER": "1", "ENGINE_SLOT": "0"}
    with closing(Gate.open(names)) as worker:
        worker.report_done(1)


def _come_to_spark(port: int, offer: bool = False) -> None:
    channel = reach_driver([(HERE, port)], SECRET, 0)
    assert channel is not None
    with closing(channel):
        if offer:
            channel.send("host", attempt=0)
            channel.await_end(SECONDS)


def _scrape(port: int) -> None:
    with socket.create_connection((HERE, port), SECONDS) as scraper:
        scraper.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert b"".join(iter(lambda: scraper.recv(1 << 16), b"")).endswith(b"engine_size 4\n")


def come(kind: str, told: list[Any]) -> None:
    """Connect to a listener as its legitimate peer does."""
    where, *more = told
    if kind in ("hub", "host"):
        assert meet(world(1, (0, 1) if kind == "hub" else (0, 0), more[0], HubAddress(HERE, where))) == "met"
    elif kind == "crew":
        with ThreadPoolExecutor(len(CREW)) as pool:
            ranks = [world(rank, CREW, more[0], HubAddress(HERE, where)) for rank in range(1, len(CREW))]
            found = [*pool.map(meet, ranks)]
        assert found == ["met"] * len(ranks), found
    elif kind == "lanes":
        assert meet(world(2, (0, 1, 2), more[0], HubAddress(HERE, more[1]))) == "met"
    else:
        {
            "sets": _come_to_a_set,
            "gate": _come_to_the_gate,
            "spark": _come_to_spark,
            "offers": lambda port: _come_to_spark(port, offer=True),
            "metrics": _scrape,
        }[kind](where)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=LISTENERS | CALLERS)
    parser.add_argument("--room", type=int, default=0)
    given = parser.parse_args()

    def say(told: Any) -> None:
        if given.room:
            limit = max(map(int, os.listdir("/proc/self/fd"))) + given.room
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        print(json.dumps(told), flush=True)

    print((LISTENERS | CALLERS)[given.kind](say), flush=True)
    sys.stdin.readline()  # keeps the process alive for the test's measurements
    return 0


if __name__ == "__main__":
    sys.exit(main())
