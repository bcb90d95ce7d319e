"""Limit on connections without a valid message yet (strangers), and the choice of the one that a newer one displaces.

Newcomers are never refused, so idle connections cannot keep legitimate peers away. The oldest connection of the address
with the most connections is displaced: a crowd from one address displaces itself.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from .sockets import retry_short

SPARE = 16  # descriptors that strangers from the network leave free for the program
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
Connection = TypeVar("Connection")


def accept(
    listener: socket.socket, drop_unauthenticated: Callable[[], bool], spare: int = SPARE
) -> tuple[socket.socket, Any]:
    """Accept a connection; while the process is short of descriptors, strangers are displaced for it.

    It returns the connection and its remote address. `drop_unauthenticated` closes the stranger that is displaced next,
    and returns False if there is none. `spare` is the number of descriptors that strangers leave free. Use 0 if all
    peers are of this user and do not reconnect after being displaced: a process with few descriptors may still have
    enough for all legitimate peers. Errors are those of the system's `accept`, with `NO_DESCRIPTORS` only if no
    stranger holds any.
    """
    while True:
        try:
            connection, name = retry_short(listener.accept)
            break
        except OSError as error:
            if error.errno not in NO_DESCRIPTORS or not drop_unauthenticated():
                raise
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # the system assigns the lowest free number
    if limit != resource.RLIM_INFINITY and connection.fileno() >= limit - spare:
        drop_unauthenticated()
    return connection, name


def free_descriptors(drop_unauthenticated: Callable[[], bool], count: int = 1) -> None:
    """Free `count` descriptors by displacing strangers, as far as these hold any.

    `drop_unauthenticated` is that of `accept`. The system drops a descriptor that comes with a message if there is no
    room for it.
    """
    held: list[int] = []
    try:
        while len(held) < count:
            try:
                held.append(os.open("/", os.O_PATH | os.O_CLOEXEC))
            except OSError as error:
                if error.errno not in NO_DESCRIPTORS or not drop_unauthenticated():
                    return
    finally:
        for descriptor in held:
            os.close(descriptor)


class Strangers(Generic[Connection]):
    """Strangers of a listener, oldest first, at most `most` of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._addresses: dict[Connection, str] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def __contains__(self, connection: object) -> bool:
        return connection in self._addresses

    def __iter__(self) -> Iterator[Connection]:
        return iter([*self._addresses])

    def add(self, connection: Connection, address: str = "") -> Connection | None:
        """Add a connection, any hashable object; return the displaced one, which the caller closes, or None.

        `address` is the remote address without the port; empty if addresses mean nothing.
        """
        displaced = self.displace_next() if len(self._addresses) >= self._most else None
        self._addresses[connection] = address
        return displaced

    def displace_next(self) -> Connection | None:
        """Remove and return the connection that is displaced next, which the caller closes; None if there is none."""
        counts = Counter(self._addresses.values())
        most = max(counts.values(), default=0)
        displaced = next((each for each, address in self._addresses.items() if counts[address] == most), None)
        if displaced is not None:
            del self._addresses[displaced]
        return displaced

    def remove(self, connection: Connection) -> None:
        """Remove a connection that is no longer a stranger, or has ended; do nothing if it is unknown."""
        self._addresses.pop(connection, None)
