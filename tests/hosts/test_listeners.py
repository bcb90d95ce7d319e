"""Every port and socket of the engine among strangers: hostile data, many connections, and impostors that answer."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.config.hub_address import HubAddress
from engine.elastic.worker.gate import Gate
from engine.host import machine, network
from engine.host.strangers import accept
from engine.launch import fixed_ranks
from engine.net.connection import Connection
from engine.net.rendezvous.hub import _open_listeners
from engine.net.rendezvous.invitation import open_hub
from engine.net.stream import CLIENT, SERVER, AuthenticatedStream
from engine.spark.task_listener import TaskListener

from ..waiting import be_late, until
from .listeners_program import CALLERS, HERE, LISTENERS, PATIENCE, SECONDS, SECRET, come, meet, world

LONG = 60 << 20  # length of a stranger's message in bytes
UNREAD = 16 << 20  # bytes of it that the kernel may buffer for a peer that does not read
GROWTH = 3 << 10  # growth limit of a process in KiB
ROOM, ROOMS = 24, {"crew": 40}  # descriptors that the process has left
IDLE = 40  # silent strangers
PROGRAM = "tests.hosts.listeners_program"


class Process:
    """A listening process."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        command = [sys.executable, "-m", PROGRAM, kind, "--room", str(ROOMS.get(kind, ROOM))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._others: threading.Thread | None = None
        assert self._process.stdout
        if kind == "lanes":
            self.tell(self.be_rank_0((0, 1, 2)), "key")
        # Address on which it listens, and the facts that its legitimate peer needs
        self.told: list[Any] = json.loads(self._process.stdout.readline())
        if kind == "lanes":
            self.told[0] = until(self._port, "the leader has reached the hub, and listens")

    def be_rank_0(self, hosts: tuple[int, ...]) -> int:
        """Act as rank 0 of ranks on these hosts, until all have come; return the port."""
        listener = socket.create_server((HERE, 0))
        port: int = listener.getsockname()[1]
        own = world(0, hosts, "key", HubAddress(HERE, port, listener.detach()))
        self._others = threading.Thread(target=meet, args=(own,))
        self._others.start()
        return port

    def tell(self, *words: Any) -> None:
        """Send the process the values that it asks for."""
        print(json.dumps(words), file=self._process.stdin, flush=True)

    def _port(self) -> int | None:
        """Port on which the process listens, or None."""
        folder = Path(f"/proc/{self._process.pid}/fd")
        inodes = set()
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # it has just closed it
                inodes.add(os.readlink(path).removeprefix("socket:[").removesuffix("]"))
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        ports = [int(line[1].split(":")[1], 16) for line in lines if line[3] == "0A" and line[9] in inodes]
        return ports[0] if ports else None

    def connect(self) -> socket.socket:
        """Connect as a stranger."""
        where = self.told[0]
        stranger = socket.socket(socket.AF_UNIX if isinstance(where, str) else socket.AF_INET)
        stranger.settimeout(SECONDS)
        there = where if isinstance(where, str) else (HERE, where)
        until(lambda: stranger.connect_ex(there) == 0, f"{self.kind} listens")
        return stranger

    def peak(self) -> int:
        """Peak memory of the process in KiB since the last call."""
        text = Path(f"/proc/{self._process.pid}/status").read_text()
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")
        return int(next(line for line in text.splitlines() if line.startswith("VmHWM")).split()[1])

    def seconds(self) -> float:
        """Processor time of the process in seconds."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> str:
        """Read the process's result, and wait for the ranks that met it."""
        assert self._process.stdout
        out = self._process.stdout.readline()
        if self._others is not None:
            self._others.join()
        return out.strip()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def start() -> Iterator[Callable[[str], Process]]:
    with contextlib.ExitStack() as started:

        def make(kind: str) -> Process:
            process = Process(kind)
            started.callback(process.close)
            return process

        yield make


def pour(stranger: socket.socket, data: bytes) -> int:
    """Send until the other side hangs up; return the number of bytes sent."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < len(data):
            sent += stranger.send(memoryview(data)[sent : sent + (1 << 20)])
    return sent


def hung_up(stranger: socket.socket, seconds: float) -> bool:
    """Return whether the other side ends the connection within `seconds`, whatever it sends before."""
    stranger.settimeout(seconds)
    try:
        while stranger.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


HEADS = {
    "60 MB": struct.pack(">I", LONG),
    "4097 bytes": struct.pack(">I", 4097),
    "4 GB": b"\xff\xff\xff\xff",
    "nothing": struct.pack(">I", 0),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", LISTENERS)
def test_strangers_cost_a_listener_little_and_keep_nobody_out(start: Callable[[str], Process], kind: str) -> None:
    """Long messages are refused by their heads. When descriptors run out, strangers give way to the legitimate peer."""
    process = start(kind)
    with contextlib.ExitStack() as opened:
        if kind != "metrics":  # its protocol has no frames
            for name, head in HEADS.items():
                stranger = opened.enter_context(process.connect())
                stranger.sendall(head)
                assert hung_up(stranger, 2.0), f"a head that says {name} is not refused by itself"
        process.peak()
        before, begun = process.peak(), process.seconds()
        for _ in range(3):
            stranger = opened.enter_context(process.connect())
            assert pour(stranger, struct.pack(">II", LONG, LONG - 4) + b"[" * LONG) < UNREAD
        assert process.peak() - before < GROWTH
        assert process.seconds() - begun < 0.5
        for _ in range(IDLE):
            opened.enter_context(process.connect())
        come(kind, process.told)
        assert process.end() == "met"


def test_where_no_descriptor_is_left_the_oldest_strangers_give_way() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.create_server((HERE, 0)))
        held = [opened.enter_context(socket.create_connection(listener.getsockname(), SECONDS)) for _ in range(6)]
        strangers: list[socket.socket] = []
        opened.callback(lambda: [each.close() for each in strangers])

        def drop_unauthenticated() -> bool:
            if strangers:
                strangers.pop(0).close()
            return bool(strangers)

        highest = max(map(int, os.listdir("/proc/self/fd")))
        while (top := os.dup(0)) <= highest:
            opened.callback(os.close, top)  # reserves the highest number, below which other tests' descriptors are free
        os.close(top)
        resource.setrlimit(resource.RLIMIT_NOFILE, (top + 3, limits[1]))
        try:
            strangers += [accept(listener, lambda: False)[0] for _ in held[:3]]
            with pytest.raises(OSError, match="Too many open files") as raised:
                accept(listener, lambda: False)
            assert raised.value.errno == errno.EMFILE
            for _ in held[3:]:
                connection, _ = accept(listener, drop_unauthenticated)
                strangers.append(connection)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def flood(connection: socket.socket, head: bytes = b"") -> None:
    pour(connection, head + b"[" * LONG)


def drip(connection: socket.socket, head: bytes) -> None:
    """Send a byte now and then, as long as the other side listens."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    for at in range(len(head)):
        connection.sendall(head[at : at + 1])
        be_late(0.2)


def listen_only(connection: socket.socket, head: bytes = b"") -> None:
    """Stay silent until the other side gives up."""
    connection.sendall(head)
    connection.settimeout(SECONDS)
    while connection.recv(1 << 16):
        pass


Answer = Callable[[socket.socket, bytes], object]
ANSWERS: dict[str, Answer] = {
    "closes": lambda connection, opening: None,
    "junk": lambda connection, opening: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "floods": lambda connection, opening: flood(connection),
    "floods later": lambda connection, opening: flood(connection, opening + struct.pack(">I", LONG)),
    "lies": lambda connection, opening: connection.sendall(opening + struct.pack(">I", 100) + bytes(100)),
    "says nothing": lambda connection, opening: listen_only(connection),
    "says little": listen_only,
    "drips": drip,
}
OPENINGS = {
    "leader": AuthenticatedStream(b"", SERVER).open(),
    "task": AuthenticatedStream(b"", SERVER).open(),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", CALLERS)
def test_strangers_who_answer_cost_a_caller_little_and_it_goes_on(start: Callable[[str], Process], kind: str) -> None:
    """Each stranger has an address of its own, which is tried before that of the wanted peer."""
    process = start(kind)
    answered: list[str] = []

    def answer(name: str, listener: socket.socket) -> None:
        with contextlib.suppress(OSError), listener.accept()[0] as connection:
            answered.append(name)
            ANSWERS[name](connection, OPENINGS[kind])

    with contextlib.ExitStack() as opened:
        if kind == "leader":
            port = process.be_rank_0((0, 1))
        else:
            driver = opened.enter_context(TaskListener(1, SECRET, HERE, (io.StringIO(), io.StringIO())))
            port = driver.port
        addresses = []
        for number, name in enumerate(ANSWERS, 2):
            listener = opened.enter_context(socket.create_server((f"127.0.0.{number}", port)))
            listener.settimeout(SECONDS)
            thread = threading.Thread(target=answer, args=(name, listener))
            thread.start()
            opened.callback(thread.join)
            addresses.append(f"127.0.0.{number}")
        process.peak()
        before, begun = process.peak(), time.monotonic()
        process.tell([*addresses, HERE], port, "key")
        assert process.end() == "met"
        assert time.monotonic() - begun < len(ANSWERS) * PATIENCE + 10
        assert answered == list(ANSWERS)
        assert process.peak() - before < GROWTH


def test_strangers_and_lying_peers_drawn_at_random_keep_nobody_out() -> None:
    """A part of `make fuzz`: rank 0, the gate, Spark's driver and an agent on Ray."""
    pytest.importorskip("ray", reason="needs ray: pip install 'ray[train]'")
    from . import fuzz_sockets

    drawn, problems = fuzz_sockets.run(100, 1)
    assert not problems, "\n".join(problems[:5])
    assert min(drawn.values()) > 10


OTHER = "127.0.0.2"  # the chosen address
OWN = network.own_addresses()[:2]  # other addresses of this host, at which ranks look for rank 0


def by_gate(monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    monkeypatch.setenv("ENGINE_INTERFACE", OTHER)
    gate = Gate(0, 0, Connection(socket.socket(socket.AF_UNIX), b"", CLIENT))  # which never connects
    gate._connection.close()
    gate._listen()
    assert gate._listener is not None
    return [gate._listener]


def by_hub(*hosts: str) -> list[socket.socket]:
    port = machine.free_port(OTHER)
    return _open_listeners(HubAddress(hosts[0], port, others=hosts[1:]), 2, OTHER)


def by_mpi(monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    address = open_hub(0, OTHER)
    assert address.host == OTHER and address.descriptor is not None
    return [socket.socket(fileno=address.descriptor)]


CHOOSE: dict[str, tuple[Callable[[pytest.MonkeyPatch], list[socket.socket]], list[str]]] = {
    "gate": (by_gate, [OTHER]),
    "agent": (lambda patch: [fixed_ranks._listen(OTHER)], [OTHER]),
    "hub": (lambda patch: by_hub(OTHER), [OTHER]),
    "hub of several names": (lambda patch: by_hub(HERE, OTHER), [OTHER]),
    "hub on another network": (lambda patch: by_hub(*OWN), OWN),
    "mpi": (by_mpi, [OTHER]),
}


@pytest.mark.parametrize("how", CHOOSE)
def test_a_port_is_bound_to_the_address_that_is_chosen_alone(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests/checks` checks that there are no other listeners. Ray and Spark have tests of their own."""
    listen, addresses = CHOOSE[how]
    if not addresses:
        pytest.skip("this host has no address but the loopback")
    with contextlib.ExitStack() as opened:
        listeners = [opened.enter_context(each) for each in listen(monkeypatch)]
        assert [each.getsockname()[0] for each in listeners] == addresses
