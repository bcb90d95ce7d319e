"""Connections that have proven nothing yet: how many there may be, and which one gives way to a newer one.

Newcomers are never refused, so that idle connections cannot keep those away who belong. The oldest connection of the
address that has most of them gives way: a crowd from one address displaces itself.
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

SPARE = 16  # descriptors that strangers of the network leave free for the program
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
Connection = TypeVar("Connection")


def accept(listener: socket.socket, give_way: Callable[[], bool], spare: int = SPARE) -> tuple[socket.socket, Any]:
    """Accept a connection. While the process is short of descriptors, strangers give way to it.

    Parameters
    ----------
    listener : socket.socket
    give_way : callable
        Closes the oldest connection that has proven nothing; returns False if there is none.
    spare : int
        Descriptors that strangers leave free. 0 where all are of this user, and do not come back if they had to give
        way: a process that has few descriptors may have enough for all who belong.

    Returns
    -------
    tuple
        The connection, and where it comes from.

    Raises
    ------
    OSError
        As `accept` of the system raises; `NO_DESCRIPTORS` only if no stranger holds any.
    """
    while True:
        try:
            connection, name = retry_short(listener.accept)
            break
        except OSError as error:
            if error.errno not in NO_DESCRIPTORS or not give_way():
                raise
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # the system gives the lowest number that is free
    if limit != resource.RLIM_INFINITY and connection.fileno() >= limit - spare:
        give_way()
    return connection, name


def reserve(give_way: Callable[[], bool], count: int = 1) -> None:
    """See to it that descriptors are free, as far as strangers hold any.

    Parameters
    ----------
    give_way : callable
        As of `accept`.
    count : int
        Descriptors that are needed: one that comes with a message is dropped by the system if there is no room for it.
    """
    held: list[int] = []
    try:
        while len(held) < count:
            try:
                held.append(os.open("/", os.O_PATH | os.O_CLOEXEC))
            except OSError as error:
                if error.errno not in NO_DESCRIPTORS or not give_way():
                    return
    finally:
        for descriptor in held:
            os.close(descriptor)


class Strangers(Generic[Connection]):
    """The unproven connections of a listener, the oldest first.

    Parameters
    ----------
    most : int
        Largest number of them.
    """

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
        """Add a connection.

        Parameters
        ----------
        connection
            Anything that can be hashed.
        address : str
            Where it comes from, without a port; empty where addresses mean nothing.

        Returns
        -------
        The connection that gives way, which the caller closes; None if there is room.
        """
        displaced = self.displace() if len(self._addresses) >= self._most else None
        self._addresses[connection] = address
        return displaced

    def displace(self) -> Connection | None:
        """Remove the connection that gives way next, which the caller closes; None if there is none."""
        counts = Counter(self._addresses.values())
        most = max(counts.values(), default=0)
        displaced = next((each for each, address in self._addresses.items() if counts[address] == most), None)
        if displaced is not None:
            del self._addresses[displaced]
        return displaced

    def remove(self, connection: Connection) -> None:
        """Remove a connection that has proven itself, or has ended; nothing happens if it is not there."""
        self._addresses.pop(connection, None)
