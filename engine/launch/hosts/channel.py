"""Messages between the launcher and the agent of a host, and the channel that carries them.

A message is a frame (`engine.net.frames`) that holds the length of a head, the head as JSON, and a body of bytes. The
channel is the agent's standard input and output. The agent's first bytes are `GREETING`; output of the host's shell
before them is ignored. Over a network each message is authenticated (`Seal`).
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...config.forms import MOST
from ...host.patience import Patience
from ...host.sockets import retry_short, wait_readable
from ...net import frames
from ...net.stream import MAC, AuthenticationError, Seal
from ...text.bounded_reader import LARGEST
from ..process.outgoing import Outgoing

GREETING = b"\0enginerun agent 2\n"
LIMIT = 64 << 20  # largest size of a message in bytes
CODES = (-(1 << 8), 1 << 8)  # exit codes, and signals as negative ones
PIDS = (1, 1 << 31)
WORLDS = (0, 1 << 60)  # numbers of worlds, workers, commits and ticks
HEAD_LIMIT = 16 << 20  # largest size of a head in bytes; that of `prepare` holds an environment and a command
NOISE = 1 << 16  # bytes before the greeting that are kept for the report of a failed start
READ_BYTES = 1 << 18
LENGTHS = struct.Struct(">II")  # lengths of the frame and of the head, with which an unsealed message begins
_HEAD = struct.Struct(">I")


class ChannelError(Exception):
    """The other side does not speak this protocol."""


@dataclass(frozen=True)
class Message:
    """A message of the channel."""

    kind: str  # one of those that `agent` and `driver` handle
    head: dict[str, Any]  # fields, as JSON has them
    body: bytes = b""  # binary content, such as output or a part of a file

    def get_number(self, name: str, least: int = 0, most: int = MOST) -> int:
        """Return a field that must be a whole number from `least` to `most`.

        This and the other methods raise a `ChannelError` if the field is missing or has another value.
        """
        value = self._get_field(name, "a whole number", int)
        if not least <= value <= most:
            raise ChannelError(f"a message {self.kind!r} has {name} = {value}, and not from {least} to {most}")
        return int(value)

    def get_numbers(self, name: str) -> list[int]:
        """Return a field that must be a list of whole numbers from 0 to `MOST`."""
        values = self._get_field(name, "a list", list)
        if not all(type(value) is int and 0 <= value <= MOST for value in values):
            raise ChannelError(f"a message {self.kind!r} has a list {name} of others than numbers 0 to {MOST}")
        return list(values)

    def get_seconds(self, name: str, least: float = -LARGEST, most: float = LARGEST) -> float:
        """Return a field that must be a number of seconds from `least` to `most`."""
        value = self._get_field(name, "a number", int, float)
        if not least <= value <= most:
            raise ChannelError(f"a message {self.kind!r} has {name} = {value!r}, which is no such time")
        return float(value)

    def get_text(self, name: str) -> str:
        """Return a field that must be a text."""
        return str(self._get_field(name, "a text", str))

    def get_bool(self, name: str) -> bool:
        """Return a field that must be true or false."""
        return bool(self._get_field(name, "true or false", bool))

    def _get_field(self, name: str, what: str, *kinds: type) -> Any:
        value = self.head.get(name)
        if type(value) not in kinds:
            raise ChannelError(f"a message {self.kind!r} has {name} = {value!r} instead of {what}")
        return value


def pack_message(kind: str, body: bytes = b"", /, **head: Any) -> bytes:
    """Return a message as bytes, unsealed; `head` has its fields, as JSON has them."""
    return frames.wrap(_encode_content(kind, body, head))


def _encode_content(kind: str, body: bytes, head: dict[str, Any]) -> bytes:
    text = json.dumps([kind, head]).encode()
    return _HEAD.pack(len(text)) + text + body


class Decoder:
    """Decoder of a stream of messages; if it is not `greeted`, they follow `GREETING`."""

    def __init__(self, greeted: bool = True) -> None:
        self.noise = b""  # last bytes before the greeting, at most `NOISE`
        self.greeted = greeted  # whether the greeting has come
        self.limit, self.head_limit = LIMIT, HEAD_LIMIT  # largest sizes of a message and of its head, in bytes
        self.seal: Seal | None = None  # authentication that messages must pass; None: none
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Take bytes that were read, and yield the messages that are complete.

        A `ChannelError` is raised if a message is malformed or too long, or its HMAC is wrong.
        """
        self._held += data
        if not self.greeted and not self._find_greeting():
            return
        while (content := self._cut_frame()) is not None:
            if self.seal is not None:
                content = self._open_sealed(self.seal, content)
            yield _parse_message(content, self.head_limit)

    @staticmethod
    def _open_sealed(seal: Seal, content: bytes) -> bytes:
        try:
            return seal.open(content)
        except AuthenticationError:
            raise ChannelError("a message is not from whom it should be") from None

    def _cut_frame(self) -> bytes | None:
        """Remove and return the next frame; None if it is incomplete. One that is too long is refused at once."""
        proof = 0 if self.seal is None else MAC
        try:
            return frames.cut_frame(self._held, self.limit + proof, _HEAD.size + proof)
        except frames.FrameError:
            raise ChannelError("what it writes are no messages of an agent") from None

    def _find_greeting(self) -> bool:
        """Look for the greeting, drop it and the bytes before it, and return whether it has come."""
        before, found, after = bytes(self._held).partition(GREETING)
        if found:
            self.greeted = True
            self._held = bytearray(after)
        elif len(before) > NOISE:
            self._held = self._held[-NOISE:]
        self.noise = before[-NOISE:]
        return self.greeted


def _parse_message(content: bytes, head_limit: int) -> Message:
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
    """A bidirectional channel of messages. Sending never blocks: data waits in memory, and then on disk.

    The channel owns its descriptors `reading` and `writing` from now on. `greeted` is that of `Decoder`.
    """

    def __init__(self, reading: int, writing: int, greeted: bool = True) -> None:
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        self.reading = reading  # descriptor to wait for; -1 once the channel has ended
        self.out = Outgoing(writing)  # `waiting` for room, or `broken` if nobody reads
        self.decoder = Decoder(greeted)
        self.sealed: Seal | None = None  # authentication of the messages that are sent; None: none

    def send(self, kind: str, body: bytes = b"", /, **head: Any) -> None:
        """Send a message, as `pack_message` makes it, as soon as there is room."""
        content = _encode_content(kind, body, head)
        self.out.write(frames.wrap(content if self.sealed is None else self.sealed.close(content)))

    def limit_sizes(self, limit: int, head_limit: int) -> None:
        """Limit the size in bytes of messages and heads from the other side, which may not be authenticated yet."""
        self.decoder.limit, self.decoder.head_limit = limit, head_limit

    def authenticate_with(self, seal: Seal) -> None:
        """Authenticate all further messages in both directions."""
        self.sealed = self.decoder.seal = seal

    def receive(self) -> Iterator[Message]:
        """Read once, and yield the complete messages, also those that an earlier call has read and not yielded.

        If `ended` is true afterwards, no more will come. A `ChannelError` is raised if the other side does not speak
        this protocol.
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

    def wait_for_messages(self) -> Iterator[Message]:
        """Wait for messages, and yield them until the channel ends.

        A `ChannelError` is raised if the other side does not speak this protocol.
        """
        while not self.ended:
            wait_readable([self.reading])
            yield from self.receive()

    def await_end(self, seconds: float) -> None:
        """Wait until the other side closes its end, for at most `seconds`; its messages are dropped."""
        patience = Patience(seconds)
        while not self.ended and patience.seconds_left():
            wait_readable([self.reading], patience.wait())
            with contextlib.suppress(ChannelError):
                for _ in self.receive():
                    pass

    @property
    def ended(self) -> bool:
        """True if the other side has closed its end, or has died."""
        return self.reading < 0

    def hang_up(self) -> None:
        """Close the direction to the other side, which makes that side end; a second call does nothing."""
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
