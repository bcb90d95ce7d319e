"""Session of this process: started by `init`, ended by `shutdown`, refused in forked children.

In an elastic job `init` only makes a pending session, and `enter_world` enters one world after the other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..collectives.process_sets import ProcessSet
from ..config import config
from ..config.world import World
from ..errors import EngineError, RankStalledError, WorldError
from ..gpu.device import Device
from ..native import core
from ..net.rendezvous import CancellationToken
from .arguments import ProcessSets
from .owner import SessionOwner
from .pending import PendingSession
from .session import EngineSession

owner = SessionOwner()
os.register_at_fork(after_in_child=owner.reset_in_child)


@dataclass(frozen=True)
class Failure:
    """Failure of the world."""

    text: str  # first cause, equal on all ranks
    culprit: int | None  # rank that caused the failure; None if that is not known
    stalled: bool = False  # whether that rank has stalled


def init(process_sets: ProcessSets = None, **settings: Any) -> None:
    """Meet the other ranks and start the engine. Collective. Does nothing if the engine is running.

    It also does nothing in a worker process of `multiprocessing` that imports the script or its modules (`spawn`,
    `forkserver`): the rank is the process that has started the worker. `rank()`, `size()` and similar queries work
    there, too.

    In an elastic job it only stores its arguments; the ranks meet in the function that `elastic.run` wraps. Until then
    `rank()`, `size()` and similar queries return planned numbers.

    Parameters
    ----------
    process_sets : iterable of ProcessSet or of ranks, optional
        Sets to add right after the start, equal on all ranks. `"dynamic"` is accepted and has no effect: sets can be
        added at any time.
    **settings
        Any setting of `engine.config.Config`, such as `start_timeout` (seconds). They take precedence over the
        environment.

    Raises
    ------
    ConfigError
        A setting or a launcher's variable is invalid; or settings are given although the engine is running.
    RendezvousError
        Ranks did not come within `start_timeout`, died, or failed in `init`; the error names them. If `init` fails on
        one rank it fails on all, leaves nothing behind, and can be called again.
    IncompatibleRanksError
        Ranks run different builds.
    ForkedError
        The parent of this process had initialised the engine.
    EngineError
        An ancestor of this process already is this rank, and runs the engine.
    """
    try:
        with owner.hold_alone("init"):
            owner.init(settings, process_sets)
    except EngineError as error:
        raise error.with_traceback(None) from None  # the engine's own frames would only hide the text from the user


def init_in(world: World, **settings: Any) -> None:
    """Start the engine like `init`, in a world that the caller knows of otherwise than from a launcher's variables."""
    try:
        with owner.hold_alone("init"):
            owner.init(settings, None, world)
    except EngineError as error:
        raise error.with_traceback(None) from None


def enter_world(world: World, cancel: CancellationToken | None = None) -> None:
    """End the current world, if any, and enter the next one. Collective over the next one.

    The process keeps the settings of `init`, its knobs, its page of counters and its metrics service. It keeps process
    sets whose ranks the new world has, and wrapped optimizers with the state of their compression. Operations that are
    still in flight end with an error, and names are counted from 0 again.

    `world` is this process's place in the next world, with the world's number. `cancel` is checked while this process
    waits for the others. After CalledOff, and after a RendezvousError as from `init`, this process is in no world, and
    may enter another. A WorldError says that the new world failed before its start was complete. A MismatchError says
    that state which was carried into it is not equal on all ranks.
    """
    owner.enter_world(world, cancel)


def leave_world() -> None:
    """End the current world, if any, and wait for the next one. Collective, unless the world has failed.

    A process leaves before it asks at the gate of an elastic job, since a process that ends waits for ranks that have
    not left.
    """
    owner.leave_world()


def on_enter(callback: Callable[[], None]) -> None:
    """Register a callback that `enter_world` calls in each later world, on its own thread, once the engine runs.

    It must not be collective, since other ranks may have registered other callbacks.
    """
    owner.call_in_later_worlds(callback)


def shutdown() -> None:
    """Finish operations in flight, leave the world and stop the engine. Does nothing if it is not running.

    Waits at most `shutdown_timeout` for operations in flight. Runs automatically when the interpreter exits. After it,
    `init` creates a new world. A signal handler may call it: during another `shutdown` it returns at once, and during
    `init` or `start_timeline` it is deferred until that call has ended.
    """
    owner.shutdown()


def current_session() -> EngineSession:
    """Return the current world. Raises the errors of `current_engine`."""
    return owner.current_session()


def current_or_pending() -> EngineSession | PendingSession | None:
    """Return the current world, else the pending session, else None: `init` was not called, or `shutdown` was."""
    return owner.session or owner.pending


def imported_world() -> World | None:
    """Return the place of this worker process's rank, if it called `init` while it imported the program, else None."""
    return owner.imported


def current_engine() -> core.Engine:
    """Return the native engine.

    It raises a NotInitializedError before `init` and after `shutdown`, and a ForkedError in a forked child.
    """
    return owner.current_session().engine


def current_device() -> Device:
    """Return the GPU of this rank. Raises the errors of `current_engine`."""
    return owner.current_session().device


def current_settings() -> config.Config:
    """Return the settings of this process's current or next engine. Raises the errors of `current_engine`."""
    return owner.pending.settings if owner.pending is not None else owner.current_session().settings


def world_number() -> int:
    """Return the number of the world: the driver's in an elastic job, else the number of worlds of this process."""
    return owner.current_session().generation


def is_waiting() -> bool:
    """Return whether this process waits for a world of an elastic job, and so cannot communicate."""
    return owner.pending is not None


def is_initialized() -> bool:
    """Return whether `init` has been called in this process itself, and `shutdown` has not."""
    return any(each is not None and each.pid == os.getpid() for each in (owner.session, owner.pending))


def world_failure(seconds: float) -> Failure | None:
    """Return the failure of the world, independently of the exception that a framework has raised for it.

    It waits up to `seconds`, since an error of this rank alone may be raised before the failure is known. It is None if
    the world has not failed, or if there is none.
    """
    session = owner.session
    if session is None or os.getpid() != session.pid or not session.monitor.await_failure(seconds):
        return None
    error = session.engine.failure
    culprit = error.rank if isinstance(error, WorldError) and error.rank >= 0 else None
    return Failure(str(error), culprit, isinstance(error, RankStalledError))


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Form a process set. Collective over the world: on all ranks, including those that are not in the set.

    In an elastic job, before the function that `elastic.run` wraps, it only registers the set. Each world forms the
    sets that all its members have registered, and whose ranks it has; use of the others raises an error with the
    reason.

    Parameters
    ----------
    process_set : ProcessSet or iterable of int
        Set, or its ranks in the world. A set costs each of its ranks some memory; one of several hosts also a
        sleeping thread and connections.

    Returns
    -------
    ProcessSet

    Raises
    ------
    ValueError
        There are no ranks, or one is not a rank of the world, or a set with these ranks exists.
    EngineError
        The ranks do not mean the same set.
    """
    if owner.pending is not None:
        return owner.pending.add(process_set)
    session = owner.current_session()
    added = session.sets.add(process_set)
    with owner.hold_alone("add_process_set"):
        session.record_process_set(added)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set once its operations in flight have ended. Collective over the world.

    Returns
    -------
    bool
        Whether the set existed; False for the global set, which cannot be removed.
    """
    if owner.pending is not None:
        return owner.pending.remove(process_set)
    return owner.current_session().sets.remove(process_set)


def process_set(number: int) -> ProcessSet:
    """Return the process set with that `process_set_id`; NotInitializedError if there is none."""
    return owner.current_session().sets.get_by_id(number)


def called_set(number: int) -> ProcessSet:
    """Return the process set with that `call_number`; NotInitializedError if there is none."""
    return owner.current_session().sets.get_by_call_number(number)
