"""Connections between hosts. The caller and the side that answers authenticate each other before anything else.

    answers -> calls    opening: 13 bytes of text, 16 bytes of nonce
    calls -> answers    greeting: role, rank, and a nonce                      (proves, over the first nonce)
    answers -> calls    an answer                                              (proves, over both nonces)

Each later message carries an HMAC over both nonces, the sending side and the message's number. So no message can be
sent back to its sender, left out or repeated. The key is made of the job's secret, the job, and the number of its
world. Data that passes after the start is not authenticated.
"""

from __future__ import annotations

import errno
import hmac
import json
import os
import secrets
import selectors
import socket
from typing import Any

from ..host import network
from ..host.network import Address
from ..host.patience import Patience
from ..host.sockets import retry_short, send_all
from . import frames
from .event_loop import Coroutine, Wait

OPENING = b"enginerun 1\r\n"
NONCE = 16  # bytes
MAC = 32  # bytes
GRACE = 5.0  # seconds beyond the other side's deadline in which its answer must arrive
FIRST = frames.UNPROVEN  # largest size in bytes of a message from a side that has not authenticated itself
AGAIN = 0.01  # seconds before a rank connects again whose connection was displaced by unauthenticated ones
LATER = 8 << 20  # largest size in bytes of a message from a side that has
CALLS, ANSWERS = "calls", "answers"


def sign(key: bytes, label: str, nonce: str, payload: bytes) -> bytes:
    """Return the HMAC of a message, over its label, the nonce and the payload."""
    return hmac.digest(key, label.encode() + b"\0" + nonce.encode() + b"\0" + payload, "sha256")


def frame(message: dict[str, Any], key: bytes, label: str, nonce: str) -> bytes:
    """Return the bytes of a message as they are sent: length, HMAC and JSON."""
    payload = json.dumps(message).encode()
    return frames.wrap(sign(key, label, nonce, payload) + payload)


def take(buffer: bytearray, limit: int = frames.UNPROVEN) -> tuple[bytes, bytes] | None:
    """Remove a whole message from the front of `buffer` and return its HMAC and payload; None if it is incomplete.

    Raises
    ------
    ValueError
        The message is malformed, or longer than `limit`.
    """
    body = frames.cut(buffer, limit, MAC + 1)
    return None if body is None else (body[:MAC], body[MAC:])


class AuthenticationError(ValueError):
    """The other side does not know the job's secret."""


class ConnectionEnded(ConnectionResetError):
    """The connection ended."""


class Connection:
    """A connection whose messages are authenticated.

    Parameters
    ----------
    connection : socket.socket
    key : bytes
        Key of the HMACs.
    side : str
        `CALLS` if this end connected, `ANSWERS` if it accepted.

    Attributes
    ----------
    here, there : Address
        Addresses of this end and of the other one.
    """

    def __init__(self, connection: socket.socket, key: bytes, side: str) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.nonces = ""
        self._key = key
        self._side, self._other = (CALLS, ANSWERS) if side == CALLS else (ANSWERS, CALLS)
        self.here = network.address_of(connection.getsockname())
        self.there = network.address_of(connection.getpeername())
        self._sent = self._received = 0
        self._buffer = bytearray()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message.

        Raises
        ------
        OSError
            The connection ended, or took no byte for `GRACE` seconds.
        """
        data = frame(message, self._key, f"{self._side} {self._sent}", self.nonces)
        self._sent += 1
        send_all(self.connection, data, GRACE)

    def message(self, patience: Patience | None = None, limit: int = LATER) -> Coroutine[dict[str, Any]]:
        """Receive a message, and no byte beyond it.

        Raises
        ------
        AuthenticationError
            Its HMAC is wrong.
        ValueError
            It is malformed or longer than `limit`.
        TimeoutError
            Nothing came in time.
        OSError
            The connection ended.
        """
        while (whole := take(self._buffer, limit)) is None:
            self._buffer += yield from self.data(frames.missing(self._buffer, limit), patience)
        proof, payload = whole
        if not hmac.compare_digest(proof, sign(self._key, f"{self._other} {self._received}", self.nonces, payload)):
            raise AuthenticationError
        self._received += 1
        return frames.parse_object(payload)

    def data(self, nbytes: int, patience: Patience | None) -> Coroutine[bytes]:
        """Receive at least one byte and at most `nbytes`; raises as `message` does."""
        while True:
            if not (yield Wait(patience, self.connection)):
                raise TimeoutError(errno.ETIMEDOUT, "no answer")
            try:
                data = retry_short(self.connection.recv, min(nbytes, 1 << 16))
            except BlockingIOError:
                continue
            if not data:
                raise ConnectionEnded(errno.ECONNRESET, "the connection ended")
            return data

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


def call(
    address: Address, key: bytes, greeting: dict[str, Any], opening_patience: Patience, patience: Patience
) -> Coroutine[tuple[Connection, dict[str, Any]]]:
    """Connect, and authenticate both sides.

    Parameters
    ----------
    address : Address
    key : bytes
        Key of the HMACs.
    greeting : dict
        Fields of the greeting, by which this end introduces itself.
    opening_patience : Patience
        Time limit for the other side's opening. Until then it is harmless to break off.
    patience : Patience
        Time limit for its answer, of at most `FIRST` bytes. It is harmless to break off until the caller replies to it.

    Returns
    -------
    Connection
    dict
        The answer.

    Raises
    ------
    AuthenticationError
        The other side does not know the job's secret.
    OSError, ValueError
        Nobody answers, or another program does.
    """
    connection = yield from _connect(address, opening_patience)
    link = Connection(connection, key, CALLS)
    try:
        opening = b""
        while len(opening) < len(OPENING) + NONCE:
            opening += yield from link.data(len(OPENING) + NONCE - len(opening), opening_patience)
        if not opening.startswith(OPENING):
            raise ValueError("something else than this engine listens there")
        own = secrets.token_hex(NONCE)
        link.nonces = opening[len(OPENING) :].hex()
        link.send({**greeting, "nonce": own})
        link.nonces += own
        return link, (yield from link.message(patience, FIRST))
    except BaseException:
        link.close()
        raise


def _connect(address: Address, patience: Patience) -> Coroutine[socket.socket]:
    connection = socket.socket(network.family(address.host), socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        code = connection.connect_ex(address)
        if code == errno.EINPROGRESS:
            if not (yield Wait(patience, connection, selectors.EVENT_WRITE)):
                raise TimeoutError(errno.ETIMEDOUT, "no answer")
            code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        if connection.getsockname() == connection.getpeername():  # Nobody listens: TCP has connected to itself.
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    except BaseException:
        connection.close()
        raise
    return connection


def answer(link: Connection) -> Coroutine[dict[str, Any]]:
    """Receive and authenticate the greeting of a new connection.

    The caller must then send an answer, which authenticates this end.

    Returns
    -------
    dict
        The greeting.

    Raises
    ------
    AuthenticationError
        The other side does not know the job's secret; it has been told so.
    OSError, ValueError
        Nothing came, or no greeting.
    """
    nonce = secrets.token_bytes(NONCE)
    send_all(link.connection, OPENING + nonce, GRACE)
    link.nonces = nonce.hex()
    try:
        greeting = yield from link.message(Patience(GRACE), FIRST)
    except AuthenticationError:
        # It cannot verify this answer either, which tells it what is wrong.
        send_all(link.connection, frame({}, b"", "", ""), GRACE)
        raise
    theirs = greeting.get("nonce")
    if not isinstance(theirs, str) or len(theirs) != 2 * NONCE:
        raise ValueError("a greeting without a nonce")
    link.nonces += theirs
    return greeting
