"""Driver's end of the tasks of an elastic job: admits tasks as hosts, and hands their connections to the launcher.

The launcher, a process of its own, learns of hosts from a file. It gets their connections over a Unix socket. Both are
in a directory that only this user can enter. Of the attempts of a task, the first that came is a host; others wait
until its connection has ended. There are others if Spark speculates or has run the task again. Each attempt is a host
of another name, so that none is mistaken for its predecessor.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from ..host import network, private_files
from ..host.patience import Patience
from ..host.sockets import retry_short, send_all
from ..host.strangers import Strangers, accept
from ..launch.hosts.channel import ChannelError
from .task_channel import BEGIN, next_message, receive_task
from .task_relay import RELAY

HOSTS, SOCKET, SETTINGS = "hosts", "agents", "settings.json"  # files in the directory
PROVING = 5.0  # seconds that a connection has to authenticate, and again to offer itself as a host
MOST = 64  # most unauthenticated connections, beyond two per task; if there are more, one is closed
LONGEST_NAME = 1 << 10  # characters
LOOK = 0.25
PAUSE = 0.02  # seconds until the next try if there are no descriptors for a connection
GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR


@dataclass
class _Task:
    """Authenticated connection of a task."""

    number: int
    attempt: int
    address: str
    connection: socket.socket
    key: bytes = field(repr=False)
    name: str = ""
    carrier: socket.socket | None = None


class TaskRegistry:
    """Server for the tasks of one job. A context manager: its threads run inside.

    It listens on `host`; None: all addresses. `tasks` is their number. `directory` is for the launcher; it exists, and
    only this user can enter it.
    """

    def __init__(self, tasks: int, secret: str, host: str | None, directory: Path) -> None:
        self._tasks = tasks
        self._secret = secret
        self._directory = directory
        self._socket = network.listen(host, 0, backlog=256)
        self.port = int(self._socket.getsockname()[1])
        self._inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._inner.bind(str(directory / SOCKET))
        self._inner.listen(64)
        self._changed = threading.Condition()
        self._hosts: dict[int, _Task] = {}  # by task
        self._numbers: dict[int, int] = {}  # number of hosts that each task has been
        self._strangers: Strangers[socket.socket] = Strangers(MOST + 2 * tasks)
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._publish_hosts()

    def __enter__(self) -> TaskRegistry:
        for listener, serve in ((self._socket, self._serve_task), (self._inner, self._serve_carrier)):
            self._start(self._accept, listener, serve)
        return self

    def close(self) -> None:
        """Let all tasks go, and admit no more."""
        self._ended.set()
        with self._changed:
            self._changed.notify_all()
            for stranger in self._strangers:
                _shut_down(stranger)

    def __exit__(self, *_: object) -> None:
        self.close()
        for thread in [*self._threads]:
            thread.join()
        self._socket.close()
        self._inner.close()

    @property
    def came(self) -> int:
        """Number of tasks that are hosts now."""
        with self._changed:
            return len(self._hosts)

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, name="engine-spark-registry", daemon=True)  # type: ignore[arg-type]
        with self._changed:
            self._threads = [*(each for each in self._threads if each.is_alive()), thread]
            thread.start()

    def _accept(self, listener: socket.socket, serve: object) -> None:
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        while not self._ended.is_set():
            if poll.poll(1000 * LOOK):
                try:
                    connection, _ = accept(listener, self._give_way)
                except OSError:  # the peer has gone, or there are no descriptors and the listener stays readable
                    self._ended.wait(PAUSE)
                else:
                    self._start(serve, connection)

    def _give_way(self) -> bool:
        """Close the next unauthenticated connection in turn, and wait until its thread has; False if there is none."""
        with self._changed:
            displaced = self._strangers.displace_next()
        if displaced is None:
            return False
        _shut_down(displaced)
        patience = Patience(PROVING)
        while displaced.fileno() >= 0 and patience.seconds_left():
            time.sleep(PAUSE / 10)
        return True

    # ---- tasks

    def _serve_task(self, connection: socket.socket) -> None:
        """Admit a task, and let it be a host until its connection ends."""
        with connection:
            task = self._authenticate_task(connection)
            if task is not None and self._take_turn(task):
                try:
                    self._await_disconnect(task)
                finally:
                    with self._changed:
                        del self._hosts[task.number]
                        self._publish_hosts()
                        self._changed.notify_all()

    def _authenticate_task(self, connection: socket.socket) -> _Task | None:
        """Authenticate a connection; return its task, or None if it is no task or has gone."""
        try:
            address = network.address_of(connection.getpeername()).host
            with self._changed:
                if self._ended.is_set():
                    return None
                displaced = self._strangers.add(connection, address)
            if displaced is not None:
                _shut_down(displaced)
            channel, number = receive_task(connection, self._secret, self._tasks)
            if channel is None:
                return None
            with contextlib.closing(channel):  # its descriptors are copies
                message = next_message(channel, Patience(PROVING))
                if message is None or message.kind != "host":
                    return None
                assert channel.sealed is not None
                key = channel.sealed.derive_key(RELAY)
                return _Task(number, message.get_number("attempt"), address, connection, key)
        except (OSError, ChannelError):
            return None
        finally:
            with self._changed:
                self._strangers.remove(connection)

    def _take_turn(self, task: _Task) -> bool:
        """Wait until no other attempt of the task is a host; False if the job is over, or the connection has ended."""
        with self._changed:
            while task.number in self._hosts:
                if self._ended.is_set() or _is_gone(task.connection, 0):
                    return False
                self._changed.wait(LOOK)
            if self._ended.is_set():
                return False
            turn = self._numbers[task.number] = self._numbers.get(task.number, 0) + 1
            task.name = f"task{task.number}.{turn}@{task.address}"
            self._hosts[task.number] = task
            self._publish_hosts()
            return True

    def _await_disconnect(self, task: _Task) -> None:
        """Wait until the connection has ended, the launcher has released it, or the job is over; then shut it down."""
        while not self._ended.is_set() and not _is_gone(task.connection, LOOK):
            if task.carrier is not None and _is_gone(task.carrier, 0):
                break
        with contextlib.suppress(OSError):
            task.connection.shutdown(socket.SHUT_RDWR)  # also ends the carrier's copy
        if task.carrier is not None:
            task.carrier.close()

    def _publish_hosts(self) -> None:
        """Write the hosts to the file, in the order in which they came."""
        lines = "".join(f"[{task.name}]:1\n" for task in self._hosts.values())
        private_files.replace(self._directory / HOSTS, lines.encode())

    # ---- carriers

    def _serve_carrier(self, connection: socket.socket) -> None:
        """Pass a carrier the connection of the host that it asks for, once."""
        connection.settimeout(PROVING)
        with contextlib.suppress(OSError):
            name = connection.makefile("r").readline(LONGEST_NAME).strip()
            with self._changed:
                task = next((task for task in self._hosts.values() if task.name == name and not task.carrier), None)
                if task is not None:
                    task.carrier = connection
            if task is not None:
                send_all(task.connection, BEGIN, PROVING)
                retry_short(socket.send_fds, connection, [task.key], [task.connection.fileno()])
                return
        connection.close()


def _shut_down(connection: socket.socket) -> None:
    """Shut down a connection that a thread waits for; the thread then closes it."""
    with contextlib.suppress(OSError):  # the peer has gone already
        connection.shutdown(socket.SHUT_RDWR)


def _is_gone(connection: socket.socket, seconds: float) -> bool:
    """Return whether the peer has closed a connection, or does within `seconds`; nothing is read."""
    poll = select.poll()
    poll.register(connection, GONE)
    return bool(poll.poll(1000 * seconds))
