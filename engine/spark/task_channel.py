"""Authenticated connection between a task and the driver: how a task finds the driver, and the driver's server.

Both sides first prove that they know the job's secret, which Spark has brought to the tasks (`engine.net.stream`). The
task's greeting has its number. Then they exchange messages of `engine.launch.hosts.channel`, each of them sealed.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

from ..host import network
from ..host.patience import Patience
from ..host.sockets import retry_short
from ..launch.hosts.channel import LIMIT, Channel
from ..net.acceptor import Acceptor
from ..net.connection import Connection, greet_server
from ..net.event_loop import Coroutine, CoroutineLoop, Wait, run
from ..net.frames import wrap
from ..net.stream import CLIENT, StreamError, derive_key

SEARCH = 4.0  # seconds that a task looks for the driver
TRY = 1.5  # seconds for one of its addresses
ROUNDS = 4  # tries of an address that closes the connection, as the driver does if too many strangers connect
PAUSE = 0.05  # seconds before the next try
BEGIN = b"\n"  # tells a task that has offered itself as a host to start its agent
HEAD = 64 << 10  # largest head of a message from an authenticated peer, in bytes
SILENCE = 20  # seconds after which a connection to a peer that does not answer is closed


def task_key(secret: str) -> bytes:
    """Return the key of the connections between tasks and driver, from the job's secret."""
    return derive_key(secret, "spark")


def channel_over(connection: Connection) -> Channel:
    """Return a channel over a connection whose peer is authenticated, which it owns from now on."""
    network.keep_watch(connection.socket, SILENCE)
    writing = os.dup(connection.socket.fileno())  # first, as it may fail for lack of descriptors
    channel = Channel(connection.socket.detach(), writing)
    channel.limit_sizes(LIMIT, HEAD)
    channel.authenticate_with(connection.stream.seal)
    return channel


def reach_driver(addresses: Sequence[tuple[str, int]], secret: str, task: int) -> Channel | None:
    """Look for the driver at several addresses, in their order; `task` is the number of the calling task.

    Returns None if none of the addresses is the driver's, or none can be reached.
    """
    patience = Patience(SEARCH)
    left = [*addresses]
    for _ in range(ROUNDS):
        again = []
        for number, address in enumerate(left):
            # A silent stranger must leave time for later addresses.
            share = patience.seconds_left() / (len(left) - number)
            if not share:
                return None
            channel, displaced = _try_address(address, secret, task, Patience(min(TRY, share)))
            if channel is not None:
                return channel
            again += [address] if displaced else []
        left = again
    return None


def _try_address(address: tuple[str, int], secret: str, task: int, patience: Patience) -> tuple[Channel | None, bool]:
    """Try one address; return the channel, and whether the peer has closed it for lack of room."""
    try:
        connection = Connection(
            socket.create_connection(address, max(0.1, patience.seconds_left())), task_key(secret), CLIENT
        )
    except OSError:
        return None, False
    try:
        run(greet_server(connection, {"task": task}, patience, patience))
        return channel_over(connection), False
    except (ConnectionResetError, BrokenPipeError):
        time.sleep(PAUSE)
        return None, True
    except (OSError, StreamError):
        return None, False
    finally:
        connection.close()  # does nothing to what a channel has taken over


class TaskServer(ABC):
    """Driver's end of the connections of `size` tasks. A context manager: its thread runs inside.

    It listens on `host`; None: all addresses. If there are more than `most` unauthenticated connections, one is closed.
    """

    def __init__(self, size: int, secret: str, host: str | None, most: int) -> None:
        self._size = size
        listener = network.listen(host, 0, backlog=256)
        self.port = int(listener.getsockname()[1])
        self._loop = CoroutineLoop()
        self._acceptor = Acceptor(self._loop, [listener], task_key(secret), self._admit_connection, most)
        self._closing = threading.Event()
        self._waker, self._wakes = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="engine-spark-tasks", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread, and admit no more tasks."""
        self._closing.set()
        self._wake()
        self._thread.join()
        self._loop.close()
        self._acceptor.close()
        self._waker.close()
        self._wakes.close()

    @abstractmethod
    def _admit_task(self, channel: Channel, task: int, address: str) -> Coroutine[None]:
        """Admit the task of that number, and return the coroutine that serves it; the task is answered after that."""

    def _admit_connection(self, connection: Connection, greeting: dict[str, object]) -> Coroutine[None]:
        """Take over an authenticated connection; ValueError if there is no such task, OSError without a descriptor."""
        task = greeting.get("task")
        if type(task) is not int or not 0 <= task < self._size:  # True is no number of a task
            raise ValueError(f"there is no task {task!r}")
        channel = channel_over(connection)
        service = self._admit_task(channel, task, connection.there.host)
        channel.out.write(wrap(connection.stream.seal.close(b"{}")))
        return service

    def _wake(self) -> None:
        """Wake the thread."""
        self._waker.send(b"\0")

    def _run(self) -> None:
        self._loop.start(self._watch_waker())
        while not self._closing.is_set():
            self._loop.poll(self._loop.next_timeout())
            self._loop.run_ready()

    def _watch_waker(self) -> Coroutine[None]:
        """Receive what wakes the thread."""
        while True:
            yield Wait(None, self._wakes)
            retry_short(self._wakes.recv, 4096)
