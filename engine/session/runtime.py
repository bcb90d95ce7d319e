"""Default engine of this process: created by `init`, ended by `shutdown`, refused in forked children.

In an elastic job `init` only makes a pending session, and `enter_world` enters one world after the other.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..collectives.process_sets import WAITING, ProcessSet, check_sets, uninitialized
from ..config import config
from ..config.world import World, detect, find_place
from ..errors import (
    ConfigError,
    EngineError,
    ForkedError,
    NotInitializedError,
    RankStalledError,
    RendezvousError,
    WorldError,
)
from ..exit_report import writer
from ..gpu.device import Device
from ..host import linux
from ..host.processes import read_process
from ..metrics.names import STATES
from ..native import core
from ..net.rendezvous import CancellationToken, mpi_bootstrap
from ..text import logs
from ..text.bounded_reader import natural
from . import optimizers, pending, startup
from .pending import GATE, PendingSession
from .session import EngineSession

_FORKED = (
    "the engine was initialised in process {parent}, and this is its forked child {child}. Use the start method "
    "'spawn' or 'forkserver' for processes that communicate; data-loading workers must not touch the engine."
)

ProcessSets = Iterable[ProcessSet | Iterable[int]] | str | None

HOLDER = "ENGINERUN_RANK_HOLDER"
"""Variable that tells child processes that their parent already is the rank whose variables they have inherited."""

_lock = threading.RLock()
_under_way: str | None = None  # name of the call that holds the lock
_put_off = False  # whether a signal handler has called shutdown() during that call
_session: EngineSession | None = None
_pending: PendingSession | None = None
_generation = 0
_imported: World | None = None  # place of this worker process's rank, if init() did nothing for that reason
_on_enter: list[Callable[[], None]] = []


@dataclass(frozen=True)
class Failure:
    """Failure of the world.

    Attributes
    ----------
    text : str
        First cause, equal on all ranks.
    culprit : int or None
        Rank that caused the failure; None if that is not known.
    stalled : bool
        Whether that rank has stalled.
    """

    text: str
    culprit: int | None
    stalled: bool = False


def _in_forked_child() -> None:
    """Reset the lock in a forked child, where its holder may not exist, and make shared gradients private copies."""
    global _lock, _under_way, _put_off
    _lock, _under_way, _put_off = threading.RLock(), None, False
    if _session is not None:
        for engine in (_session.engine, *_session.sets.engines.values()):
            engine.forked()


os.register_at_fork(after_in_child=_in_forked_child)


@contextlib.contextmanager
def hold_alone(what: str) -> Iterator[None]:
    """Hold the lock for a public function, named `what`, that changes the default engine.

    A signal handler interrupts the main thread, so it may find the lock held by its own thread. Such a call is refused,
    except for `shutdown`, which checks that before and is deferred to the end of the interrupted call.
    """
    global _under_way, _put_off
    with _lock:
        if _under_way is not None:
            raise EngineError(
                f"engine.{what}() was called while engine.{_under_way}() runs in the same thread, as from a signal "
                "handler; call it when that has returned"
            )
        try:
            _under_way = what
            yield
        finally:
            _under_way = None
            put_off, _put_off = _put_off, False
            if put_off:
                shutdown()


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
    with hold_alone("init"):
        if _session is not None:
            _check_pid(_session)
            if settings or process_sets:
                raise ConfigError("the engine is running; call engine.shutdown() before engine.init() with settings")
            return
        if _is_imported_by_worker():
            return
        try:
            (_make_pending if GATE in os.environ else _start_session)(settings, process_sets)
        except EngineError as error:
            # The engine's own frames would only hide the text from the user.
            logs.logger.debug("init has failed", exc_info=True)
            writer.claim_rank()
            writer.report_exception(error)
            raise error.with_traceback(None) from None
        atexit.register(shutdown)


def _start_session(settings: Mapping[str, Any], process_sets: ProcessSets) -> None:
    """Meet the other ranks, and start the default engine: by steps that come down in reverse if one of them fails.

    If it fails on one rank it fails on all ranks, with the reason, and leaves nothing behind. It can be called again.
    """
    global _session, _generation
    if HOLDER in os.environ:
        _expect_own_place()
    session = _create_session(settings, process_sets)
    try:
        session.start((startup.listen_for_metrics, *startup.PREPARE))
        startup.join_world(session)
        _generation = session.generation
        session.start(startup.OPEN)
    except BaseException as error:
        failure = session.engine.failure if session.joined else None
        session.fail(error)
        if failure is not None:
            raise RendezvousError(f"engine.init() has failed, so no rank starts: {failure}") from None
        if not session.announced and isinstance(error, Exception):
            startup.tell_failure(session.world, session.generation, error)
        raise
    _session = session
    _hold_place(session.world)


def _is_imported_by_worker() -> bool:
    """Return whether a worker of `multiprocessing` is importing the program; if so, note its rank's place."""
    global _imported
    process = multiprocessing.current_process()
    if not getattr(process, "_inheriting", False):  # as multiprocessing itself asks
        return False
    _imported = find_place(config.environment())
    logs.logger.info("engine.init() does nothing in process %d, a worker that imports the script", process.pid)
    return True


def imported_world() -> World | None:
    """Return the place of this worker process's rank, if it called `init` while it imported the program, else None."""
    return _imported


def _hold_place(world: World) -> None:
    """Note this process's rank in its environment, for the processes that it starts."""
    if world.size > 1:
        os.environ[HOLDER] = f"{os.getpid()} {world.rank} {world.size} {world.job}"


def _expect_own_place() -> None:
    """Raise EngineError if the process that set `HOLDER`, an ancestor of this one, already is this rank."""
    pid, _, held = os.environ[HOLDER].partition(" ")
    world = find_place(config.environment())
    own = held == f"{world.rank} {world.size} {world.job}"
    holder = natural(pid)
    if own and holder and holder != os.getpid() and read_process(holder) is not None:
        raise EngineError(
            f"process {os.getpid()} was started by process {pid}, which is rank {world.rank} of {world.size} itself, "
            'and has its variables. Call engine.init() in that process alone, under if __name__ == "__main__":; a '
            "process that is to be another rank needs variables of its own"
        )


def _create_session(settings: Mapping[str, Any], process_sets: ProcessSets) -> EngineSession:
    """Find this process's place and check the arguments of `init`. A failure is told to the other ranks, which wait."""
    environ: Mapping[str, str] = {}
    world: World | None = None
    try:
        environ, given, chosen = _read_settings(settings)
        world = _detect_world(environ, chosen)
        logs.configure(chosen.log_level, world.rank)
        sets = _given_sets(process_sets)
        check_sets(sets, world.size)
        return EngineSession(world, given, _generation + 1, environ, sets)
    except Exception as error:
        if world is None and not isinstance(error, RendezvousError):  # Else the ranks have met, and know of it.
            with contextlib.suppress(EngineError):
                world = _detect_world(environ or config.environment(), config.Config())
        if world is not None:
            startup.tell_failure(world, _generation + 1, error)
        raise


def _detect_world(environ: Mapping[str, str], chosen: config.Config) -> World:
    """Find this process's place in its job. Collective if ranks agree over MPI."""
    return detect(environ, partial(mpi_bootstrap.agree, seconds=chosen.start_timeout, interface=chosen.interface))


def _given_sets(process_sets: ProcessSets) -> list[ProcessSet]:
    """Return the process sets that were passed to `init`, as objects."""
    if isinstance(process_sets, str):
        if process_sets != "dynamic":
            raise ConfigError(f"process_sets is a list of sets, or 'dynamic', not {process_sets!r}")
        return []
    return [each if isinstance(each, ProcessSet) else ProcessSet(each) for each in process_sets or ()]


def _read_settings(settings: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any], config.Config]:
    """Return this process's environment, the settings that the user has chosen, and all settings."""
    linux.open_standard_descriptors()
    environ = config.environment()
    given = config.given(environ, settings)
    return environ, given, config.Config(**given)


def _make_pending(settings: Mapping[str, Any], process_sets: ProcessSets) -> None:
    """Make the pending session of an elastic job, unless there is one, and add process sets to it."""
    global _pending
    if _pending is not None and settings:
        raise ConfigError("engine.init() was called before; give it all settings the first time")
    environ, given, chosen = _read_settings(settings)
    world = find_place(environ)
    logs.configure(chosen.log_level, world.rank)
    sets = _given_sets(process_sets)
    waiting = _pending or PendingSession(world, given)
    added: list[ProcessSet] = []
    try:
        for each in sets:
            waiting.add(each)
            added.append(each)
        startup.log_environment(world, environ)
    except BaseException:
        for each in added:
            waiting.remove(each)
        if _pending is None:
            waiting.close()
        raise
    _pending = waiting


def enter_world(world: World, cancel: CancellationToken | None = None) -> None:
    """End the current world, if any, and enter the next one. Collective over the next one.

    The process keeps the settings of `init`, its knobs, its page of counters and its metrics service. It keeps process
    sets whose ranks the new world has, and wrapped optimizers with the state of their compression. Operations that are
    still in flight end with an error, and names are counted from 0 again.

    Parameters
    ----------
    world : World
        This process's place in the next world, with the world's number.
    cancel : CancellationToken, optional
        Cancellation that is checked while this process waits for the others.

    Raises
    ------
    CalledOff
        The new world was called off. This process is in no world then, and may enter another.
    RendezvousError
        Same as for `init`. This process is in no world then.
    WorldError
        The new world failed before its start was complete.
    MismatchError
        State that was carried into the new world is not equal on all ranks.
    """
    global _session, _pending, _generation
    with hold_alone("enter"):
        waiting = _pending = _leave_for(world)
        waiting.tell_children()
        environ = config.environment()
        logs.configure(waiting.settings.log_level, world.rank)
        _generation += 1
        generation = _generation if world.number is None else world.number
        session = EngineSession(world, waiting.given, generation, environ)
        waiting.state.optimizers = optimizers.count_optimizers()
        waiting.state.sets = [each._ranks for each in waiting.sets]
        try:
            session.start(startup.PREPARE)
            if waiting.metrics_service is not None and world.local_rank != 0:
                waiting.metrics_service.stop()  # Frees the port for the rank that serves this host next.
                waiting.metrics_service = None
            startup.join_world(session, cancel)
        except BaseException as error:
            session.fail(error)
            raise
        try:
            everybody = pending.exchange_states(session.engine, waiting.state, cancel)
        except BaseException:
            session.close(0.0)
            raise
        _session, _pending = session, None
        atexit.unregister(shutdown)
        atexit.register(shutdown)
        pending.restore_state(session, waiting, everybody)
    for callback in _on_enter:
        callback()


def leave_world() -> None:
    """End the current world, if any, and wait for the next one. Collective, unless the world has failed.

    A process leaves before it asks at the gate of an elastic job, since a process that ends waits for ranks that have
    not left.
    """
    global _pending
    with hold_alone("leave"):
        if _session is not None:
            _pending = _leave_for(_session.world)


def _leave_for(world: World) -> PendingSession:
    """End the current world, if any, and return the pending session for the next one."""
    global _session
    if _session is None:
        waiting = _pending
        if waiting is None:
            _, given, _ = _read_settings({})
            return PendingSession(world, given)
        waiting.await_world(world)
        return waiting
    _check_pid(_session)
    session, _session = _session, None
    engine = session.engine
    carried = PendingSession.carried(session)
    session.close(0.0 if engine.failure is not None else session.settings.shutdown_timeout)
    engine.tell(state=STATES.index("resetting"))
    return PendingSession(world, *carried)


def on_enter(callback: Callable[[], None]) -> None:
    """Register a callback that `enter_world` calls in each later world, on its own thread, once the engine runs.

    It must not be collective, since other ranks may have registered other callbacks.
    """
    _on_enter.append(callback)


def world_failure(seconds: float) -> Failure | None:
    """Return the failure of the world, independently of the exception that a framework has raised for it.

    Parameters
    ----------
    seconds : float
        Longest wait in seconds, since an error of this rank alone may be raised before the failure is known.

    Returns
    -------
    Failure or None
        None if the world has not failed, or if there is none.
    """
    session = _session
    if session is None or os.getpid() != session.pid or not session.monitor.await_failure(seconds):
        return None
    error = session.engine.failure
    culprit = error.rank if isinstance(error, WorldError) and error.rank >= 0 else None
    return Failure(str(error), culprit, isinstance(error, RankStalledError))


def world_number() -> int:
    """Return the number of the world: the driver's in an elastic job, else the number of worlds of this process."""
    return current().generation


def is_waiting() -> bool:
    """Return whether this process waits for a world of an elastic job, and so cannot communicate."""
    return _pending is not None and _session is None


def shutdown() -> None:
    """Finish operations in flight, leave the world and stop the engine. Does nothing if it is not running.

    Waits at most `shutdown_timeout` for operations in flight. Runs automatically when the interpreter exits. After it,
    `init` creates a new world. A signal handler may call it: during another `shutdown` it returns at once, and during
    `init` or `start_timeline` it is deferred until that call has ended.
    """
    global _session, _pending, _put_off
    with _lock:
        if _under_way is not None:
            _put_off = _under_way != "shutdown"
            logs.logger.warning(
                "engine.shutdown() was called while engine.%s() runs in the same thread, as from a signal handler: %s",
                _under_way,
                "it is done when that has ended" if _put_off else "nothing more to do",
            )
            return
    with hold_alone("shutdown"):
        if _pending is not None and _pending.pid == os.getpid():
            _pending.close()
            _pending = None
        session = _session
        if session is None:
            return
        if os.getpid() != session.pid:
            return  # A forked child has nothing to end: threads and mappings stayed with the parent.
        _session = None
        os.environ.pop(HOLDER, None)
        atexit.unregister(shutdown)
        session.close(session.settings.shutdown_timeout)
        if session.engine.failure is not None:
            session.engine.tell(state=STATES.index("failed"))  # No world follows, also in an elastic job.


def _check_pid(session: EngineSession) -> None:
    if os.getpid() != session.pid:
        raise ForkedError(_FORKED.format(parent=session.pid, child=os.getpid()))


def current_or_pending() -> EngineSession | PendingSession | None:
    """Return the current world, else the pending session, else None: `init` was not called, or `shutdown` was."""
    return _pending if _session is None else _session


def current() -> EngineSession:
    """Return the current world. Raises the errors of `engine`."""
    session = _session
    if session is None:
        raise NotInitializedError(uninitialized() if _pending is None else WAITING)
    if os.getpid() != session.pid:
        _check_pid(session)
    return session


def engine() -> core.Engine:
    """Return the native engine.

    Raises
    ------
    NotInitializedError
        It was called before `init` or after `shutdown`.
    ForkedError
        It was called in a forked child.
    """
    return current().engine


def device() -> Device:
    """Return the GPU of this rank. Raises the errors of `engine`."""
    return current().device


def settings() -> config.Config:
    """Return the settings of this process's current or next engine. Raises the errors of `engine`."""
    return _pending.settings if _pending is not None and _session is None else current().settings


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Form a process set. Collective over the world: on all ranks, including those that are not in the set.

    In an elastic job, before the function that `elastic.run` wraps, it only registers the set. Each world forms the
    sets that all its members have registered, and whose ranks it has; use of the others raises an error with the
    reason.

    Parameters
    ----------
    process_set : ProcessSet or iterable of int
        Set, or its ranks in the world. A set costs each of its ranks a sleeping thread and some memory.

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
    if _pending is not None and _session is None:
        return _pending.add(process_set)
    session = current()
    added = session.sets.add(process_set)
    with hold_alone("add_process_set"):
        session.record_process_set(added)
    return added


def process_set(number: int) -> ProcessSet:
    """Return the process set with that `process_set_id`.

    Raises
    ------
    NotInitializedError
        There is no such set.
    """
    return current().sets.numbered(number)


def called_set(number: int) -> ProcessSet:
    """Return the process set with that `call_number`.

    Raises
    ------
    NotInitializedError
        There is no such set.
    """
    return current().sets.called(number)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set once its operations in flight have ended. Collective over the world.

    Returns
    -------
    bool
        Whether the set existed; False for the global set, which cannot be removed.
    """
    if _pending is not None and _session is None:
        return _pending.remove(process_set)
    return current().sets.remove(process_set)


def is_initialized() -> bool:
    """Return whether `init` has been called in this process itself, and `shutdown` has not."""
    return any(each is not None and each.pid == os.getpid() for each in (_session, _pending))
