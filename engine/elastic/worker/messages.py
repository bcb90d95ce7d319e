"""The talk between a worker and the agent of its host, over a Unix socket of the host.

A message is framed and signed as those of the rendezvous are. The worker begins with `hello`, in which it gives its
number and a nonce; the agent answers with `welcome`, signed for that nonce, and a nonce of its own. From then on each
message is signed for both nonces, its direction and its count: none can be left out, repeated or sent back.

| kind | from | fields |
|---|---|---|
| hello | worker | worker, nonce |
| welcome | agent | nonce; several: whether workers may be on several hosts |
| ready | worker | world, why, text, culprit, commit, build; port: on which it listens, 0 on one host |
| here | worker | |
| joined, done | worker | world |
| committed | worker | world, commit |
| leaving | worker | |
| logged | worker | value: a text for whoever started the job |
| place | driver | place, members, hosts, hub, reason |
| void, update | driver | world |
| end | driver | why, good; over: whether the job goes on without this worker, or not |
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterator
from typing import Any

from ... import frames
from ...rendezvous.messages import frame, sign, take

LIMIT = 1 << 20  # bytes of a message of somebody who is proven


class TalkError(Exception):
    """The other side does not know the job's secret, or does not speak as it should."""


class Talk:
    """One side of a talk: makes the bytes of messages, and reads and proves those of the other side.

    Parameters
    ----------
    secret : str
        The job's.
    label, other : str
        `worker` and `agent`, or the other way round.

    Attributes
    ----------
    proven : bool
        Whether a message of the other side has come that only who knows the secret could send now.
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
        """The worker's first message."""
        return frame({"kind": "hello", "worker": worker, "nonce": self._nonce}, self._key, "hello", "")

    def welcome(self, hello: dict[str, Any], several: bool) -> bytes:
        """The agent's answer to a `hello`."""
        theirs = str(hello["nonce"])
        self._nonces = f"{theirs}.{self._nonce}"
        return frame({"kind": "welcome", "nonce": self._nonce, "several": several}, self._key, "welcome", theirs)

    def message(self, kind: str, /, **fields: Any) -> bytes:
        """The bytes of a message, once both sides have greeted."""
        data = frame({"kind": kind, **fields}, self._key, self._label, f"{self._nonces}.{self._sent}")
        self._sent += 1
        return data

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Take what was read, and yield the messages that are whole and proven.

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
        """For what the next message of the other side must be signed."""
        if self._nonces:
            return self._other, f"{self._nonces}.{self._received}"
        return ("hello", "") if self._label == "agent" else ("welcome", self._nonce)
