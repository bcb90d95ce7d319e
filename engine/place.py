"""Which rank this process is, of how many, and how they lie on hosts.

All that is here only tells: worker processes of a rank may ask, too, and in an elastic job who waits for a world.
"""

from __future__ import annotations

import multiprocessing
import os

from . import config, runtime
from .errors import NotInitializedError
from .rendezvous.layout import Layout
from .running import Running
from .world import NO_LAUNCHER, World, find_place


def rank() -> int:
    """This process's rank, from 0 to `size() - 1`; in a worker process its parent's, as for all that only tells."""
    return _world().rank


def size() -> int:
    """The number of ranks: the world size."""
    return _world().size


def local_rank() -> int:
    """This process's rank among those on its host."""
    return _world().local_rank


def local_size() -> int:
    """The number of ranks on this host."""
    return _world().local_size


def cross_rank() -> int:
    """The number of this host among those that have a rank of this rank's `local_rank`: 0, with one host."""
    return _layout().cross(rank())[0]


def cross_size() -> int:
    """The number of hosts that have a rank of this rank's `local_rank`: 1, with one host."""
    return _layout().cross(rank())[1]


def is_homogeneous() -> bool:
    """Whether every host has equally many ranks: True, with one host."""
    return _layout().homogeneous


def _world() -> World:
    """Who this rank is. A worker of it may know, too: data-loading workers ask for their parent's shard."""
    found = runtime.inside()
    if found is not None:
        return found.world
    imported = runtime.imported()  # no walrus: autograph of TensorFlow, which reads this in a function, knows none
    if imported is not None:
        return imported
    return _world_of_worker() if multiprocessing.parent_process() is not None else runtime.current().world


def _world_of_worker() -> World:
    """Who the rank is that started this process of `multiprocessing` with `spawn` or `forkserver`: such a process has
    nothing of its parent but the launcher's variables."""
    world = find_place(config.environment())
    if world.source == NO_LAUNCHER:
        raise NotInitializedError(
            f"process {os.getpid()} is a worker that was started with 'spawn' or 'forkserver' (Python 3.14's default), "
            "and has no launcher's variables from which to tell its rank: give it engine.rank() and engine.size() as "
            "arguments, or start the job with enginerun"
        )
    return world


def _layout() -> Layout:
    """How the ranks lie on hosts, as `_world`."""
    found = runtime.inside()
    if isinstance(found, Running):
        return found.layout
    world = _world()
    if world.several_hosts:
        raise NotInitializedError(
            f"process {os.getpid()} is a worker that was started with 'spawn' or 'forkserver', and its variables tell "
            "nothing of other hosts: give it engine.cross_rank() and engine.cross_size() as arguments"
        )
    return Layout((0,) * world.size)
