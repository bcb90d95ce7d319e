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
from dataclasses import replace

from ...config.world import World
from ...errors import EngineError, RendezvousError
from ...errors.formatting import format_exception
from ...host import linux
from .local_client import LocalClient
from .local_server import LocalServer
from .messages import Gathered, make_hello
from .options import CancellationToken, RendezvousOptions

__all__ = ["CancellationToken", "Gathered", "RendezvousOptions", "compared_values", "gather_ranks"]


def compared_values(build: dict[str, str | int], sockets: int, lanes: str, several_hosts: bool) -> dict[str, str | int]:
    """Return the values that must be equal on all ranks; parameters are those of `RendezvousOptions`.

    With several hosts these include the engine's version, because hosts may have different installations.
    """
    if not several_hosts:
        return build
    from ... import __version__  # slow to find out

    return {"enginerun": __version__, **build, "lanes": lanes, "sockets_per_lane": sockets}


def gather_ranks(world: World, options: RendezvousOptions, cancel: CancellationToken | None = None) -> Gathered:
    """Meet the other ranks and exchange descriptors. Collective.

    `cancel` is checked while this rank waits for others, until descriptors are sent. If it is cancelled, CalledOff is
    raised, and this rank holds no resources of the rendezvous. If a rank did not come in time, died, or cannot start,
    every rank that came raises a RendezvousError with that rank's name. If the ranks run different builds, every rank
    raises an IncompatibleRanksError.
    """
    rendezvous: LocalServer | LocalClient | None = None
    try:
        values = compared_values(options.build, options.sockets, options.lanes, world.several_hosts)
        hello = make_hello(world, options.generation, values, options.levels, options.failure)
        rendezvous = (LocalServer if world.leads else LocalClient)(world, hello, options, cancel)
        return rendezvous.run()
    except Exception as error:
        known = rendezvous is not None and (rendezvous.introduced or isinstance(error, EngineError))
        if not known and not options.failure:
            with contextlib.suppress(Exception):  # What this rank raises is the first error.
                gather_ranks(world, replace(options, levels=(), failure=format_exception(error)), cancel)
        if isinstance(error, EngineError):
            raise
        reason = linux.explain_error(error) if isinstance(error, OSError) else format_exception(error)
        raise RendezvousError(f"rank {world.rank} cannot meet the other ranks: {reason}") from error
