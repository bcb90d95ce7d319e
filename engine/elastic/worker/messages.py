"""Protocol between a worker and the agent of its host, over a Unix socket of the host.

A message is framed and signed like those of the rendezvous. The worker begins with `hello`, which has its number and a
nonce. The agent answers with `welcome`, which is signed for that nonce and has a nonce of its own. From then on each
message is signed for both nonces, its direction and its count: none can be dropped, replayed or reflected.

| kind | from | fields |
|---|---|---|
| hello | worker | worker, nonce |
| welcome | agent | nonce; several: whether workers may be on several hosts |
| ready | worker | world, why, text, culprit, commit, build; port: its listening port, 0 on one host |
| here | worker | |
| joined, done | worker | world |
| committed | worker | world, commit |
| leaving | worker | |
| logged | worker | value: a text for the program that started the job |
| place | driver | place, members, hosts, hub, reason |
| void, update | driver | world |
| end | driver | why, good; over: true if the job is over, false if it goes on without this worker |
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterator
from typing import Any

from ...net import frames
from ...net.stream import frame, sign, take

LIMIT = 1 << 20  # largest message of an authenticated peer, in bytes


class TalkError(Exception):
    """The peer does not know the job's secret, or violates the protocol."""


class Talk:
    """One side of a connection between worker and agent: encodes messages, and decodes and verifies those of the peer.

    Parameters
    ----------
    secret : str
        The job's secret.
    label, other : str
        Roles of this side and of the peer: `worker` and `agent`, or vice versa.

    Attributes
    ----------
    proven : bool
        Whether the peer is authenticated: a message has come that only a process with the secret could send now.
    """

    def __init__(self, secret: str, label: str, other: str) -> None:
        self.proven = False
        self._key = hashlib.sha256(f"gate\0{secret}".encode()).digest()
        self._label, self._other = label, other
        self._nonce = secrets.token_hex(16)
        self._nonces = ""
        self._sent = self._received = 0
        self._buffer = bytearray()

    def hello(self, worker: int) -> bytes:
        """Return the bytes of the worker's first message."""
        return frame({"kind": "hello", "worker": worker, "nonce": self._nonce}, self._key, "hello", "")

    def welcome(self, hello: dict[str, Any], several: bool) -> bytes:
        """Return the bytes of the agent's answer to a `hello`."""
        theirs = str(hello["nonce"])
        self._nonces = f"{theirs}.{self._nonce}"
        return frame({"kind": "welcome", "nonce": self._nonce, "several": several}, self._key, "welcome", theirs)

    def message(self, kind: str, /, **fields: Any) -> bytes:
        """Return the bytes of a message; both sides must have exchanged `hello` and `welcome`."""
        data = frame({"kind": kind, **fields}, self._key, self._label, f"{self._nonces}.{self._sent}")
        self._sent += 1
        return data

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Add received bytes, and yield the messages that are complete and verified.

        Raises
        ------
        TalkError
        """
        self._buffer += data
        while (found := self._cut()) is not None:
            proof, payload = found
            label, nonce = self._expected()
            if not hmac.compare_digest(proof, sign(self._key, label, nonce, payload)):
                raise TalkError("it does not know the secret of this job")
            try:
                message = frames.parse_object(payload)
            except frames.FrameError:
                message = {}
            if not isinstance(message.get("kind"), str):
                raise TalkError("it sends no messages of this protocol")
            if label == "welcome":
                self._nonces = f"{self._nonce}.{message['nonce']}"
            if label != "hello":
                self.proven = True
            if label == self._other:
                self._received += 1
            yield message

    def _cut(self) -> tuple[bytes, bytes] | None:
        try:
            return take(self._buffer, LIMIT if self.proven else frames.UNPROVEN)
        except ValueError:
            raise TalkError("it sends no messages of this protocol") from None

    def _expected(self) -> tuple[str, str]:
        """Return the label and nonce that the peer's next message must be signed for."""
        if self._nonces:
            return self._other, f"{self._nonces}.{self._received}"
        return ("hello", "") if self._label == "agent" else ("welcome", self._nonce)
