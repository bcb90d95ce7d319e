"""The messages between the launcher and the agent of a host, and the channel that carries them.

A message is a frame (`engine.frames`) of the length of a head, the head as JSON, and bytes that belong to it. The
channel is the agent's standard input and output. What a host's shell writes there before the agent begins is passed
over: the agent's first bytes are `GREETING`. Over a network each message is sealed (`Seal`).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import select
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .. import frames
from ..bounded_reader import LARGEST
from ..forms import MOST
from ..host.patience import Patience
from ..host.sockets import retry_short
from .outgoing import Outgoing

GREETING = b"\0enginerun agent 2\n"
LIMIT = 64 << 20  # bytes of a message
CODES = (-(1 << 8), 1 << 8)  # exit codes, and signals as negative ones
PIDS = (1, 1 << 31)
WORLDS = (0, 1 << 60)  # numbers of which a job never has too many: worlds, workers, commits, ticks
HEAD_LIMIT = 16 << 20  # bytes of its head; that of the first order holds an environment and a command
NOISE = 1 << 16  # bytes before the greeting that are kept for the report of a failed start
READ_BYTES = 1 << 18
MAC = 32  # bytes of the proof in a sealed message
LENGTHS = struct.Struct(">II")  # of the frame, and of the head, as a message that is not sealed begins
_HEAD = struct.Struct(">I")


class ChannelError(Exception):
    """The other side does not speak this protocol."""


class Seal:
    """Proofs of the messages of a connection over a network: none can be changed, left out, repeated or sent back.

    Parameters
    ----------
    key : bytes
        Key of this connection alone.
    own, other : str
        Names of both sides.
    """

    def __init__(self, key: bytes, own: str, other: str) -> None:
        self._key = key
        self._own, self._other = own, other
        self._sent = self._received = 0

    def close(self, content: bytes) -> bytes:
        """Return the content of the next message to send, with its proof before it."""
        proof = self._prove(self._own, self._sent, content)
        self._sent += 1
        return proof + content

    def open(self, content: bytes) -> bytes:
        """Return the content of the next message that has come, without its proof.

        Raises
        ------
        ChannelError
            The proof is wrong.
        """
        proof, content = content[:MAC], content[MAC:]
        if not hmac.compare_digest(proof, self._prove(self._other, self._received, content)):
            raise ChannelError("a message is not from whom it should be")
        self._received += 1
        return content

    def derive(self, purpose: str) -> bytes:
        """Return a key that both sides of the connection know, for something else."""
        return hmac.digest(self._key, f"derive {purpose}".encode(), "sha256")

    def _prove(self, side: str, number: int, content: bytes) -> bytes:
        return hmac.digest(self._key, f"{side} {number} ".encode() + content, "sha256")


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes
    ----------
    kind : str
        What it is about: one of those that `agent` and `conductor` handle.
    head : dict
        Its fields.
    body : bytes
        What belongs to it as bytes: output, parts of files.
    """

    kind: str
    head: dict[str, Any]
    body: bytes = b""

    def number(self, name: str, least: int = 0, most: int = MOST) -> int:
        """A field that is a whole number from `least` to `most`.

        Raises
        ------
        ChannelError
            It is missing, or something else; so for the others.
        """
        value = self._field(name, "a whole number", int)
        if not least <= value <= most:
            raise ChannelError(f"a message {self.kind!r} has {name} = {value}, and not from {least} to {most}")
        return int(value)

    def numbers(self, name: str, least: int = 0, most: int = MOST) -> list[int]:
        """A field that is a list of whole numbers."""
        values = self._field(name, "a list", list)
        if not all(type(value) is int and least <= value <= most for value in values):
            raise ChannelError(f"a message {self.kind!r} has a list {name} of others than numbers {least} to {most}")
        return list(values)

    def seconds(self, name: str, least: float = -LARGEST, most: float = LARGEST) -> float:
        """A field that is a time."""
        value = self._field(name, "a number", int, float)
        if not least <= value <= most:
            raise ChannelError(f"a message {self.kind!r} has {name} = {value!r}, which is no such time")
        return float(value)

    def text(self, name: str) -> str:
        """A field that is a text."""
        return str(self._field(name, "a text", str))

    def truth(self, name: str) -> bool:
        """A field that is true or false."""
        return bool(self._field(name, "true or false", bool))

    def _field(self, name: str, what: str, *kinds: type) -> Any:
        value = self.head.get(name)
        if type(value) not in kinds:
            raise ChannelError(f"a message {self.kind!r} has {name} = {value!r} instead of {what}")
        return value


def pack(kind: str, body: bytes = b"", /, **head: Any) -> bytes:
    """Write a message.

    Parameters
    ----------
    kind : str
    body : bytes
    **head
        Its fields, as JSON has them.

    Returns
    -------
    bytes
    """
    return frames.wrap(_content(kind, body, head))


def _content(kind: str, body: bytes, head: dict[str, Any]) -> bytes:
    text = json.dumps([kind, head]).encode()
    return _HEAD.pack(len(text)) + text + body


class Decoder:
    """Cuts what was read into messages.

    Parameters
    ----------
    greeted : bool
        Whether messages begin at once; else they follow `GREETING`.

    Attributes
    ----------
    greeted : bool
        Whether the greeting has come.
    noise : bytes
        The last that came before the greeting.
    limit, head_limit : int
        Most bytes of a message, and of its head.
    seal : Seal or None
        Proofs that messages must have.
    """

    def __init__(self, greeted: bool = True) -> None:
        self.noise = b""
        self.greeted = greeted
        self.limit, self.head_limit = LIMIT, HEAD_LIMIT
        self.seal: Seal | None = None
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Take what was read, and yield the messages that are whole.

        Raises
        ------
        ChannelError
            No message of ours looks like this.
        """
        self._held += data
        if not self.greeted and not self._greet():
            return
        while (content := self._cut()) is not None:
            if self.seal is not None:
                content = self.seal.open(content)
            yield _message(content, self.head_limit)

    def _cut(self) -> bytes | None:
        """Cut the next frame off; one that is too long is refused before it is here."""
        proof = 0 if self.seal is None else MAC
        try:
            return frames.cut(self._held, self.limit + proof, _HEAD.size + proof)
        except frames.FrameError:
            raise ChannelError("what it writes are no messages of an agent") from None

    def _greet(self) -> bool:
        """Look for the greeting, and pass over what comes before it."""
        before, found, after = bytes(self._held).partition(GREETING)
        if found:
            self.greeted = True
            self._held = bytearray(after)
        elif len(before) > NOISE:
            self._held = self._held[-NOISE:]
        self.noise = before[-NOISE:]
        return self.greeted


def _message(content: bytes, head_limit: int) -> Message:
    (length,) = _HEAD.unpack_from(content)
    end = _HEAD.size + length
    if not length <= head_limit or end > len(content):
        raise ChannelError(f"the head of a message is damaged: it has {length} bytes, by its own account")
    try:
        head = frames.parse(content[_HEAD.size : end])
    except frames.FrameError as error:
        raise ChannelError(f"the head of a message is damaged: {error}") from None
    match head:
        case [str(kind), dict(fields)]:
            return Message(kind, fields, content[end:])
    raise ChannelError("the head of a message is damaged: a kind and its fields are expected")


class Channel:
    """Both directions. Nothing here blocks: what cannot be written yet waits in memory, and then on disk.

    Parameters
    ----------
    reading, writing : int
        Descriptors, which the channel owns from now on.
    greeted : bool
        As of `Decoder`.

    Attributes
    ----------
    reading : int
        For a selector; -1 once it has ended.
    out : Outgoing
        What is still to be written; it is `waiting` for room, or `broken` if nobody reads.
    sealed : Seal or None
        Proofs of the messages, over a network.
    """

    def __init__(self, reading: int, writing: int, greeted: bool = True) -> None:
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        self.reading = reading
        self.out = Outgoing(writing)
        self.decoder = Decoder(greeted)
        self.sealed: Seal | None = None

    def send(self, kind: str, body: bytes = b"", /, **head: Any) -> None:
        """Write a message as soon as there is room.

        Parameters
        ----------
        kind, body, **head
            As of `pack`.
        """
        content = _content(kind, body, head)
        self.out.write(frames.wrap(content if self.sealed is None else self.sealed.close(content)))

    def restrict(self, limit: int, head_limit: int) -> None:
        """Bound the messages of the other side from now on: of one that has proven nothing, or that says little."""
        self.decoder.limit, self.decoder.head_limit = limit, head_limit

    def seal(self, seal: Seal) -> None:
        """Prove each further message of this side, and have each of the other side proven."""
        self.sealed = self.decoder.seal = seal

    def receive(self) -> Iterator[Message]:
        """Yield what has come, and what an earlier call has read and not yielded; `ended`: that was the last.

        Raises
        ------
        ChannelError
            The other side does not speak this protocol.
        """
        data: bytes | None
        try:
            data = retry_short(os.read, self.reading, min(READ_BYTES, self.decoder.limit))
        except BlockingIOError:
            data = None
        except OSError:
            data = b""
        if data == b"":
            os.close(self.reading)
            self.reading = -1
        yield from self.decoder.feed(data or b"")

    def messages(self) -> Iterator[Message]:
        """Wait for messages, and yield them until the channel ends.

        Raises
        ------
        ChannelError
            The other side does not speak this protocol.
        """
        poll = select.poll()
        while not self.ended:
            poll.register(self.reading, select.POLLIN)
            poll.poll()
            yield from self.receive()

    def await_end(self, seconds: float) -> None:
        """Wait until the other side closes its end, for so many seconds at most; what it still says is passed over."""
        patience = Patience(seconds)
        poll = select.poll()
        while not self.ended and patience.left():
            poll.register(self.reading, select.POLLIN)
            poll.poll(1000 * patience.wait())
            with contextlib.suppress(ChannelError):
                for _ in self.receive():
                    pass

    @property
    def ended(self) -> bool:
        """Whether the other side has closed it, or is gone."""
        return self.reading < 0

    def hang_up(self) -> None:
        """Close the direction to the other side, which then ends; a second call does nothing."""
        if self.out.descriptor >= 0:
            os.close(self.out.descriptor)
            self.out.descriptor = -1
            self.out.give_up()

    def close(self) -> None:
        """Close both directions; a second call does nothing."""
        self.hang_up()
        if not self.ended:
            os.close(self.reading)
            self.reading = -1
