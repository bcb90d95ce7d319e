"""Acceptor of connections: authenticates each in a coroutine of its own, and hands it on or closes it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from ..host import network
from ..host.patience import Patience
from ..host.sockets import SHORT
from ..host.strangers import NO_DESCRIPTORS, Strangers, accept
from .connection import Connection, receive_greeting
from .event_loop import Coroutine, CoroutineLoop, Wait
from .stream import SERVER, AuthenticationError

EXHAUSTED = (*NO_DESCRIPTORS, *SHORT)  # errors of accept if this process can accept no connection
WITHOUT_SECRET = "does not know this job's secret, or is of another job"
_LONGEST_LIST = 8  # most addresses of rejected connections that are kept
_PAUSE = 0.02  # seconds until the next try if there are no descriptors for a connection

Handler = Callable[[Connection, dict[str, Any]], "Coroutine[None] | None"]


class Acceptor:
    """Port that authenticates each connection, or closes it.

    There is one listener for each address of the port; `close` closes them. `handle` is called with an authenticated
    connection and its greeting, and returns the coroutine of the rest, or None. Above `most` unauthenticated
    connections at once, one of them is closed.
    """

    def __init__(
        self, loop: CoroutineLoop, listeners: Sequence[socket.socket], key: bytes, handle: Handler, most: int = 128
    ) -> None:
        self.address = network.address_of(listeners[0].getsockname())
        self.rejected: dict[str, str] = {}  # fault of the last rejected connection, by its address
        self.saw_stranger = False  # whether a connection came that does not know the secret
        self.on_stranger: Callable[[str], None] = lambda _: None  # called with that connection's address
        # Called with an error of `EXHAUSTED`; may raise another, else the acceptor tries again soon
        self.on_exhausted: Callable[[OSError], None] = lambda _: None
        self._loop, self._listeners, self._key, self._handle = loop, listeners, key, handle
        self._greeting: dict[int, Coroutine[None]] = {}
        self._strangers: Strangers[int] = Strangers(most)
        self._numbers = count()
        self._accepting = [self._accept(listener) for listener in listeners]
        for coroutine in self._accepting:
            loop.start(coroutine)

    def close(self) -> None:
        """Close the port, and the connections that are not authenticated yet."""
        for coroutine in (*self._accepting, *self._greeting.values()):
            self._loop.cancel(coroutine)
        for listener in self._listeners:
            listener.close()

    def drop_unauthenticated(self) -> bool:
        """Close an unauthenticated connection to free a descriptor; return False if there is none."""
        displaced = self._strangers.displace_next()
        self._close_displaced(displaced)
        return displaced is not None

    def _accept(self, listener: socket.socket) -> Coroutine[None]:
        while True:
            yield Wait(connection=listener)
            try:
                connected, name = accept(listener, self.drop_unauthenticated)
            except OSError as error:
                if error.errno in EXHAUSTED:  # The listener stays readable.
                    self.on_exhausted(error)
                    yield Wait(Patience(_PAUSE))
                continue  # Otherwise the connection ended before it was accepted.
            host, number = network.address_of(name).host, next(self._numbers)
            self._close_displaced(self._strangers.add(number, host))
            self._greeting[number] = coroutine = self._serve(number, connected, host)
            self._loop.start(coroutine)

    def _close_displaced(self, number: int | None) -> None:
        if number is not None:
            self._loop.cancel(self._greeting[number])

    def _serve(self, number: int, connected: socket.socket, host: str) -> Coroutine[None]:
        try:
            try:
                connection = Connection(connected, self._key, SERVER)
                greeting = yield from receive_greeting(connection)
            finally:
                self._greeting.pop(number, None)
                self._strangers.remove(number)
            rest = self._handle(connection, greeting)
        except AuthenticationError:
            connected.close()
            self._note_fault(host, WITHOUT_SECRET)
            self.saw_stranger = True
            self.on_stranger(host)
        except (OSError, ValueError):
            connected.close()
            self._note_fault(host, "said nothing that a process of this job says")
        except BaseException:
            connected.close()
            raise
        else:
            if rest is not None:
                yield from rest

    def _note_fault(self, host: str, fault: str) -> None:
        if host in self.rejected or len(self.rejected) < _LONGEST_LIST:
            self.rejected[host] = fault
