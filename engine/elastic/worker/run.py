"""`run`: calls a function in each world that this process is a member of, until it has returned on all ranks.

Between two worlds the worker waits at the gate. A call ends in one of four ways:

| the function | and then |
|---|---|
| returns | once it has returned on all ranks, the training is complete |
| raises `HostsUpdatedInterrupt` | the ranks meet again, and go on from where they are |
| raises, and the world has failed | survivors meet again, and go on from the newest commit |
| raises, and the world has not failed | it is the program's own error, and ends this worker |

The engine says whether the world has failed, not the exception: a framework raises exceptions of its own for such a
failure, and the program may raise an error of its own at the same moment.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from ...collectives import collectives
from ...config.builds import Build
from ...config.hub_address import HubAddress, host_and_port, read_secret
from ...config.launchers import ENGINERUN
from ...config.setting import variable_name
from ...config.world import World
from ...errors import CalledOff, ConfigError, EngineError, IncompatibleRanksError, MismatchError
from ...native import setup
from ...net.rendezvous import CancellationToken, compared_values
from ...net.rendezvous.messages import SETTINGS
from ...session import runtime, topology
from ...session.pending import GATE
from ...text.logs import logger
from ...trace import flight
from ..events import Why
from ..state import HostsUpdatedInterrupt, State
from .gate import Assigned, Gate, JobOver, LetGo

NEWS_SECONDS = 1.0  # longest delay of the news of a failed world after the exception that it caused
_END = "engine.elastic.end"
_ENGINE = f"{Path(__file__).parents[2]}{os.sep}"

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)

_gate: Gate | None = None
_called = ""  # state of the call of a wrapped function: "runs", "is complete"; empty: none yet, or it has raised


def run(function: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a training function elastic: it is called again in each world, with the state as it was committed.

    Outside an elastic job it is called once, in the world that there is.

    Parameters
    ----------
    function : callable
        Takes the state first. Whatever shall survive a reset must be in the state, from which the function goes on.
        All communication belongs into this function, and none before it.

    Returns
    -------
    callable
        Takes and returns what `function` does. An elastic job has one such call. It returns on every rank when the
        function has returned on all ranks. It raises `JobOver` if the job ends before the training is complete, with
        the state as last committed. It also raises what `function` raises while its world has not failed. A worker that
        the job goes on without, or that comes after the training is complete, exits here.

    Examples
    --------
    >>> @engine.elastic.run
    ... def train(state):
    ...     for state.epoch in range(state.epoch, 90):
    ...         train_epoch(state)
    ...         state.commit()
    >>> train(TorchState(model, optimizer, epoch=0))
    """

    @functools.wraps(function)
    def run_in_worlds(state: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        call = functools.partial(function, state, *args, **kwargs)
        runtime.init()
        gate = _open_gate()
        if gate is None:
            state.sync()
            return call()
        if _called:
            raise ConfigError(
                f"elastic.run was called again, and the first call {_called}: an elastic job has one training, which "
                "is complete when its function has returned on all ranks. Wrap one function that calls both"
            )
        with _only_call(), _leaving_on_sigterm(gate):
            try:
                result: R = _WorldLoop(gate, state).run(call)
            except Exception as error:
                error.__traceback__ = _behind_the_engine(error.__traceback__)
                raise
            return result

    return run_in_worlds


@contextmanager
def _only_call() -> Iterator[None]:
    """Track that a call runs, and whether it completed: for the driver, completion is the end of the training."""
    global _called
    _called = "runs"
    try:
        yield
    except BaseException:
        _called = ""
        raise
    _called = "is complete"


def _behind_the_engine(frames: TracebackType | None) -> TracebackType | None:
    """Strip the engine's own leading frames from a traceback, since they tell a user nothing."""
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_ENGINE):
        frames = frames.tb_next
    return frames


def leave() -> None:
    """Let this worker leave its job cleanly: at the next check all ranks commit, and the others go on without it.

    Does nothing outside an elastic job.
    """
    if (gate := _open_gate()) is not None:
        gate.request_leave()


def log(value: str) -> None:
    """Send a text to the program that started this job. Does nothing outside an elastic job."""
    if (gate := _open_gate()) is not None:
        gate.log(value)


class _WorldLoop:
    """Worker from its first arrival at the gate to the end of the training."""

    def __init__(self, gate: Gate, state: State) -> None:
        self._gate = gate
        self._state = state
        self._world = 0
        self._why = Why.NEW
        self._text = ""
        self._culprit: int | None = None
        self._stalled = False
        self._failed = False  # whether the world of the function's last call has failed
        self._renewed = False  # whether the present world differs from the one that the program has planned with
        self._finished: list[Any] = []  # the function's last result, once there is one

    def run(self, call: Callable[[], Any]) -> Any:
        """Run one world after the other, until the function has returned in one of them on all ranks."""
        while True:
            try:
                assigned = self._gate.wait(
                    *(self._world, self._why, self._text, self._culprit, self._state.committed, self._stalled),
                    _describe_build(self._gate),
                )
                if self._enter(assigned) and self._train_world(call, assigned):
                    return self._finished[0]
            except JobOver as over:
                return self._finish_job(over)
            runtime.leave_world()
            # The exception refers to frames, and these to tensors and the engine of a world that has ended.
            gc.collect()

    def _finish_job(self, over: JobOver) -> Any:
        """Return the result, exit or raise, as the end of the job requires."""
        if over.good and self._finished:
            flight.forget_temporary()
            return self._finished[0]
        if over.good or isinstance(over, LetGo):
            logger.info("worker %d ends: %s", self._gate.worker, over)
            flight.forget_temporary()
            raise SystemExit(0) from None
        if self._failed:
            self._restore()
        raise over

    def _enter(self, assigned: Assigned) -> bool:
        """Meet the members of a world; return whether that succeeded."""
        world, given = assigned.place.world, assigned.place
        planned = topology.rank(), topology.size()
        self._text, self._culprit, self._stalled = "", None, False
        try:
            cancel = CancellationToken(self._gate.fileno(), lambda: self._gate.is_void(world))
            runtime.enter_world(_make_world(assigned), cancel)
        except CalledOff:
            self._why = Why.VOID
            return False
        except ConfigError:
            raise  # it would be the same in every world
        except EngineError as error:
            if self._world == 0 and isinstance(error, IncompatibleRanksError | MismatchError):
                raise  # so would this; but workers that have met before go on without an incompatible newcomer
            self._note_failure(
                runtime.world_failure(0.0) or runtime.Failure(" ".join(str(error).split()), None), assigned
            )
            return False
        self._gate.report_joined(world)
        first = self._world == 0
        self._world, self._renewed = world, not first or planned != (given.rank, given.size)
        self._state.enter(world, lambda: self._gate.is_update_requested(world), self._tell_commit(assigned))
        return True

    def _train_world(self, call: Callable[[], Any], assigned: Assigned) -> bool:
        """Call the function in a world; return whether the training is complete."""
        world = assigned.place.world
        try:
            if self._failed:  # not right after the failure: the training may have been complete on all ranks
                self._restore()
            if self._renewed:
                self._state.on_reset()
            self._state.sync()
            self._finished = [call()]
            collectives.barrier(_END)
        except HostsUpdatedInterrupt:
            self._state.save()  # the present values become the newest commit, whatever comes next
            self._why = Why.HOSTS
            return False
        except LetGo:
            raise  # the user ends the job
        except Exception as error:
            failure = runtime.world_failure(NEWS_SECONDS)
            if failure is None:
                raise
            logger.debug("world %d has failed; the program was told by", world, exc_info=error)
            self._note_failure(failure, assigned)
            self._failed = True
            return False
        self._gate.report_done(world)
        flight.forget_temporary()
        return True

    def _restore(self) -> None:
        self._failed = False
        self._state.restore()

    def _note_failure(self, failure: runtime.Failure, assigned: Assigned) -> None:
        self._why, self._text, self._stalled = Why.FAILURE, failure.text, failure.stalled
        self._culprit = None if failure.culprit is None else assigned.members[failure.culprit]

    def _tell_commit(self, assigned: Assigned) -> Callable[[int], None]:
        """Return a function that reports commits to the driver: only on rank 0, since all ranks commit together."""
        place = assigned.place
        return (
            (lambda commit: self._gate.report_commit(place.world, commit)) if place.rank == 0 else lambda commit: None
        )


def _open_gate() -> Gate | None:
    """Return the gate of this process, which it keeps until it ends; None outside an elastic job."""
    global _gate
    if _gate is None and GATE in os.environ:
        _gate = Gate.open(os.environ)
    return _gate


def _describe_build(gate: Gate) -> Build:
    """Return the values that must be equal on all workers, by name; settings by the names of their variables.

    With several hosts, kernels are not among them: each world takes the best ones that all its members have.
    """
    if not runtime.is_waiting():
        return {}
    settings = runtime.current_settings()
    setup.use_kernels(settings.kernels)
    told = compared_values(setup.segment_info(), settings.sockets_per_lane, settings.lanes, gate.several)
    if gate.several:
        del told["kernels"]
    return {variable_name(name) if name in SETTINGS else name: value for name, value in told.items()}


def _make_world(assigned: Assigned) -> World:
    """Convert an assignment to the engine's `World`."""
    place = assigned.place
    return World(
        rank=place.rank,
        size=place.size,
        local_rank=place.local_rank,
        local_size=place.local_size,
        job=os.environ["ENGINE_JOB"],
        secret=read_secret(os.environ),
        source=ENGINERUN.name,
        hub=HubAddress(*host_and_port(assigned.hub), assigned.listener) if assigned.hub else None,
        host=place.slot.host,
        host_name=place.slot.host,
        number=place.world,
        workers=assigned.members,
        reason=assigned.reason,
    )


@contextmanager
def _leaving_on_sigterm(gate: Gate) -> Iterator[None]:
    """Treat SIGTERM, by which hosts announce that they go, as a request to leave cleanly.

    If the program has a handler of its own, that one stays. The agent closes the connection before it ends this worker;
    then the signal has its default effect.
    """

    owner = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner or gate.hung_up():  # a forked child has this handler, too
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        gate.request_leave()

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
