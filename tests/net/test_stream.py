"""Authenticated streams without a socket: what a stranger, another version or a lying peer sends."""

from __future__ import annotations

import json
import struct

import pytest

from engine.net import frames
from engine.net.stream import (
    CLIENT,
    LIMIT,
    MAC,
    NONCE,
    OPENING,
    SERVER,
    AuthenticatedStream,
    AuthenticationError,
    StreamError,
)

from . import fuzz_stream

KEY = b"key of the job"


def pair(limit: int = LIMIT) -> tuple[AuthenticatedStream, AuthenticatedStream]:
    """Client and server after the greeting and its answer."""
    client, server = AuthenticatedStream(KEY, CLIENT, limit), AuthenticatedStream(KEY, SERVER, limit)
    client.feed(server.open())
    client.receive()
    server.feed(client.encode({"rank": 1}))
    assert server.receive() == {"rank": 1}
    client.feed(server.encode({}))
    assert client.receive() == {}
    return client, server


def test_every_message_may_come_byte_by_byte() -> None:
    client, server = AuthenticatedStream(KEY, CLIENT), AuthenticatedStream(KEY, SERVER)

    def pass_on(data: bytes, to: AuthenticatedStream) -> dict[str, object]:
        for at in range(len(data)):
            assert to.receive() is None and 0 < to.missing_bytes() <= len(data) - at
            to.feed(data[at : at + 1])
        message = to.receive()
        assert message is not None
        return message

    assert pass_on(server.open(pid=7), client) == {"pid": 7} and not client.authenticated
    assert pass_on(client.encode({"worker": 3}), server) == {"worker": 3} and server.authenticated
    assert pass_on(server.encode({"several": True}), client) == {"several": True} and client.authenticated


def test_a_message_that_is_replayed_or_sent_back_is_refused() -> None:
    client, server = pair()
    first, own = client.encode({"world": 1}), server.encode({"world": 2})
    server.feed(first)
    assert server.receive() == {"world": 1}
    for forged in (first, own):
        other = pair()[1]
        other.feed(forged)
        with pytest.raises(AuthenticationError):
            other.receive()
    server.feed(first)
    with pytest.raises(AuthenticationError):
        server.receive()


def test_a_greeting_of_another_connection_proves_nothing() -> None:
    client, server = AuthenticatedStream(KEY, CLIENT), AuthenticatedStream(KEY, SERVER)
    client.feed(server.open())
    client.receive()
    other = AuthenticatedStream(KEY, SERVER)
    other.feed(client.encode({}))
    with pytest.raises(AuthenticationError):
        other.receive()
    assert not other.authenticated


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"enginerun 1\r\n", "it speaks version 1 of the engine's protocol, and this process version 3: install"),
        (b"enginerun 30\r\n", "it speaks version 30 of the engine's protocol"),
        (b"HTTP/1.1 400 Bad Request\r\n", "it is no process of this engine"),
        (b"\0\0\0\x22", "it is no process of this engine"),
        (OPENING + b"\xff\xff\xff\xff", "a frame of 4294967295 bytes"),
        (OPENING + frames.wrap(b"[]"), "its JSON is no object"),
        (OPENING + frames.wrap(b"[" * 4096), "it sends no messages of this engine"),
        (OPENING + frames.wrap(b"{}"), "a nonce is missing"),
        (OPENING + frames.wrap(json.dumps({"nonce": "0" * 31}).encode()), "a nonce is missing"),
        (OPENING + frames.wrap(json.dumps({"nonce": "G" * 2 * NONCE}).encode()), "a nonce is missing"),
    ],
)
def test_a_server_of_another_kind_or_version_is_named(data: bytes, error: str) -> None:
    client = AuthenticatedStream(KEY, CLIENT)
    client.feed(data)
    with pytest.raises(StreamError, match=error):
        client.receive()


@pytest.mark.parametrize("length", [0, 1, MAC, frames.UNPROVEN + 1, 1 << 16, 60 << 20, 1 << 31, (1 << 32) - 1])
@pytest.mark.parametrize("side", [CLIENT, SERVER])
def test_an_unproven_length_beyond_the_limit_is_refused_by_the_header_alone(side: str, length: int) -> None:
    stream = AuthenticatedStream(KEY, side)
    if side == CLIENT:
        stream.feed(AuthenticatedStream(KEY, SERVER).open())
        stream.receive()
        stream.encode({})
    stream.feed(struct.pack(">I", length))
    for use in (stream.missing_bytes, stream.receive):
        with pytest.raises(StreamError, match=f"a frame of {length} bytes"):
            use()


@pytest.mark.parametrize("beyond", [0, 1])
def test_a_proven_side_may_send_messages_up_to_the_limit(beyond: int) -> None:
    client, server = pair(1 << 14)
    message = {"x": "y" * ((1 << 14) - len('{"x": ""}') + beyond)}
    server.feed(client.encode(message))
    if beyond:
        with pytest.raises(StreamError, match="a frame of 16417 bytes"):
            server.receive()
    else:
        assert server.receive() == message


def test_who_knows_another_secret_is_told_so() -> None:
    server, client = AuthenticatedStream(KEY, SERVER), AuthenticatedStream(b"another", CLIENT)
    client.feed(server.open())
    client.receive()
    server.feed(client.encode({}))
    with pytest.raises(AuthenticationError, match="it does not know the secret"):
        server.receive()
    client.feed(server.make_refusal())
    with pytest.raises(AuthenticationError):
        client.receive()


def test_conversations_drawn_at_random_end_in_honest_messages_or_a_clear_error() -> None:
    """A part of `make fuzz`, with a fixed seed."""
    drawn, problems = fuzz_stream.run(1500, 1)
    assert not problems, "\n".join(problems[:5])
    assert min(drawn.values()) > 80
