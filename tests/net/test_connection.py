"""Authentication between hosts: a stranger may overhear, repeat and send back the ranks' messages."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any

import pytest

from engine.host.network import address_of
from engine.host.patience import Patience
from engine.host.sockets import wait_readable
from engine.net.connection import Connection, connect, receive_greeting
from engine.net.event_loop import Coroutine, CoroutineLoop
from engine.net.frames import UNPROVEN
from engine.net.stream import CLIENT, OPENING, SERVER, AuthenticatedStream, AuthenticationError

KEY = bytes(32)
GREETING = {"role": "leader", "rank": 1}
OPENED = AuthenticatedStream(KEY, SERVER).open()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(10)
        yield made


def settle(*conversations: Coroutine[Any]) -> list[Any]:
    """Run conversations to their ends; return the result or error of each."""
    loop, found = CoroutineLoop(), {}

    def keep(number: int, steps: Coroutine[Any]) -> Coroutine[None]:
        try:
            found[number] = yield from steps
        except (OSError, ValueError) as error:
            found[number] = error

    for number, steps in enumerate(conversations):
        loop.start(keep(number, steps))
    while len(found) < len(conversations):
        wait_readable([loop.fileno()], loop.next_timeout())
        loop.run_ready()
    loop.close()
    return [found[number] for number in range(len(conversations))]


def accepted(listener: socket.socket, key: bytes = KEY) -> Coroutine[tuple[Connection, dict[str, Any]]]:
    made = Connection(listener.accept()[0], key, SERVER)
    greeting = yield from receive_greeting(made)
    made.send_message({"welcome": True})
    return made, greeting


def calling(listener: socket.socket, key: bytes = KEY) -> Coroutine[tuple[Connection, dict[str, Any]]]:
    return connect(address_of(listener.getsockname()), key, GREETING, Patience(10.0), Patience(10.0))


def test_both_sides_are_proven_and_later_messages_too(listener: socket.socket) -> None:
    (caller, told), (answerer, greeting) = settle(calling(listener), accepted(listener))
    assert told == {"welcome": True}
    assert greeting["rank"] == 1
    for number in range(3):
        caller.send_message({"number": number})
        answerer.send_message({"number": -number})
        assert settle(answerer.receive_message(), caller.receive_message()) == [{"number": number}, {"number": -number}]
    caller.close()
    answerer.close()


def test_what_follows_a_message_stays_unread(listener: socket.socket) -> None:
    (caller, _), (answerer, _) = settle(calling(listener), accepted(listener))
    caller.send_message({"last": True})
    caller.socket.sendall(b"native")
    assert settle(answerer.receive_message()) == [{"last": True}]
    assert answerer.socket.recv(100) == b"native"
    caller.close()
    answerer.close()


def test_another_key_is_refused_on_both_sides(listener: socket.socket) -> None:
    first, second = settle(calling(listener, b"x" * 32), accepted(listener))
    assert type(first) is AuthenticationError
    assert type(second) is AuthenticationError


@pytest.mark.parametrize("change", ["repeated", "left out", "sent back"])
def test_a_message_counts_once_in_its_place_and_direction(listener: socket.socket, change: str) -> None:
    """A message that is repeated, left out or sent back to its sender is refused."""
    (caller, _), (answerer, _) = settle(calling(listener), accepted(listener))
    connection, written = caller.socket, []
    caller.socket = Recorder(connection, written)  # type: ignore[assignment]
    caller.send_message({"number": 0})
    caller.send_message({"number": 1})
    caller.socket = connection
    if change == "sent back":
        answerer.socket.sendall(written[0])
        hears = caller
    else:
        if change == "repeated":
            connection.sendall(written[0])
            assert settle(answerer.receive_message()) == [{"number": 0}]
        connection.sendall(written[0] if change == "repeated" else written[1])
        hears = answerer
    assert [type(each) for each in settle(hears.receive_message())] == [AuthenticationError]
    caller.close()
    answerer.close()


class Recorder:
    """Connection that records data instead of sending it."""

    def __init__(self, connection: socket.socket, written: list[bytes]) -> None:
        self._connection, self._written = connection, written

    def send(self, data: bytes, flags: int = 0) -> int:
        self._written.append(bytes(data))
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def overheard(listener: socket.socket) -> bytes:
    """Greeting of a rank to a listener, which another connection has got."""
    (caller, _), (answerer, _) = settle(calling(listener), accepted(listener))
    server, client = AuthenticatedStream(KEY, SERVER), AuthenticatedStream(KEY, CLIENT)
    client.feed(server.open())
    client.receive()
    for each in (caller, answerer):
        each.close()
    return client.encode(GREETING)


def test_a_greeting_that_was_overheard_proves_nothing(listener: socket.socket) -> None:
    replayed = overheard(listener)
    with socket.create_connection(listener.getsockname()) as stranger:
        stranger.sendall(replayed)
        (found,) = settle(accepted(listener))
    assert type(found) is AuthenticationError


def mirror(stranger: socket.socket) -> bytes:
    """Echo a caller's bytes."""
    stranger.sendall(OPENED)
    greeting = stranger.recv(UNPROVEN)
    stranger.sendall(greeting)
    return greeting


@pytest.mark.parametrize(
    ("says", "kind"),
    [
        (lambda stranger: mirror(stranger), AuthenticationError),
        (lambda stranger: stranger.sendall(OPENED + AuthenticatedStream.make_refusal()), AuthenticationError),
        (lambda stranger: stranger.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n<html>"), ValueError),
        (lambda stranger: stranger.sendall(OPENED + b"\xff" * 64), ValueError),
        (lambda stranger: stranger.sendall(OPENING), ConnectionError),
    ],
    ids=["mirror", "unsigned", "http", "junk", "half"],
)
def test_whoever_listens_in_rank_0s_place_learns_nothing_and_is_refused(
    listener: socket.socket, says: Callable[[socket.socket], object], kind: type[Exception]
) -> None:
    def stranger() -> None:
        with listener.accept()[0] as connection:
            says(connection)

    thread = Thread(target=stranger)
    thread.start()
    (found,) = settle(calling(listener))
    thread.join()
    assert isinstance(found, kind), found


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\x22" + b"x" * 34, b"\xff" * (2 * UNPROVEN)])
def test_of_a_stranger_little_is_read_and_nothing_is_understood(listener: socket.socket, junk: bytes) -> None:
    with socket.create_connection(listener.getsockname()) as stranger:
        stranger.sendall(junk)
        made = Connection(listener.accept()[0], KEY, SERVER)
        (found,) = settle(receive_greeting(made))
        made.close()
    assert isinstance(found, ValueError)
