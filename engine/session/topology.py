"""Rank and size queries: this process's rank, the world size, and the distribution of ranks over hosts.

These are read-only queries. Worker processes of a rank may call them, too, and processes of an elastic job that wait
for a world.
"""

from __future__ import annotations

import multiprocessing
import os

from ..config import config
from ..config.world import NO_LAUNCHER, World, find_place
from ..errors import NotInitializedError
from ..net.rendezvous.layout import Layout
from . import runtime
from .session import EngineSession


def rank() -> int:
    """Return this process's rank, from 0 to `size() - 1`; in a worker process it is the rank of its parent."""
    return _find_world().rank


def size() -> int:
    """Return the number of ranks: the world size."""
    return _find_world().size


def local_rank() -> int:
    """Return this process's rank among the ranks on its host."""
    return _find_world().local_rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return _find_world().local_size


def cross_rank() -> int:
    """Return this host's index among the hosts that have a rank with this rank's `local_rank`: 0, with one host."""
    return _find_layout().cross_rank(rank())[0]


def cross_size() -> int:
    """Return the number of hosts that have a rank with this rank's `local_rank`: 1, with one host."""
    return _find_layout().cross_rank(rank())[1]


def is_homogeneous() -> bool:
    """Return whether every host has the same number of ranks: True, with one host."""
    return _find_layout().homogeneous


def _find_world() -> World:
    """Return this process's place in its job; in a worker process, such as a data loader's, that of its parent."""
    found = runtime.current_or_pending()
    if found is not None:
        return found.world
    # No walrus: TensorFlow's autograph, which may convert this function, rejects it.
    imported = runtime.imported_world()
    if imported is not None:
        return imported
    return _world_of_worker() if multiprocessing.parent_process() is not None else runtime.current_session().world


def _world_of_worker() -> World:
    """Return the place of the rank that started this process by `multiprocessing` with `spawn` or `forkserver`.

    Such a process has no state of its parent but the launcher's variables.
    """
    world = find_place(config.read_environment())
    if world.source == NO_LAUNCHER:
        raise NotInitializedError(
            f"process {os.getpid()} is a worker that was started with 'spawn' or 'forkserver' (Python 3.14's default), "
            "and has no launcher's variables from which to tell its rank: give it engine.rank() and engine.size() as "
            "arguments, or start the job with enginerun"
        )
    return world


def _find_layout() -> Layout:
    """Return the distribution of ranks over hosts; in a worker process that of its parent's job."""
    found = runtime.current_or_pending()
    if isinstance(found, EngineSession):
        return found.layout
    world = _find_world()
    if world.several_hosts:
        raise NotInitializedError(
            f"process {os.getpid()} is a worker that was started with 'spawn' or 'forkserver', and its variables tell "
            "nothing of other hosts: give it engine.cross_rank() and engine.cross_size() as arguments"
        )
    return Layout((0,) * world.size)
