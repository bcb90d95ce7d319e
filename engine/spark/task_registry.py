"""Driver's end of the tasks of an elastic job: admits tasks as hosts, and hands their connections to the launcher.

The launcher, a process of its own, learns of hosts from a file. It gets their connections over a Unix socket. Both are
in a directory that only this user can enter. Of the attempts of a task, the first that came is a host; others wait
until its connection has ended. There are others if Spark speculates or has run the task again. Each attempt is a host
of another name, so that none is mistaken for its predecessor.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from ..host import linux, private_files
from ..host.patience import Patience
from ..host.sockets import retry_short, send_all
from ..host.strangers import accept
from ..launch.hosts.channel import Channel, ChannelError
from ..net.event_loop import Coroutine, Wait
from ..text.logs import logger
from .task_channel import BEGIN, TaskServer
from .task_relay import RELAY

HOSTS, SOCKET, SETTINGS = "hosts", "agents", "settings.json"  # files in the directory
PROVING = 5.0  # seconds that an authenticated task has to offer itself as a host, and a carrier to name one
MOST = 64  # most unauthenticated connections, beyond two per task; if there are more, one is closed
LONGEST_NAME = 1 << 10  # bytes
PAUSE = 0.02  # seconds until the next try if there are no descriptors for a carrier


@dataclass(eq=False)
class _Task:
    """Task that has offered itself as a host."""

    number: int
    address: str
    connection: socket.socket
    key: bytes = field(repr=False)
    name: str = ""  # name of the host; empty while another attempt of the task is one
    carrier: socket.socket | None = None  # connection of the carrier that has been given this task's


class TaskRegistry(TaskServer):
    """Server for the tasks of an elastic job; `directory` is for the launcher, and only this user can enter it."""

    def __init__(self, tasks: int, secret: str, host: str | None, directory: Path) -> None:
        super().__init__(tasks, secret, host, MOST + 2 * tasks)
        self._directory = directory
        self._inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._inner.bind(str(directory / SOCKET))
        self._inner.listen(64)
        self._hosts: dict[int, _Task] = {}  # by task
        self._waiting: list[_Task] = []  # attempts of which another one is a host
        self._turns: Counter[int] = Counter()  # number of hosts that each task has been
        self._watched: dict[int, _Task] = {}  # by the descriptors of their connections and carriers
        self._gone = select.epoll()  # reports which of them have ended, without reading from them
        self._publish_hosts()
        self._loop.start(self._watch_ends())
        self._loop.start(self._accept_carriers())

    @property
    def came(self) -> int:
        """Number of tasks that are hosts now."""
        return len(self._hosts)

    def close(self) -> None:
        """Let all tasks go, and admit no more; a second call does nothing."""
        if not self._closing.is_set():
            super().close()
            for task in [*self._waiting, *self._hosts.values()]:
                self._release_task(task)
            self._inner.close()
            self._gone.close()

    # ---- tasks, in the thread

    def _admit_task(self, channel: Channel, number: int, address: str) -> Coroutine[None]:
        """Wait until a task offers itself as a host; it is one as soon as no other attempt of it is."""
        patience = Patience(PROVING)
        with contextlib.closing(channel), contextlib.suppress(OSError, ChannelError):
            while not channel.ended and (yield Wait(patience, channel.reading)):
                for message in channel.receive():
                    if message.kind != "host":
                        return
                    assert channel.sealed is not None
                    connection = socket.socket(fileno=os.dup(channel.reading))
                    task = _Task(number, address, connection, channel.sealed.derive_key(RELAY))
                    self._watch_connection(connection, task)
                    self._waiting.append(task)
                    self._publish_hosts()
                    return

    def _watch_connection(self, connection: socket.socket, task: _Task) -> None:
        """Release a task when this connection has ended: its own, or that of its carrier."""
        self._gone.register(connection, select.EPOLLRDHUP)
        self._watched[connection.fileno()] = task

    def _watch_ends(self) -> Coroutine[None]:
        while True:
            yield Wait(None, self._gone.fileno())
            for descriptor, _ in self._gone.poll(0):
                if descriptor in self._watched:  # else the task's other connection has ended, too
                    self._release_task(self._watched[descriptor])

    def _release_task(self, task: _Task) -> None:
        """Shut down the connection of a task, which is no host any more."""
        with contextlib.suppress(OSError):
            task.connection.shutdown(socket.SHUT_RDWR)  # also ends the carrier's copy
        for connection in (task.connection, task.carrier):
            if connection is not None:
                if self._watched.pop(connection.fileno(), None) is not None:
                    self._gone.unregister(connection)
                connection.close()
        if task in self._waiting:
            self._waiting.remove(task)
        else:
            del self._hosts[task.number]
            self._publish_hosts()

    def _publish_hosts(self) -> None:
        """Make tasks hosts whose turn it is, and write all hosts to the file, in the order in which they came."""
        for task in [*self._waiting]:
            if task.number not in self._hosts:
                self._waiting.remove(task)
                self._turns[task.number] += 1
                task.name = f"task{task.number}.{self._turns[task.number]}@{task.address}"
                self._hosts[task.number] = task
        lines = "".join(f"[{task.name}]:1\n" for task in self._hosts.values())
        try:
            private_files.replace(self._directory / HOSTS, lines.encode())
        except OSError as error:  # such as a full disk; the next change writes all hosts again
            logger.warning(
                "the list of this job's tasks cannot be written, and stays as it was until tasks come or go: %s",
                linux.explain_briefly(error, f" ({self._directory / HOSTS})"),
            )

    # ---- carriers, in the thread

    def _accept_carriers(self) -> Coroutine[None]:
        while True:
            yield Wait(None, self._inner)
            try:
                carrier, _ = accept(self._inner, self._acceptor.drop_unauthenticated)
            except OSError:  # it has gone, or there are no descriptors and the listener stays readable
                yield Wait(Patience(PAUSE))
            else:
                self._loop.start(self._serve_carrier(carrier))

    def _serve_carrier(self, carrier: socket.socket) -> Coroutine[None]:
        """Pass a carrier the connection of the host that it asks for, once; it sends the name in one piece."""
        task = None
        try:
            if (yield Wait(Patience(PROVING), carrier)):
                name = retry_short(carrier.recv, LONGEST_NAME).decode(errors="replace").strip()
                task = next((task for task in self._hosts.values() if task.name == name and not task.carrier), None)
            if task is not None:
                send_all(task.connection, BEGIN, PROVING)
                retry_short(socket.send_fds, carrier, [task.key], [task.connection.fileno()])
                task.carrier = carrier
                self._watch_connection(carrier, task)
        except OSError:
            if task is not None:
                self._release_task(task)
        finally:
            if task is None or task.carrier is None:
                carrier.close()
