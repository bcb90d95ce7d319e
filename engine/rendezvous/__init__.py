"""The rendezvous: ranks find each other and exchange descriptors.

On each host the *leader*, its lowest rank, makes the control segment and the arena, and listens on an abstract Unix
socket, which leaves nothing behind. With one host it is rank 0. Both sides check that the other runs as the same user,
and prove by HMAC over the other's nonce that they know the job's secret.

    leader -> rank r    challenge: nonce, seconds left; the leader's pidfd
    rank r -> leader    hello: nonce, rank, size, pid, processors, build; rank r's pidfd       (proves)
    leader -> rank r    welcome: pids, processors, hosts; control, arena, pidfds of the host,  (proves)
                        connections to ranks on other hosts; or a refusal, which every rank raises

A message is a 4-byte length, a 32-byte HMAC and JSON. Descriptors follow a welcome one byte per group, because the
kernel takes at most 253 at a time. A stranger on the socket costs one slot for a few seconds and nothing else.

With several hosts the leaders meet over TCP before they welcome anybody (`between`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..world import World
from .call_off import CallOff
from .hosting import Hosting
from .joining import Joining
from .messages import Gathered, introduce

__all__ = ["CallOff", "Gathered", "compared", "gather"]


def compared(build: dict[str, str | int], sockets: int, lanes: str, several_hosts: bool) -> dict[str, str | int]:
    """What must be equal on all ranks; parameters as of `gather`."""
    return build | ({"lanes": lanes, "sockets_per_lane": sockets} if several_hosts else {})


def gather(
    world: World,
    generation: int,
    build: dict[str, str | int],
    timeout: float,
    create: Callable[[], tuple[int, int]],
    levels: Sequence[str] = (),
    interface: str | None = None,
    sockets: int = 1,
    lanes: str = "tcp",
    called_off: CallOff | None = None,
) -> Gathered:
    """Meet the other ranks. Collective.

    Parameters
    ----------
    world : World
        This process's place.
    generation : int
        The number of the world, equal on all ranks: its driver's, or that of `init` calls in this process.
    build : dict
        What must be equal on all ranks: `setup.segment_info()`.
    timeout : float
        Seconds to wait for the others.
    create : callable
        Called on each host's leader when all have come; returns the descriptors of the control segment and the arena.
    levels : sequence of str
        The kernels that this rank can run and may, the best last: hosts with different processors use the best that
        all have.
    interface : str, optional
        The interface of this host, or its address, to which connections from other hosts go; by default the one by
        which it reaches rank 0's host.
    sockets : int
        Connections between two ranks on different hosts, equal on all ranks.
    lanes : str
        What carries large tensors between hosts, equal on all ranks: the setting.
    called_off : CallOff, optional
        Looked at while this rank waits for others, until it has been sent the descriptors, or sends them.

    Raises
    ------
    RendezvousError
        Somebody did not come in time, or died; the message names them, on every rank that came.
    IncompatibleRanksError
        The ranks run different builds; every rank raises it.
    CalledOff
        The world is called off; nothing of it is left here.
    """
    hello = introduce(world, compared(build, sockets, lanes, world.several_hosts), levels)
    if world.leads:
        return Hosting(world, generation, hello, timeout, create, interface, sockets, called_off).run()
    return Joining(world, generation, hello, timeout, called_off).run()
