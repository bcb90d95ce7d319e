"""The one session of a process, and the calls that change it, one at a time."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..collectives.process_sets import WAITING, ProcessSet, explain_uninitialized
from ..config import config
from ..config.world import World, find_place
from ..errors import ConfigError, EngineError, ForkedError, NotInitializedError, RendezvousError
from ..exit_report import writer
from ..metrics.names import STATES
from ..net.rendezvous import CancellationToken
from ..text import logs
from . import arguments, child_processes, optimizers, pending, startup
from .arguments import ProcessSets
from .carriers import compare_carriers
from .pending import PendingSession
from .session import EngineSession

_FORKED = (
    "the engine was initialised in process {parent}, and this is its forked child {child}. Use the start method "
    "'spawn' or 'forkserver' for processes that communicate; data-loading workers must not touch the engine."
)


class SessionOwner:
    """Owner of this process's session: one that runs, or one that waits for a world of an elastic job, or none."""

    def __init__(self) -> None:
        self.session: EngineSession | None = None  # session that runs
        self.pending: PendingSession | None = None  # session that waits for its next world; None if `session` is not
        # Place of the rank whose worker this process is, if `init` did nothing for that reason
        self.imported: World | None = None
        self._generation = 0  # number of the last world that was joined
        self._entered: list[Callable[[], None]] = []  # called in each later world of an elastic job
        self._unlock()

    def _unlock(self) -> None:
        self._lock = threading.RLock()
        self._under_way: str | None = None  # name of the call that holds the lock
        self._put_off = False  # whether a signal handler has called shutdown() during that call

    def reset_in_child(self) -> None:
        """Reset the lock in a forked child, where its holder may not exist, and copy the memory of gradients."""
        self._unlock()
        if self.session is not None:
            for engine in (self.session.engine, *self.session.sets.engines.values()):
                engine.forked()

    @contextlib.contextmanager
    def hold_alone(self, what: str) -> Iterator[None]:
        """Hold the lock for a public function, named `what`, that changes the session.

        A signal handler interrupts the main thread, so it may find the lock held by its own thread. Such a call is
        refused, except for `shutdown`, which checks that before and is deferred to the end of the interrupted call.
        """
        with self._lock:
            if self._under_way is not None:
                raise EngineError(
                    f"engine.{what}() was called while engine.{self._under_way}() runs in the same thread, as from a "
                    "signal handler; call it when that has returned"
                )
            try:
                self._under_way = what
                yield
            finally:
                self._under_way = None
                put_off, self._put_off = self._put_off, False
                if put_off:
                    self.shutdown()

    def current_session(self) -> EngineSession:
        """Return the session that runs; raise NotInitializedError or ForkedError if this process has none."""
        session = self.session
        if session is None:
            raise NotInitializedError(explain_uninitialized() if self.pending is None else WAITING)
        if os.getpid() != session.pid:
            raise ForkedError(_FORKED.format(parent=session.pid, child=os.getpid()))
        return session

    def init(self, settings: Mapping[str, Any], process_sets: ProcessSets, world: World | None = None) -> None:
        """Start the session, or make a pending one in an elastic job; do nothing if it runs.

        `world` is this process's place, if the launcher's variables do not tell it.
        """
        if self.session is not None:
            self.current_session()
            if settings or arguments.make_process_sets(process_sets):
                raise ConfigError("the engine is running; call engine.shutdown() before engine.init() with settings")
        elif child_processes.is_importing_worker():
            self.imported = find_place(config.read_environment())
            logs.logger.info("engine.init() does nothing in process %d, a worker that imports the script", os.getpid())
        else:
            try:
                if pending.GATE in os.environ:
                    self._wait(settings, process_sets)
                else:
                    self._start(settings, process_sets, world)
            except EngineError as error:
                logs.logger.debug("init has failed", exc_info=True)
                writer.claim_rank()
                writer.report_exception(error)
                raise
            atexit.register(self.shutdown)

    def _start(self, settings: Mapping[str, Any], process_sets: ProcessSets, world: World | None) -> None:
        """Meet the other ranks and start a session by steps, which end in reverse if one of them fails.

        If it fails on one rank it fails on all ranks, with the reason, and leaves nothing behind. It can be called
        again.
        """
        child_processes.expect_own_rank()
        session = arguments.create_session(settings, process_sets, self._generation + 1, world)
        try:
            session.start((startup.listen_for_metrics, *startup.PREPARE))
            startup.join_world(session)
            self._generation = session.generation
            session.start(startup.OPEN)
        except BaseException as error:
            failure = session.engine.failure if session.joined else None
            session.end_failed_start(error)
            if failure is not None and not isinstance(error, ConfigError):
                raise RendezvousError(f"engine.init() has failed, so no rank starts: {failure}") from None
            if not session.announced and isinstance(error, Exception):
                startup.tell_failure(session.world, session.generation, error)
            raise
        self.session = session
        child_processes.hold_rank(session.world)

    def _wait(self, settings: Mapping[str, Any], process_sets: ProcessSets) -> None:
        """Make the pending session of an elastic job, unless there is one, and add process sets to it."""
        if self.pending is not None and settings:
            raise ConfigError("engine.init() was called before; give it all settings the first time")
        environ, given, chosen = arguments.read_settings(settings)
        world = find_place(environ)
        logs.configure_logger(chosen.log_level, world.rank)
        sets = arguments.make_process_sets(process_sets)
        waiting = self.pending or PendingSession(world, given)
        added: list[ProcessSet] = []
        try:
            for each in sets:
                waiting.add(each)
                added.append(each)
            startup.log_environment(world, environ)
        except BaseException:
            for each in added:
                waiting.remove(each)
            if self.pending is None:
                waiting.close()
            raise
        self.pending = waiting

    def enter_world(self, world: World, cancel: CancellationToken | None) -> None:
        """End the current world, if any, and enter the next one with the state of this process."""
        with self.hold_alone("enter"):
            waiting = self._leave_for(world)
            child_processes.export_place(world)
            logs.configure_logger(waiting.settings.log_level, world.rank)
            self._generation += 1
            generation = self._generation if world.number is None else world.number
            session = EngineSession(world, waiting.given, generation, config.read_environment())
            waiting.state.optimizers = optimizers.count_optimizers()
            waiting.state.sets = [each._ranks for each in waiting.sets]
            try:
                session.start(startup.PREPARE)
                waiting.free_metrics_port()
                startup.join_world(session, cancel)
            except BaseException as error:
                session.end_failed_start(error)
                raise
            waiting.state.carrier = session.engine.carrier
            try:
                everybody = pending.exchange_states(session.engine, waiting.state, cancel)
                compare_carriers([each.carrier for each in everybody])
            except BaseException as error:
                session.close_after(error)
                raise
            self.session, self.pending = session, None
            atexit.unregister(self.shutdown)
            atexit.register(self.shutdown)
            pending.restore_state(session, waiting, everybody)
        for callback in self._entered:
            callback()

    def call_in_later_worlds(self, callback: Callable[[], None]) -> None:
        """Register a callback that `enter_world` calls once the engine runs."""
        self._entered.append(callback)

    def leave_world(self) -> None:
        """End the current world, if any, and wait for the next one."""
        with self.hold_alone("leave"):
            if self.session is not None:
                self._leave_for(self.session.world)

    def _leave_for(self, world: World) -> PendingSession:
        """End the current world, if any, and make the pending session for the next one."""
        if self.session is not None:
            session = self.current_session()
            carried = PendingSession.take_state(session)
            self.session = None
            try:
                session.close(0.0 if session.engine.failure is not None else session.settings.shutdown_timeout)
            finally:
                self.pending = PendingSession(world, *carried)
            session.engine.tell(state=STATES.index("resetting"))
        elif self.pending is not None:
            self.pending.await_world(world)
        else:
            self.pending = PendingSession(world, arguments.read_settings({})[1])
        return self.pending

    def shutdown(self) -> None:
        """End the session; do nothing if there is none, or in a forked child, whose parent has threads and mappings."""
        with self._lock:
            if self._under_way is not None:
                self._put_off = self._under_way != "shutdown"
                logs.logger.warning(
                    "engine.shutdown() was called while engine.%s() runs in the same thread, as from a signal "
                    "handler: %s",
                    self._under_way,
                    "it is done when that has ended" if self._put_off else "nothing more to do",
                )
                return
        with self.hold_alone("shutdown"):
            if self.pending is not None and self.pending.pid == os.getpid():
                waiting, self.pending = self.pending, None
                waiting.close()
            if self.session is not None and self.session.pid == os.getpid():
                session, self.session = self.session, None
                child_processes.release_rank()
                atexit.unregister(self.shutdown)
                try:
                    session.close(session.settings.shutdown_timeout)
                finally:
                    if session.engine.failure is not None:
                        session.engine.tell(state=STATES.index("failed"))  # No world follows, also in an elastic job.
