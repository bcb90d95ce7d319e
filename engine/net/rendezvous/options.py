"""Options of a rendezvous, the same for one host and for several, and its cancellation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import CalledOff
from ...host.sockets import wait_readable
from .messages import Abort


class CancellationToken(NamedTuple):
    """Cancellation token that a process checks while it waits for the other ranks of a world.

    The driver of an elastic job gives a world up while its ranks gather.
    """

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


@dataclass(frozen=True)
class RendezvousOptions:
    """Options with which a rank meets the others.

    `generation` is the driver's, or one more than the number of worlds that this process has begun. If the ranks'
    numbers differ, the highest is used. A rank with a `failure` takes part for at most `messages.TELLING` seconds, so
    that every other rank learns the reason.
    """

    generation: int  # number of the world
    build: dict[str, str | int]  # values that must be equal on all ranks: `setup.segment_info()`
    timeout: float  # seconds to wait for the others
    # Called on each host's leader when all ranks have come; returns descriptors of control segment and arena
    create: Callable[[], tuple[int, int]]
    levels: Sequence[str] = ()  # kernels that this rank can and may run, the best last; hosts use the best common one
    # Interface or address of this host to which others connect; None: the one that reaches rank 0's host
    interface: str | None = None
    sockets: int = 1  # number of connections between two ranks on different hosts, equal on all ranks
    lanes: str = "tcp"  # setting `lanes`: the transport of large tensors between hosts, equal on all ranks
    failure: str = ""  # reason why this rank cannot start; empty if it can
    # Fails the world for ranks that have been welcomed already, if this rank cannot continue
    abort: Abort = lambda control, hosts, error: None
