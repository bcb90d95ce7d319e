"""The rendezvous: ranks of one host find each other and exchange descriptors.

Rank 0 makes the control segment and the arena, and listens on an abstract Unix socket, which leaves nothing behind.
Both sides check that the other runs as the same user, and prove by HMAC over the other's nonce that they know the job's
secret.

    rank 0 -> rank r    challenge: nonce, seconds left; rank 0's pidfd
    rank r -> rank 0    hello: nonce, rank, size, pid, processors, build; rank r's pidfd       (proves)
    rank 0 -> rank r    welcome: pids, processors; control, arena, all pidfds                  (proves)
                        or a refusal, which every rank raises

A message is a 4-byte length, a 32-byte HMAC and JSON. Descriptors follow a welcome one byte per group, because the
kernel takes at most 253 at a time. A stranger on the socket costs one slot for a few seconds and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

from ..world import World
from .hosting import Hosting
from .joining import Joining
from .messages import Gathered, introduce

__all__ = ["Gathered", "gather"]


def gather(
    world: World,
    generation: int,
    build: dict[str, str | int],
    timeout: float,
    create: Callable[[], tuple[int, int]],
) -> Gathered:
    """Meet the other ranks. Collective.

    Parameters
    ----------
    world : World
        This process's place.
    generation : int
        The number of `init` calls in this process, equal on all ranks.
    build : dict
        What must be equal on all ranks: `setup.segment_info()`.
    timeout : float
        Seconds to wait for the others.
    create : callable
        Called on rank 0 when all have come; returns the descriptors of the control segment and the arena.

    Raises
    ------
    RendezvousError
        Somebody did not come in time, or died; the message names them, on every rank that came.
    IncompatibleRanksError
        The ranks run different builds; every rank raises it.
    """
    hello = introduce(world, build)
    if world.rank == 0:
        return Hosting(world, generation, hello, timeout, create).run()
    return Joining(world, generation, hello, timeout).run()
