"""Connections that have proven nothing yet: how many there may be, and which one gives way to a newer one.

Newcomers are never refused, so that idle connections cannot keep those away who belong. The oldest connection of the
address that has most of them gives way: a crowd from one address displaces itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Generic, TypeVar

Connection = TypeVar("Connection")


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
        displaced = self._crowding() if len(self._addresses) >= self._most else None
        if displaced is not None:
            del self._addresses[displaced]
        self._addresses[connection] = address
        return displaced

    def remove(self, connection: Connection) -> None:
        """Remove a connection that has proven itself, or has ended; nothing happens if it is not there."""
        self._addresses.pop(connection, None)

    def _crowding(self) -> Connection | None:
        counts = Counter(self._addresses.values())
        most = max(counts.values(), default=0)
        return next((each for each, address in self._addresses.items() if counts[address] == most), None)
