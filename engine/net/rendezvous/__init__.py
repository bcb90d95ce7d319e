"""The rendezvous: ranks find each other and exchange descriptors.

On each host the *leader*, its lowest rank, makes the control segment and the arena. It listens on an abstract Unix
socket, which leaves no file behind. Both sides check that the other runs as the same user, and talk over an
authenticated stream (`engine.net.stream`). With one host the leader is rank 0.

    leader -> rank r    opening: seconds left, its pid; the leader's pidfd
    rank r -> leader    greeting: rank, size, pid, processors, build; rank r's pidfd
    leader -> rank r    answer: empty
    leader -> rank r    welcome: pids, processors, hosts; control, arena, pidfds of the host, connections to ranks on
                        other hosts; or a refusal, which every rank raises

Descriptors follow a welcome in groups, each sent with one byte, because the kernel takes at most 253 at a time. A
connection that proves nothing costs one slot for a few seconds.

With several hosts the leaders meet over TCP before they send any welcome (`inter_host`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from ...config.world import World
from ...errors import EngineError, RendezvousError
from ...host import linux
from ...text import readable
from .cancellation import CancellationToken
from .local_client import LocalClient
from .local_server import LocalServer
from .messages import Abort, Gathered, introduce, version

__all__ = ["CancellationToken", "Gathered", "compared", "gather"]


def compared(build: dict[str, str | int], sockets: int, lanes: str, several_hosts: bool) -> dict[str, str | int]:
    """Return the values that must be equal on all ranks; parameters are those of `gather`.

    With several hosts these include the engine's version, because hosts may have different installations.
    """
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
    cancel: CancellationToken | None = None,
    failure: str = "",
    abort: Abort = lambda control, hosts, error: None,
) -> Gathered:
    """Meet the other ranks and exchange descriptors. Collective.

    Parameters
    ----------
    world : World
        Rank, size, host and job of this process.
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
    interface : str, optional
        Interface or address of this host to which other hosts connect; by default the one that reaches rank 0's host.
    sockets : int
        Connections between two ranks on different hosts, equal on all ranks.
    lanes : str
        The setting `lanes`: the transport of large tensors between hosts, equal on all ranks.
    cancel : CancellationToken, optional
        Cancellation, checked while this rank waits for others, until descriptors are sent.
    failure : str
        Why this rank cannot start; empty if it can. A rank with a failure takes part for at most `messages.TELLING`
        seconds, so that every other rank learns the reason.
    abort : callable
        Fails the world for ranks that have been welcomed already, if this rank cannot continue.

    Raises
    ------
    RendezvousError
        A rank did not come in time, died, or cannot start. Every rank that came raises it, with the rank's name.
    IncompatibleRanksError
        The ranks run different builds; every rank raises it.
    CalledOff
        The world is called off; this rank holds no resources of it.
    """
    meeting: LocalServer | LocalClient | None = None
    try:
        hello = introduce(world, generation, compared(build, sockets, lanes, world.several_hosts), levels, failure)
        if world.leads:
            meeting = LocalServer(world, hello, timeout, create, abort, interface, sockets, cancel)
        else:
            meeting = LocalClient(world, hello, timeout, abort, cancel)
        return meeting.run()
    except Exception as error:
        known = meeting is not None and (meeting.introduced or isinstance(error, EngineError))
        if not known and not failure:
            with contextlib.suppress(Exception):  # What this rank raises is the first error.
                told = readable.exception(error)
                gather(world, generation, build, timeout, create, (), interface, sockets, lanes, cancel, told)
        if isinstance(error, EngineError):
            raise
        told = linux.explain(error) if isinstance(error, OSError) else readable.exception(error)
        raise RendezvousError(f"rank {world.rank} cannot meet the other ranks: {told}") from error
