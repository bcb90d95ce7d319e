"""Authenticated stream: both sides prove that they know a secret, and each message is authenticated. It does no I/O.

    server -> client    opening: the protocol's line, then a frame: nonce and fields      (proves nothing)
    client -> server    greeting: nonce and fields                                        (proves, over that nonce)
    server -> client    answer                                                            (proves, over both nonces)

Then both sides send messages. Each carries an HMAC over both nonces, the sending side and the message's number. So no
message can be changed, left out, repeated or sent back to its sender unnoticed. Messages are not encrypted. Until the
other side is authenticated, a frame may have at most `UNPROVEN` bytes, and a longer one is refused by its length alone.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
from typing import Any

from . import frames
from .frames import UNPROVEN

PROTOCOL = 3  # number of this protocol, the same on both sides
OPENING = b"enginerun %d\r\n" % PROTOCOL
CLIENT, SERVER = "client", "server"
NONCE = 16  # bytes
MAC = 32  # bytes of the HMAC before the content of each message
LIMIT = 1 << 20  # default of the largest message from an authenticated side, in bytes
_PROTOCOL_LINE = re.compile(rb"enginerun ([0-9]{1,3})\r\n")
_BEGUN_LINE = re.compile(rb"enginerun [0-9]{0,3}\r?")
_NONCE = re.compile(f"[0-9a-f]{{{2 * NONCE}}}")


class StreamError(ValueError):
    """The other side does not speak this protocol."""


class AuthenticationError(StreamError):
    """The other side does not know the secret, or a message was changed, left out, repeated or sent back."""


def derive_key(secret: str | bytes, purpose: str) -> bytes:
    """Return the key for one purpose, from a secret that has several.

    So no message of one kind of connection can be taken for one of another kind, even if somebody relays it.
    """
    return hmac.digest(secret if isinstance(secret, bytes) else secret.encode(), purpose.encode(), "sha256")


class Seal:
    """Authentication of the messages of both directions, each by its side and number.

    `key` is that of this connection alone; `own` and `other` are the names of the sides.
    """

    def __init__(self, key: bytes, own: str, other: str) -> None:
        self._key = key
        self._own, self._other = own, other
        self._sent = self._received = 0

    def close(self, content: bytes) -> bytes:
        """Return the content of the next message to send, preceded by its HMAC."""
        proof = self._compute_mac(self._own, self._sent, content)
        self._sent += 1
        return proof + content

    def open(self, content: bytes) -> bytes:
        """Check the next message that has come, and return its content without the HMAC.

        A wrong HMAC is an AuthenticationError.
        """
        proof, content = content[:MAC], content[MAC:]
        if not hmac.compare_digest(proof, self._compute_mac(self._other, self._received, content)):
            raise AuthenticationError("it does not know the secret of this job, or its messages are changed on the way")
        self._received += 1
        return content

    def derive_key(self, purpose: str) -> bytes:
        """Return a further key that both sides of the connection know, for another purpose."""
        return derive_key(self._key, f"derive {purpose}")

    def _compute_mac(self, side: str, number: int, content: bytes) -> bytes:
        return hmac.digest(self._key, f"{side} {number} ".encode() + content, "sha256")


class AuthenticatedStream:
    """One side of a connection: turns messages into bytes, and received bytes into verified messages.

    A server sends `open`, receives the greeting, and encodes its answer and further messages. A client receives the
    opening, encodes the greeting, and receives the answer and further messages. All of them are JSON objects.

    `key` is a secret that both sides know, and `side` is `CLIENT` or `SERVER`. `limit` is the size in bytes of the
    largest message once the other side is authenticated.
    """

    def __init__(self, key: bytes, side: str, limit: int = LIMIT) -> None:
        self.authenticated = False  # whether a message has come that only a process with the key could send now
        self._key = key
        self._side, self._other = (CLIENT, SERVER) if side == CLIENT else (SERVER, CLIENT)
        self._limit = limit
        self._opening = "" if side == CLIENT else secrets.token_hex(NONCE)  # the server's nonce
        self._line_came = side == SERVER  # whether the protocol's line has come, which only a client expects
        self._seal: Seal | None = None
        self._buffer = bytearray()

    @property
    def seal(self) -> Seal:
        """Authentication of this connection's messages, once this side has received or sent the greeting."""
        assert self._seal is not None, "no greeting has passed"
        return self._seal

    def open(self, **fields: Any) -> bytes:
        """Return the server's opening, whose fields anybody can read and nobody can verify."""
        return OPENING + frames.wrap(json.dumps({**fields, "nonce": self._opening}).encode())

    def encode(self, message: dict[str, Any]) -> bytes:
        """Return the bytes of this side's next message; a client's first one is the greeting."""
        if self._seal is not None:
            return frames.wrap(self._seal.close(json.dumps(message).encode()))
        own = secrets.token_hex(NONCE)
        data = frames.wrap(self._greeting_seal().close(json.dumps({**message, "nonce": own}).encode()))
        self._begin_session(own)
        return data

    @staticmethod
    def make_refusal() -> bytes:
        """Return a message that nobody can verify: it tells a client with another secret that this is the reason."""
        return frames.wrap(bytes(MAC) + b"{}")

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._buffer += data

    def missing_bytes(self) -> int:
        """Return the number of bytes that the next message still lacks, as far as known; 0: it is complete.

        A StreamError says that it is longer than allowed, or that the other side is no peer of this protocol.
        """
        if not self._line_came:
            if OPENING.startswith(self._buffer) and len(self._buffer) < len(OPENING):
                return len(OPENING) - len(self._buffer)
            if _BEGUN_LINE.fullmatch(self._buffer):
                return 1  # of another version's line
            self._take_protocol_line()
        try:
            return frames.missing_bytes(self._buffer, self._longest_frame(), self._shortest_frame())
        except frames.FrameError as error:
            raise StreamError(f"it sends no messages of this engine: {error}") from None

    def receive(self) -> dict[str, Any] | None:
        """Remove and return the next message; None as long as it is incomplete.

        A wrong HMAC is an AuthenticationError. A message that is malformed or longer than allowed, or another version
        of the protocol, is a StreamError.
        """
        if self.missing_bytes():
            return None
        content = frames.cut_frame(self._buffer, self._longest_frame(), self._shortest_frame())
        assert content is not None
        if not self._opening:
            opening = _parse(content)
            self._opening = _pop_nonce(opening)
            return opening
        if self._seal is None:
            return self._receive_greeting(content)
        content = self._seal.open(content)
        self.authenticated = True
        return _parse(content)

    def _receive_greeting(self, content: bytes) -> dict[str, Any]:
        if self._side == CLIENT:
            raise StreamError("it sends a second message before it is answered")
        greeting = _parse(self._greeting_seal().open(content))
        self._begin_session(_pop_nonce(greeting))
        self.authenticated = True
        return greeting

    def _greeting_seal(self) -> Seal:
        return Seal(derive_key(self._key, f"greeting {self._opening}"), self._side, self._other)

    def _begin_session(self, clients_nonce: str) -> None:
        key = derive_key(self._key, f"session {self._opening} {clients_nonce}")
        self._seal = Seal(key, self._side, self._other)

    def _take_protocol_line(self) -> None:
        if not self._buffer.startswith(OPENING):
            line = _PROTOCOL_LINE.match(self._buffer)
            if line is None:
                raise StreamError("it is no process of this engine")
            raise StreamError(
                f"it speaks version {int(line[1])} of the engine's protocol, and this process version {PROTOCOL}: "
                "install the same version on both"
            )
        del self._buffer[: len(OPENING)]
        self._line_came = True

    def _longest_frame(self) -> int:
        return self._limit + MAC if self.authenticated else UNPROVEN

    def _shortest_frame(self) -> int:
        return MAC + 1 if self._opening else 1


def _parse(content: bytes) -> dict[str, Any]:
    try:
        return frames.parse_object(content)
    except frames.FrameError as error:
        raise StreamError(f"it sends no messages of this engine: {error}") from None


def _pop_nonce(message: dict[str, Any]) -> str:
    nonce = message.pop("nonce", None)
    if not isinstance(nonce, str) or not _NONCE.fullmatch(nonce):
        raise StreamError("it sends no messages of this engine: a nonce is missing")
    return nonce
