"""The server of an agent to which its workers connect: the agent's end of `engine.elastic.worker.gate`.

A connection must be of this user, and prove that it knows the job's secret. If two claim to be the same worker, the
first one counts while it is connected. Except for the greeting, the server does not interpret messages.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
from collections.abc import Callable
from typing import Any, Protocol

from ...elastic.worker.messages import Talk, TalkError
from ...host import linux
from ...host.sockets import retry_short
from ...host.strangers import NO_DESCRIPTORS, Strangers, accept
from ...net.unix_sockets import peer_uid
from ...text import readable

STRANGERS = 32  # most unauthenticated connections (at least two for each worker); with more, the oldest is closed
BACKLOG = 128  # backlog of the listener (at least two for each worker), beyond which the kernel refuses connections


class EventLoop(Protocol):
    """Event loop that calls back when a descriptor is readable."""

    def add_reader(self, descriptor: int, act: Callable[[], None]) -> None: ...

    def forget(self, descriptor: int) -> None: ...


class _Visitor:
    """A connection to the server."""

    def __init__(self, connection: socket.socket, talk: Talk) -> None:
        self.connection = connection
        self.talk = talk
        self.worker: int | None = None


class WorkerServer:
    """Server on an abstract socket of this network namespace.

    Parameters
    ----------
    secret : str
        The job's secret.
    several : bool
        Whether workers may be on several hosts.
    most : int
        Largest number of workers that may connect at once.
    selects : EventLoop
    told : callable
        Called with a worker's number and each of its messages.
    say : callable
        Shows a line.

    Attributes
    ----------
    name : str
        Name of the socket, without the leading NUL.
    """

    def __init__(
        self,
        secret: str,
        several: bool,
        most: int,
        selects: EventLoop,
        told: Callable[[int, dict[str, Any]], None],
        say: Callable[[str], None],
    ) -> None:
        self.name = f"engine-gate-{os.getuid()}-{secrets.token_hex(12)}"
        self._secret = secret
        self._several = several
        self._selects = selects
        self._told = told
        self._say = say
        self._strangers: Strangers[_Visitor] = Strangers(max(STRANGERS, 2 * most))
        self._workers: dict[int, _Visitor] = {}
        self._deaf = False  # whether the server accepts nothing, for lack of descriptors
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(max(BACKLOG, 2 * most))
        selects.add_reader(self._listener.fileno(), self._accept)

    def send(self, worker: int, kind: str, /, **fields: Any) -> None:
        """Send a message to a worker, if it is connected; close the connection if its buffer is full."""
        visitor = self._workers.get(worker)
        if visitor is not None:
            self._write(visitor, visitor.talk.message(kind, **fields))

    def forget(self, worker: int) -> None:
        """Handle the last messages of a worker whose process has ended, and close its connection.

        Other workers are not read meanwhile, since they might send messages without end.
        """
        own = [self._workers[worker]] if worker in self._workers else list(self._strangers)
        for visitor in own:
            while visitor.worker in (None, worker) and _readable(visitor.connection):
                self._read(visitor)
        if worker in self._workers:
            self._close(self._workers[worker])
        self._hear_again()

    def close(self) -> None:
        """Close the listener and all connections, which ends workers that are still connected."""
        if not self._deaf:
            self._selects.forget(self._listener.fileno())
        self._listener.close()
        for visitor in [*self._strangers, *self._workers.values()]:
            self._close(visitor)

    def close_quietly(self) -> None:
        """Close the same once the event loop is closed, without unregistering anything."""
        for connection in (self._listener, *(each.connection for each in (*self._strangers, *self._workers.values()))):
            connection.close()

    def _accept(self) -> None:
        try:
            connection, _ = accept(self._listener, self._give_way, spare=0)
        except OSError as error:
            if error.errno in NO_DESCRIPTORS:  # the listener stays readable until there are some
                self._say(f"no worker can come to the gate: {linux.refusal('accept', error)}")
                self._selects.forget(self._listener.fileno())
                self._deaf = True
            return  # otherwise the connection has ended already
        if peer_uid(connection) != os.getuid():
            connection.close()
            return
        connection.setblocking(False)
        visitor = _Visitor(connection, Talk(self._secret, "agent", "worker"))
        displaced = self._strangers.add(visitor)
        if displaced is not None:
            self._close(displaced)
        self._selects.add_reader(connection.fileno(), lambda: self._read(visitor))

    def _give_way(self) -> bool:
        """Close the oldest unauthenticated connection; return False if there is none."""
        displaced = self._strangers.displace()
        if displaced is not None:
            self._close(displaced)
        return displaced is not None

    def _hear_again(self) -> None:
        """Resume accepting: there may be free descriptors again."""
        if self._deaf and self._listener.fileno() >= 0:
            self._deaf = False
            self._selects.add_reader(self._listener.fileno(), self._accept)

    def _read(self, visitor: _Visitor) -> None:
        if visitor.connection.fileno() < 0:  # closed by another event of the same batch
            return
        try:
            data = retry_short(visitor.connection.recv, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(visitor)
            return
        try:
            for message in visitor.talk.feed(data):
                self._hear(visitor, message)
        except (TalkError, KeyError, TypeError, ValueError, OverflowError) as error:
            who = "somebody" if visitor.worker is None else f"worker {visitor.worker}"
            self._say(f"{who} was turned away at the gate: {readable.plain(str(error))}")
            self._close(visitor)

    def _hear(self, visitor: _Visitor, message: dict[str, Any]) -> None:
        if visitor.connection.fileno() < 0:  # closed while the messages before it were handled
            return
        if visitor.worker is None:
            visitor.worker = _worker(message)
            if visitor.worker in self._workers:
                raise TalkError("another process of that number is there already")
            self._write(visitor, visitor.talk.welcome(message, self._several))
            return
        if visitor in self._strangers:
            if visitor.worker in self._workers:
                raise TalkError("another process of that number is there already")
            self._strangers.remove(visitor)
            self._workers[visitor.worker] = visitor
        if message["kind"] == "here":
            return
        self._told(visitor.worker, message)

    def _write(self, visitor: _Visitor, data: bytes) -> None:
        try:
            whole = retry_short(visitor.connection.send, data, socket.MSG_NOSIGNAL) == len(data)
        except OSError:
            whole = False
        if not whole:
            self._close(visitor)

    def _close(self, visitor: _Visitor) -> None:
        if visitor.connection.fileno() < 0:
            return
        self._selects.forget(visitor.connection.fileno())
        visitor.connection.close()
        self._hear_again()
        if visitor in self._strangers:
            self._strangers.remove(visitor)
        elif visitor.worker is not None and self._workers.get(visitor.worker) is visitor:
            del self._workers[visitor.worker]


def _worker(message: dict[str, Any]) -> int:
    worker = message.get("worker")
    if message["kind"] != "hello" or type(worker) is not int or worker < 0:
        raise TalkError("it does not say which worker it is")
    return worker


def _readable(connection: socket.socket) -> bool:
    if connection.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))
