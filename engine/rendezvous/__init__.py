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

import contextlib
from collections.abc import Callable, Sequence

from .. import readable
from ..errors import EngineError, RendezvousError
from ..host import linux
from ..world import World
from .call_off import CallOff
from .hosting import Hosting
from .joining import Joining
from .messages import Abort, Gathered, introduce, version

__all__ = ["CallOff", "Gathered", "compared", "gather"]


def compared(build: dict[str, str | int], sockets: int, lanes: str, several_hosts: bool) -> dict[str, str | int]:
    """What must be equal on all ranks; parameters as of `gather`. Hosts may have different installations."""
    if not several_hosts:
        return build
    return {"enginerun": version(), **build, "lanes": lanes, "sockets_per_lane": sockets}


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
    failure: str = "",
    abort: Abort = lambda control, hosts, error: None,
) -> Gathered:
    """Meet the other ranks. Collective.

    Parameters
    ----------
    world : World
        This process's place.
    generation : int
        The number of the world: its driver's, or one more than the worlds that this process has begun. Of ranks that
        have counted differently the highest number holds.
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
    failure : str
        Why this rank cannot start. It comes all the same, so that every other rank hears why, and waits no longer than
        `messages.TELLING`.
    abort : callable
        Fails the world for those that have been welcomed, if this rank cannot go on by then.

    Raises
    ------
    RendezvousError
        Somebody did not come in time, died, or cannot start; the message names them, on every rank that came.
    IncompatibleRanksError
        The ranks run different builds; every rank raises it.
    CalledOff
        The world is called off; nothing of it is left here.
    """
    meeting: Hosting | Joining | None = None
    try:
        hello = introduce(world, generation, compared(build, sockets, lanes, world.several_hosts), levels, failure)
        if world.leads:
            meeting = Hosting(world, hello, timeout, create, abort, interface, sockets, called_off)
        else:
            meeting = Joining(world, hello, timeout, abort, called_off)
        return meeting.run()
    except Exception as error:
        known = meeting is not None and (meeting.introduced or isinstance(error, EngineError))
        if not known and not failure:
            with contextlib.suppress(Exception):  # What this rank raises is the first error.
                told = readable.exception(error)
                gather(world, generation, build, timeout, create, (), interface, sockets, lanes, called_off, told)
        if isinstance(error, EngineError):
            raise
        told = linux.explain(error) if isinstance(error, OSError) else readable.exception(error)
        raise RendezvousError(f"rank {world.rank} cannot meet the other ranks: {told}") from error
