"""Cancellation of a rendezvous: the driver of an elastic job gives a world up while its ranks gather."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...errors import CalledOff
from ...host.sockets import wait_readable


class CancellationToken(NamedTuple):
    """Cancellation token that a process checks while it waits for the other ranks of a world."""

    descriptor: int  # becomes readable when the cancellation may have arrived; the caller keeps it
    is_cancelled: Callable[[], bool]  # reads pending messages without blocking; once True, it stays so

    def wait(self, seconds: float = 0.0) -> None:
        """Wait up to `seconds` for a cancellation, and raise CalledOff if the rendezvous is cancelled."""
        wait_readable([self.descriptor], seconds)
        self.check()

    def check(self) -> None:
        """Raise `CalledOff` if the rendezvous is cancelled."""
        if self.is_cancelled():
            raise CalledOff("the world is called off: another place comes from the driver of the job")
