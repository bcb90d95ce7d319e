"""How whoever gathers with others is told that it shall not: the driver of an elastic job calls a world off."""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import NamedTuple

from ..errors import CalledOff


class CallOff(NamedTuple):
    """What a process looks at while it waits for the other ranks of a world.

    Attributes
    ----------
    descriptor : int
        Readable when something has come that may be the news; it stays the caller's.
    happened : callable
        Reads what has come, without blocking, and says whether the world is called off. Once it has said so it does
        whenever it is asked.
    """

    descriptor: int
    happened: Callable[[], bool]

    def expect_none(self, seconds: float = 0.0) -> None:
        """Wait so long for the news, or not at all.

        Raises
        ------
        CalledOff
            It has come.
        """
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        poll.poll(seconds * 1000)
        self.check()

    def check(self) -> None:
        """Raise CalledOff if the news has come."""
        if self.happened():
            raise CalledOff("the world is called off: another place comes from the driver of the job")
