"""Connections between hosts: who calls proves itself to who answers, and the other way round, before anything is said.

    answers -> calls    opening: 13 bytes of text, 16 bytes of nonce
    calls -> answers    greeting: role, rank, and a nonce                      (proves, over the first nonce)
    answers -> calls    an answer                                              (proves, over both nonces)

Each later message is proven too, over both nonces, by whom it is from, and by its number: none can be sent back to its
sender, left out or repeated. The key holds the job's secret, the job, and which of its worlds this is. The bytes that
pass after the start have no proof of their own.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import selectors
import socket
from typing import Any

from .. import frames
from ..host import network
from ..host.network import Address
from ..host.patience import Patience
from ..host.sockets import retry_short, send_all
from .messages import GRACE, frame, sign, take
from .talks import Steps, Wait

OPENING = b"enginerun 1\r\n"
NONCE = 16  # bytes
FIRST = frames.UNPROVEN  # bytes of the first message, either way: all that is read of somebody who has proven nothing
AGAIN = 0.01  # seconds until the next call of a rank whose connection strangers have pushed out
LATER = 8 << 20  # bytes of the longest message of somebody who has
CALLS, ANSWERS = "calls", "answers"


class Unproven(ValueError):
    """Whoever is on the other side does not know the job's secret."""


class Broken(ConnectionResetError):
    """The connection ended."""


class Link:
    """A connection, and the proofs of what passes over it.

    Parameters
    ----------
    connection : socket.socket
    key : bytes
        Of the proofs.
    side : str
        `CALLS` or `ANSWERS`: what this end did.

    Attributes
    ----------
    here, there : Address
        Of both ends.
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
        """Send a message. Whoever takes none of it for a while is as good as gone.

        Raises
        ------
        OSError
            The connection ended, or takes nothing.
        """
        data = frame(message, self._key, f"{self._side} {self._sent}", self.nonces)
        self._sent += 1
        send_all(self.connection, data, GRACE)

    def message(self, patience: Patience | None = None, limit: int = LATER) -> Steps[dict[str, Any]]:
        """Wait for a message; what comes behind it stays unread.

        Raises
        ------
        Unproven
            It is not from whom it should be.
        ValueError
            It is no message.
        TimeoutError
            Nothing came in time.
        OSError
            The connection ended.
        """
        while (whole := take(self._buffer, limit)) is None:
            self._buffer += yield from self.data(frames.missing(self._buffer, limit), patience)
        proof, payload = whole
        if not hmac.compare_digest(proof, sign(self._key, f"{self._other} {self._received}", self.nonces, payload)):
            raise Unproven
        self._received += 1
        return frames.parse_object(payload)

    def data(self, nbytes: int, patience: Patience | None) -> Steps[bytes]:
        """Wait for bytes: at least one, at most so many. Errors as of `message`."""
        while True:
            if not (yield Wait(patience, self.connection)):
                raise TimeoutError(errno.ETIMEDOUT, "no answer")
            try:
                data = retry_short(self.connection.recv, min(nbytes, 1 << 16))
            except BlockingIOError:
                continue
            if not data:
                raise Broken(errno.ECONNRESET, "the connection ended")
            return data

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


def call(
    address: Address, key: bytes, greeting: dict[str, Any], opening_patience: Patience, patience: Patience
) -> Steps[tuple[Link, dict[str, Any]]]:
    """Connect, and exchange proofs.

    Parameters
    ----------
    address : Address
    key : bytes
        Of the proofs.
    greeting : dict
        What this end says of itself.
    opening_patience : Patience
        Until the other side has opened the conversation. To break off is harmless until then.
    patience : Patience
        Until it has answered, in `FIRST` bytes at most. To break off is harmless until its answer is answered.

    Returns
    -------
    Link
    dict
        The answer.

    Raises
    ------
    Unproven
        Whoever answers does not know the job's secret.
    OSError, ValueError
        Nobody answers, or something else does.
    """
    connection = yield from _connect(address, opening_patience)
    link = Link(connection, key, CALLS)
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


def _connect(address: Address, patience: Patience) -> Steps[socket.socket]:
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
        if connection.getsockname() == connection.getpeername():  # Nobody listens, and TCP has met itself.
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    except BaseException:
        connection.close()
        raise
    return connection


def answer(link: Link) -> Steps[dict[str, Any]]:
    """Hear who has connected, and have it proven. The caller then sends an answer, by which this end proves itself.

    Returns
    -------
    dict
        The greeting.

    Raises
    ------
    Unproven
        Whoever calls does not know the job's secret; it has been told.
    OSError, ValueError
        Nothing comes, or something else than a greeting.
    """
    nonce = secrets.token_bytes(NONCE)
    send_all(link.connection, OPENING + nonce, GRACE)
    link.nonces = nonce.hex()
    try:
        greeting = yield from link.message(Patience(GRACE), FIRST)
    except Unproven:
        # It cannot verify our answer either, and learns from that what is wrong.
        send_all(link.connection, frame({}, b"", "", ""), GRACE)
        raise
    theirs = greeting.get("nonce")
    if not isinstance(theirs, str) or len(theirs) != 2 * NONCE:
        raise ValueError("a greeting without a nonce")
    link.nonces += theirs
    return greeting
