"""Connection of an authenticated stream over a socket, for coroutines of an event loop.

A coroutine reads no byte beyond a message: the native engine takes over connections of the rendezvous, and what follows
is for it. Data that passes after that is not authenticated.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
from typing import Any

from ..host import network
from ..host.network import Address
from ..host.patience import Patience
from ..host.sockets import retry_short, send_all
from .event_loop import Coroutine, Wait
from .stream import CLIENT, AuthenticatedStream, AuthenticationError

GRACE = 5.0  # seconds beyond the other side's deadline in which its answer must arrive
LONGEST = 8 << 20  # default of the largest message in bytes: between hosts it is about all ranks of a host
RECONNECT_DELAY = 0.01  # seconds before a client connects again whose connection was displaced by unauthenticated ones


class ConnectionEnded(ConnectionResetError):
    """The other side has closed the connection."""


class Connection:
    """Socket with an authenticated stream; the socket becomes non-blocking, and the connection owns it from now on.

    `key` is a secret that both sides know, and `side` is `CLIENT` or `SERVER`. `limit` is the size in bytes of the
    largest message from an authenticated side.
    """

    here: Address  # address of this end; a Unix socket has none
    there: Address  # address of the other end; likewise

    def __init__(self, connected: socket.socket, key: bytes, side: str, limit: int = LONGEST) -> None:
        connected.setblocking(False)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Later the other side may have reset the connection, which then has no addresses.
            self.here = network.address_of(connected.getsockname())
            self.there = network.address_of(connected.getpeername())
        self.socket = connected
        self.stream = AuthenticatedStream(key, side, limit)

    def send_message(self, message: dict[str, Any]) -> None:
        """Send a message; OSError if the connection ended, or took no byte for `GRACE` seconds."""
        send_all(self.socket, self.stream.encode(message), GRACE)

    def receive_message(self, patience: Patience | None = None) -> Coroutine[dict[str, Any]]:
        """Receive a message, and no byte beyond it.

        It raises the errors of `AuthenticatedStream.receive`, a TimeoutError if nothing came in time, and an OSError if
        the connection ended.
        """
        while (message := self.stream.receive()) is None:
            if not (yield Wait(patience, self.socket)):
                raise TimeoutError(errno.ETIMEDOUT, "no answer")
            try:
                data = retry_short(self.socket.recv, min(self.stream.missing_bytes(), 1 << 16))
            except BlockingIOError:
                continue
            if not data:
                raise ConnectionEnded(errno.ECONNRESET, "the connection ended")
            self.stream.feed(data)
        return message

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


def connect(
    address: Address, key: bytes, greeting: dict[str, Any], opening_patience: Patience, patience: Patience
) -> Coroutine[tuple[Connection, dict[str, Any]]]:
    """Connect, authenticate both sides, and return the connection and the answer.

    `greeting` has the fields by which this end introduces itself. `opening_patience` limits the wait for the other
    side's opening, and `patience` that for its answer. It is harmless to break off until the caller replies to the
    answer.

    It raises an AuthenticationError if the other side does not know the job's secret. Otherwise, if nobody or another
    program answers, it raises an OSError or ValueError.
    """
    connected = yield from _connect_socket(address, opening_patience)
    connection = Connection(connected, key, CLIENT)
    try:
        return connection, (yield from greet_server(connection, greeting, opening_patience, patience))
    except BaseException:
        connection.close()
        raise


def connect_again(address: Address, key: bytes, greeting: dict[str, Any], patience: Patience) -> Coroutine[Connection]:
    """Connect, and do so again whenever unauthenticated connections have displaced this one.

    Parameters and errors are those of `connect`; `patience` limits all tries together.
    """
    while True:
        try:
            connection, _ = yield from connect(address, key, greeting, patience, patience)
        except (ConnectionResetError, BrokenPipeError):
            if not patience.seconds_left():
                raise
        else:
            return connection
        yield Wait(Patience(RECONNECT_DELAY))


def greet_server(
    connection: Connection, greeting: dict[str, Any], opening_patience: Patience, patience: Patience
) -> Coroutine[dict[str, Any]]:
    """Authenticate both sides as the client, and return the server's answer; parameters and errors as in `connect`."""
    yield from connection.receive_message(opening_patience)
    connection.send_message(greeting)
    return (yield from connection.receive_message(patience))


def receive_greeting(connection: Connection) -> Coroutine[dict[str, Any]]:
    """Send the server's opening, and receive and authenticate the greeting of a new connection.

    The caller must then send an answer, which authenticates this end. It raises an AuthenticationError if the other
    side does not know the job's secret, and has told it so. Without any greeting, it raises an OSError or ValueError.
    """
    send_all(connection.socket, connection.stream.open(), GRACE)
    try:
        return (yield from connection.receive_message(Patience(GRACE)))
    except AuthenticationError:
        send_all(connection.socket, connection.stream.make_refusal(), GRACE)
        raise


def _connect_socket(address: Address, patience: Patience) -> Coroutine[socket.socket]:
    connected = socket.socket(network.get_address_family(address.host), socket.SOCK_STREAM)
    try:
        connected.setblocking(False)
        code = connected.connect_ex(address)
        if code == errno.EINPROGRESS:
            if not (yield Wait(patience, connected, selectors.EVENT_WRITE)):
                raise TimeoutError(errno.ETIMEDOUT, "no answer")
            code = connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        if connected.getsockname() == connected.getpeername():  # Nobody listens: TCP has connected to itself.
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    except BaseException:
        connected.close()
        raise
    return connected
