"""Fuzzer of the engine's listeners: `python -m tests.hosts.fuzz_sockets --count 10000 --seed 1`.

`fuzz_messages` hands hostile messages to their readers directly. Here they come over sockets and pipes, whole, in
halves and byte by byte, from strangers and from authenticated peers, which then close, reset, stay silent or go on. A
listener must survive, let its own peers in, and end with its own error where an authenticated peer is to blame.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import os
import random
import socket
import struct
import sys
import threading
from types import SimpleNamespace
from typing import Any

from engine.config.world import World
from engine.errors import RendezvousError
from engine.host.network import Address
from engine.host.patience import Patience
from engine.host.sockets import wait_readable
from engine.launch.hosts import channel as channels
from engine.launch.hosts.channel import Channel, ChannelError
from engine.net import frames
from engine.net.connection import connect as connect_stream
from engine.net.event_loop import Coroutine, CoroutineLoop
from engine.net.rendezvous import Gathered, RendezvousOptions, gather_ranks
from engine.net.rendezvous.messages import derive_leaders_key
from engine.net.stream import CLIENT, SERVER, AuthenticatedStream, Seal, StreamError, derive_key
from engine.ray import node_agent
from engine.spark.task_channel import reach_driver
from engine.spark.task_listener import TaskListener

from .. import fuzzing
from ..elastic.fake_driver import SECRET, FakeDriver
from ..hostile_numbers import hostile_number
from . import fuzz_messages
from .meeting import BUILD, create, worlds

HERE = "127.0.0.1"
SECONDS = 20.0  # limit for the honest peer to get in, and for ended parties to end
WRONG = frames.wrap(
    Seal(bytes(32), CLIENT, SERVER).close(b'{"role": "leader", "nonce": "00000000000000000000000000000000"}')
)
SPARK = {
    "hello": {"rank": 0, "host": "a"},
    "output": {"stream": "stdout"},
    "say": {"line": "x"},
    "end": fuzz_messages.END,
}
GATE = {name: fuzz_messages.KINDS[name][0] for name in ("ready", "committed")}


def lie(dice: random.Random, good: Any) -> Any:
    """Message, with or without a hostile change."""
    return fuzz_messages.changed(dice, copy.deepcopy(good)) if dice.random() < 0.8 else good


def spoil(dice: random.Random, data: bytes) -> bytes:
    """Frame with a changed head, changed bytes, or a missing part."""
    kind = dice.randrange(5)
    if kind == 0:
        return data[: dice.randrange(len(data) + 1)]
    if kind == 1:
        return struct.pack(">I", hostile_number(dice, len(data) - 4, 32)) + data[4:]
    if kind == 2:
        at = dice.randrange(len(data))
        return data[:at] + dice.randbytes(1) + data[at + 1 :]
    if kind == 3:
        return dice.randbytes(dice.choice((1, 4, 100, 5000)))
    return data * dice.choice((1, 2, 50))


def send(dice: random.Random, connection: socket.socket, data: bytes) -> None:
    """Send bytes at once or in parts; then end the connection in one of several ways, or leave it open."""
    with contextlib.suppress(OSError):
        step = dice.choice((1, 3, 1 << 20, 1 << 20))
        for at in range(0, min(len(data), 200 * step), step):
            connection.send(data[at : at + step])
        end = dice.randrange(4)
        if end == 0:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # makes it a reset
        elif end == 1:
            connection.shutdown(socket.SHUT_WR)
        if end != 2:
            connection.close()


def connect(where: str | tuple[str, int]) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX if isinstance(where, str) else socket.AF_INET)
    connection.settimeout(SECONDS)
    connection.connect(where)
    return connection


class Strangers:
    """Strangers that connect to an address, some of which stay connected."""

    def __init__(self, dice: random.Random) -> None:
        self._dice, self._held = dice, contextlib.ExitStack()

    def come(self, where: str | tuple[str, int]) -> None:
        for _ in range(self._dice.choice((1, 1, 3))):
            with contextlib.suppress(OSError):
                connection = self._held.enter_context(connect(where))
                send(self._dice, connection, spoil(self._dice, WRONG))

    def close(self) -> None:
        self._held.close()


def converse(steps: Coroutine[Any]) -> Any:
    """Run a conversation with another host; return its result or its error."""
    loop, found = CoroutineLoop(), []

    def keep() -> Coroutine[None]:
        try:
            found.append((yield from steps))
        except (OSError, ValueError) as error:
            found.append(error)

    loop.start(keep())
    while not found:
        wait_readable([loop.fileno()], loop.next_timeout())
        loop.run_ready()
    loop.close()
    return found[0]


# ---- the targets: each sends lies, and says what went wrong


def hub(dice: random.Random) -> str:
    """Attack rank 0 of two hosts: strangers, and a leader that is hostile or honest."""
    job, results = worlds([[0], [1]]), {}

    def meet(world: World, seconds: float) -> None:
        try:
            results[world.rank] = gather_ranks(world, RendezvousOptions(1, BUILD, seconds, create))
        except Exception as error:
            results[world.rank] = error

    rank_0 = threading.Thread(target=meet, args=(job[0], SECONDS))
    strangers = Strangers(dice)
    place = job[0].hub
    assert place is not None
    rank_0.start()
    try:
        strangers.come((place.host, place.port))
        if lies := dice.random() < 0.7:
            _lead(dice, job[1], Address(place.host, place.port))
            rank_0.join(0.2)
        if rank_0.is_alive():
            meet(job[1], 3.0 if lies else SECONDS)
        rank_0.join(SECONDS + 15.0)
    finally:
        strangers.close()
    for found in results.values():
        found.close() if isinstance(found, Gathered) else None
    if rank_0.is_alive():
        return "rank 0 hangs"
    allowed = (Gathered, RendezvousError) if lies else Gathered
    return next((f"{type(each).__name__}: {each}" for each in results.values() if not isinstance(each, allowed)), "")


def _lead(dice: random.Random, world: World, address: Address) -> None:
    """Act as a leader that authenticates itself and then sends hostile messages."""
    good = {"role": "leader", "rank": 1, "size": 2, "processes": 1, "pid": 7, "name": "b"}
    told = lie(dice, good)
    greeting = told if isinstance(told, dict) else good
    found = converse(connect_stream(address, derive_leaders_key(world), greeting, Patience(SECONDS), Patience(SECONDS)))
    if isinstance(found, Exception):
        return
    link, _ = found
    with contextlib.suppress(OSError):
        for name in dice.choice((("come",), ("come", "crew"), ("come", "crew", "refused"), ("crew",), ())):
            message = lie(dice, fuzz_messages.KINDS[name][0])
            link.send_message(message if isinstance(message, dict) else good)
    send(dice, link.socket, spoil(dice, WRONG) if dice.random() < 0.5 else b"")
    link.close()


def gate(dice: random.Random, driver: FakeDriver) -> str:
    """Attack the agent of a host: strangers, then a hostile worker, then an honest one."""
    where = f"\0{driver.server.name}"
    strangers = Strangers(dice)
    try:
        strangers.come(where)
        with connect(where) as worker:
            stream = _greet(worker, dice.randrange(1000))
            for _ in range(dice.choice((1, 2, 5))):
                kind = dice.choice(list(GATE))
                told = lie(dice, GATE[kind])
                data = stream.encode(told) if isinstance(told, dict) else WRONG
                with contextlib.suppress(OSError):
                    worker.sendall(data if dice.random() < 0.7 else spoil(dice, data))
            send(dice, worker, b"")
        with connect(where) as worker:
            _greet(worker, 1000)
        return ""
    except (OSError, StreamError) as error:
        return f"a worker does not come through: {type(error).__name__}: {error}"
    finally:
        strangers.close()


def _greet(worker: socket.socket, number: int) -> AuthenticatedStream:
    stream = AuthenticatedStream(derive_key(SECRET, "gate"), CLIENT)
    for sent in ({"worker": number}, None):
        while stream.receive() is None:
            data = worker.recv(stream.missing_bytes())
            if not data:
                raise ConnectionResetError("hung up on")
            stream.feed(data)
        if sent is not None:
            worker.sendall(stream.encode(sent))
    return stream


def spark(dice: random.Random, listener: TaskListener) -> str:
    """Attack the driver of a Spark job: strangers, then a hostile task, then an honest one."""
    where = (HERE, listener.port)
    strangers = Strangers(dice)
    try:
        strangers.come(where)
        for lies in (True, False):
            channel = reach_driver([where], SECRET, 0)
            if channel is None:
                return "a task does not come through"
            with contextlib.closing(channel):
                for _ in range(dice.choice((1, 2, 5)) if lies else 0):
                    kind = dice.choice(list(SPARK))
                    content = json.dumps([kind, lie(dice, SPARK[kind])]).encode()
                    content = struct.pack(">I", len(content)) + content + dice.choice((b"", b"text\n", bytes(100)))
                    assert channel.sealed is not None
                    data = frames.wrap(channel.sealed.close(content))
                    channel.out.write(data if dice.random() < 0.7 else spoil(dice, data))
        return "" if listener._thread.is_alive() else "the listener's thread has ended"
    finally:
        strangers.close()


def actor(dice: random.Random) -> str:
    """Attack the caller's end of an agent on Ray, whose actor passes on hostile messages in random parts."""
    said = channels.GREETING if dice.random() < 0.8 else dice.randbytes(dice.choice((0, 10, 100_000)))
    for _ in range(dice.choice((1, 3))):
        head = json.dumps(["beat", lie(dice, {"at": 1.5, "worker": 3, "line": "x"})]).encode()
        data = frames.wrap(struct.pack(">I", len(head)) + head)
        said += data if dice.random() < 0.7 else spoil(dice, data)
    size = dice.choice((100, 1 << 16))
    parts: list[Any] = [(said[at : at + size], b"\x1b[2J\n", None) for at in range(0, min(len(said), 50 * size), size)]
    parts.append(dice.choice(((b"", b"", 0), None, (b"",), (1, 2, 3), node_agent.RayError(""))))

    def get(_: object) -> Any:
        answer = parts.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    ray, node_agent.ray = node_agent.ray, SimpleNamespace(is_initialized=lambda: True, get=get)  # type: ignore[attr-defined]
    agent = node_agent.RayAgent(0, f"n@{HERE}", "n")
    agent._actor = SimpleNamespace(read=SimpleNamespace(remote=lambda: None))
    (reading, from_agent), (errors, of_agent), (carrier, end) = (os.pipe() for _ in range(3))
    channel = Channel(reading, os.dup(0), greeted=False)
    failed: list[BaseException] = []

    def fetch() -> None:
        try:
            agent._relay_from_agent(from_agent, of_agent, end)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    try:
        with contextlib.suppress(ChannelError):
            for message in channel.wait_for_messages():
                for name in ("at", "worker", "line"):
                    with contextlib.suppress(ChannelError):
                        message.get_number(name)
        channel.close()
        thread.join(SECONDS)
        if thread.is_alive() or failed:
            return f"the thread that fetches: {failed or 'hangs'}"
        return "" if agent.how_it_ended() else "nobody knows how it ended"
    finally:
        node_agent.ray = ray  # type: ignore[attr-defined]
        for descriptor in (errors, carrier):
            os.close(descriptor)


def run(count: int, seed: int) -> fuzzing.Drawn:
    """Attack all listeners, as `fuzzing.draw` does."""
    streams = (io.StringIO(), io.StringIO())
    with FakeDriver() as driver, TaskListener(1, SECRET, HERE, streams) as listener:
        targets: dict[str, fuzzing.Target] = {
            "hub": hub,
            "gate": lambda dice: gate(dice, driver),
            "spark": lambda dice: spark(dice, listener),
            "ray": actor,
        }
        return fuzzing.draw(count, seed, targets)


if __name__ == "__main__":
    logging.disable()  # messages about refused strangers
    sys.exit(fuzzing.main(run, "Fuzz what listens.", "examples", 10_000))
