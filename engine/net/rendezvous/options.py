"""Options of a rendezvous, the same for one host and for several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .messages import Abort


def _abort_nothing(control: int, hosts: Sequence[int], error: BaseException) -> None:
    """Do nothing: no world is to be failed."""


@dataclass(frozen=True)
class RendezvousOptions:
    """Options with which a rank meets the others.

    Attributes
    ----------
    generation : int
        Number of the world: the driver's, or one more than the number of worlds that this process has begun. If the
        ranks' numbers differ, the highest is used.
    build : dict
        Values that must be equal on all ranks: `setup.segment_info()`.
    timeout : float
        Seconds to wait for the others.
    create : callable
        Called on each host's leader when all ranks have come; returns the descriptors of control segment and arena.
    levels : sequence of str
        Kernels that this rank can and may run, the best last. Hosts with different processors use the best common one.
    interface : str or None
        Interface or address of this host to which other hosts connect; None: the one that reaches rank 0's host.
    sockets : int
        Number of connections between two ranks on different hosts, equal on all ranks.
    lanes : str
        The setting `lanes`: the transport of large tensors between hosts, equal on all ranks.
    failure : str
        Reason why this rank cannot start; empty if it can. A rank with a failure takes part for at most
        `messages.TELLING` seconds, so that every other rank learns the reason.
    abort : callable
        Fails the world for ranks that have been welcomed already, if this rank cannot continue.
    """

    generation: int
    build: dict[str, str | int]
    timeout: float
    create: Callable[[], tuple[int, int]]
    levels: Sequence[str] = ()
    interface: str | None = None
    sockets: int = 1
    lanes: str = "tcp"
    failure: str = ""
    abort: Abort = _abort_nothing
