"""Every port and socket of the engine among strangers: what they send, how many come, and who answers in its place."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.host.strangers import accept
from engine.hub_address import HubAddress

from ..waiting import until
from .listeners_program import HERE, LISTENERS, SECONDS, come, meet, world

LONG = 60 << 20  # bytes that a stranger says it will send, and sends
UNREAD = 16 << 20  # of them that the kernel may hold for who does not read
GROWTH = 3 << 10  # KiB by which a process may grow
ROOM = 24  # descriptors that the process has left
IDLE = 40  # strangers that say nothing
PROGRAM = "tests.hosts.listeners_program"


class Process:
    """A process that listens.

    Attributes
    ----------
    told : list
        Where it listens, and what whoever belongs has to know.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        command = [sys.executable, "-m", PROGRAM, kind, "--room", str(ROOM)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._others: threading.Thread | None = None
        assert self._process.stdin and self._process.stdout
        if kind == "lanes":  # somebody has to be the hub meanwhile
            listener = socket.create_server((HERE, 0))
            port = listener.getsockname()[1]
            hub = HubAddress(HERE, port, listener.detach())
            self._others = threading.Thread(target=meet, args=(world(0, (0, 1, 2), "lanes", hub),))
            self._others.start()
            print(json.dumps([port, "lanes"]), file=self._process.stdin, flush=True)
        self.told: list[Any] = json.loads(self._process.stdout.readline())
        if kind == "lanes":
            self.told[0] = until(self._port, "the leader has reached the hub, and listens")

    def _port(self) -> int | None:
        """The port on which the process listens."""
        folder = Path(f"/proc/{self._process.pid}/fd")
        inodes = {os.readlink(path)[8:-1] for path in folder.iterdir() if "socket:[" in os.readlink(path)}
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
        """KiB that the process has had at most since the last call."""
        text = Path(f"/proc/{self._process.pid}/status").read_text()
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")
        return int(next(line for line in text.splitlines() if line.startswith("VmHWM")).split()[1])

    def seconds(self) -> float:
        """Seconds that the process has computed."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> str:
        """What came of it."""
        out = self._process.communicate(timeout=SECONDS)[0]
        if self._others is not None:
            self._others.join()
        return out.strip()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
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
    """Send until the other side hangs up; how much went."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < len(data):
            sent += stranger.send(memoryview(data)[sent : sent + (1 << 20)])
    return sent


def hung_up(stranger: socket.socket, seconds: float) -> bool:
    """Whether the other side ends the connection in time, whatever it says before."""
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


@pytest.mark.parametrize("kind", LISTENERS)
def test_strangers_cost_a_listener_little_and_keep_nobody_out(start: Callable[[str], Process], kind: str) -> None:
    """Long messages are refused by their heads; and where descriptors run out, strangers give way to who belongs."""
    process = start(kind)
    with contextlib.ExitStack() as opened:
        if kind != "metrics":  # where there are no frames
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

        def give_way() -> bool:
            if strangers:
                strangers.pop(0).close()
            return bool(strangers)

        top = os.dup(0)
        os.close(top)
        while any(os.path.exists(f"/proc/self/fd/{number}") for number in range(top, top + 3)):
            os.dup(0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (top + 3, limits[1]))
        try:
            strangers += [accept(listener, lambda: False)[0] for _ in held[:3]]
            with pytest.raises(OSError, match="Too many open files") as raised:
                accept(listener, lambda: False)
            assert raised.value.errno == errno.EMFILE
            for _ in held[3:]:
                connection, _ = accept(listener, give_way)
                strangers.append(connection)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
