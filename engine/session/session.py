"""Session of a rank in one world: its engine, its process sets, and the services beside the engine.

A session starts by steps (`engine.session.startup`). Each step that is up registers how it comes down, so that `close`
ends a whole session and a partly started one in the same way: the last step first, each even if another one raises.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..collectives.process_sets import ProcessSet
from ..config import config
from ..config.world import World
from ..errors.formatting import format_exception
from ..gpu.device import Device
from ..metrics.export.in_process import InProcess
from ..native import core
from ..net.rendezvous.layout import Layout
from ..text import logs
from ..trace.timeline import Timeline
from ..tuning.trial_loop import Spent, Tuning
from .monitor import Monitor
from .registry import ProcessSetRegistry

MOMENT = 2.0  # seconds that each thread and process beside the engine has to end, regardless of the time-out
SHOWN = 5  # largest number of operations in a warning

_before_shutdown: list[Callable[[float], str | None]] = []


@dataclass
class RankState:
    """State that ranks exchange when a world of an elastic job starts."""

    last: int | None = None  # number of the rank's previous world; None: it was in none
    sets: list[tuple[int, ...]] = field(default_factory=list)  # ranks of each of its process sets, in order of addition
    knobs: dict[str, Any] | None = None  # knobs that it proposes for the new world; None: it knows of none
    spent: Spent = field(default_factory=Spent)  # cost of the tuner's trials for the job, as far as the rank knows
    # Sizes of the worlds in which a search of the tuner has ended, as far as the rank knows
    searched: tuple[int, ...] = ()
    optimizers: int = 0  # number of its wrapped optimizers
    # Number of channels of its carrier of large tensors, and whether that can sum; None without one
    carrier: tuple[int, bool] | None = None


@dataclass
class EngineSession:
    """Engine of a rank in one world, and all that runs beside it."""

    world: World
    given: dict[str, Any]
    """Settings that the user has chosen, by name; the others have their defaults."""
    generation: int
    """Number of the world, set by the driver of an elastic job, or counted by this process."""
    environ: Mapping[str, str]
    """Result of `config.read_environment()`."""
    initial_sets: Sequence[ProcessSet] = ()
    """Process sets that are added during the start."""

    settings: config.Config = field(init=False)
    build: dict[str, str | int] = field(init=False)
    """Properties of the build, and process sets, that must be equal on all ranks."""
    known_knobs: dict[str, Any] = field(init=False)
    """Knobs of `autotune_from`, on rank 0."""
    page: int = -1
    """Descriptor of the page of counters; -1: there is none."""
    announced: bool = False
    """Whether the rendezvous has begun, which announces a failure to the other ranks itself."""
    joined: bool = False
    """Whether this rank has an engine in the world."""

    engine: core.Engine = field(init=False)
    layout: Layout = field(init=False)
    pids: dict[int, int] = field(init=False)
    """Process ids of this host's ranks, by rank."""
    processors: list[int] = field(init=False)
    """Numbers of the processors that the ranks of this host may run on."""
    device: Device = field(init=False)
    monitor: Monitor = field(init=False)
    sets: ProcessSetRegistry = field(init=False)
    metrics_service: InProcess | None = None
    timeline: Timeline | None = None
    tuning: Tuning | None = None

    searching: bool = False
    """Whether the tuner began to search in this world of an elastic job, on any rank."""
    state: RankState = field(default_factory=RankState)
    """State of this rank from earlier worlds of an elastic job."""
    lost: list[ProcessSet] = field(default_factory=list)
    """Process sets of earlier worlds that this one does not have."""

    def __post_init__(self) -> None:
        self.pid = os.getpid()
        self.settings = config.Config(**self.given)
        self.ends = contextlib.ExitStack()
        """Ends of the steps that are up; the last one is called first."""
        self._seconds, self._deadline = 0.0, 0.0
        self.ends.callback(self._stop_metrics)  # These two may also start later.
        self.ends.callback(self.stop_timeline)

    @property
    def several_hosts(self) -> bool:
        """Return whether the world has ranks on other hosts."""
        return len(self.layout.crews) > 1

    def start(self, steps: Sequence[Callable[[EngineSession], None]]) -> None:
        """Take steps of the start, each of which registers its end; if one raises, call `end_failed_start`."""
        for step in steps:
            step(self)

    def end_failed_start(self, error: BaseException) -> None:
        """End the world because this rank's start has failed with `error`, and close what is up."""
        if self.joined and self.engine.failure is None:
            self.ends.callback(self.engine.abort, reason_of(error))
        self.close_after(error)

    def close_after(self, error: BaseException) -> None:
        """Close what is up after `error`, which the caller raises: if an end raises as well, `error` gets a note."""
        try:
            self.close(0.0)
        except Exception as another:
            logs.logger.debug("a failed session does not end as it should", exc_info=True)
            error.add_note(f"Then the end of the session raised {format_exception(another)}")

    def close(self, seconds: float) -> None:
        """Leave the world and end all steps, even if some of their ends raise.

        Operations in flight have `seconds` in total. Each thread and process beside the engine has at least `MOMENT`.
        """
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        self.ends.close()

    def seconds_left(self) -> float:
        """Return the seconds that are left to end the session."""
        return max(0.0, self._deadline - time.monotonic())

    def record_process_set(self, added: ProcessSet) -> None:
        """Count what a new process set does, and add it to the timeline if one is being recorded."""
        if added.process_set_id is None or not added.included():
            return
        added.engine.count_as(f"process set {added.process_set_id}")
        if self.timeline is not None:
            self.timeline.add(added.process_set_id, added.engine)

    def record_group(self, engine: core.Engine, name: str) -> None:
        """Name the engine of a group that its members have formed, and add it to the timeline if one is recorded."""
        engine.group_name = name
        engine.count_as(name)
        number = self.sets.find_group(engine)
        if self.timeline is not None and number is not None:
            self.timeline.add(number, engine)

    def make_timeline(self, target: str | os.PathLike[str], mark_cycles: bool) -> Timeline:
        """Make a timeline of this rank and create its file; `start_timeline` starts it."""
        world = self.world
        return Timeline(
            target,
            world.rank,
            world.size,
            self.settings.timeline_limit,
            mark_cycles,
            world.number,
            world.elastic,
        )

    def start_timeline(self, timeline: Timeline) -> None:
        """Record the engine and all process sets in a timeline from now on."""
        told = self.world.make_file_id(self.generation)
        timeline.start(self.engine, self.sets, len(self.layout.crews), told)
        self.timeline = timeline

    def stop_timeline(self) -> None:
        """Stop the timeline and complete its file, if one is being recorded."""
        timeline, self.timeline = self.timeline, None
        if timeline is not None:
            timeline.stop()

    def close_engine(self) -> None:
        """Finish or end the operations in flight, and leave the world. Does nothing the second time."""
        self.engine.close(max(self.seconds_left(), min(self._seconds, MOMENT)))

    def stop_monitor(self) -> None:
        """Close the engine, which ends the monitor's thread, and wait for that."""
        with contextlib.ExitStack() as ends:
            ends.callback(self.monitor.stop, MOMENT)
            ends.callback(self.monitor.report_failure)  # Before the device is closed: the launcher may not wait for it.
            self.close_engine()

    def close_process_sets(self) -> None:
        """Close the process sets, and wait for the ranks that still need this one for their GPU collectives."""
        self.monitor.finish_report()
        if self.sets.close(self.seconds_left()):
            self.device.wait_for_dependents(self.seconds_left())

    def stop_tuner(self) -> None:
        """Stop the tuner's process, if this rank has it."""
        if self.tuning is not None:
            self.tuning.stop(max(self.seconds_left(), MOMENT))

    def finish_programs(self) -> None:
        """Wait for running programs of frameworks; on a time-out, log which ranks their collectives wait for."""
        with contextlib.ExitStack() as ends:
            for callback in reversed(_before_shutdown):
                ends.callback(self._finish_program, callback, self.seconds_left())

    def _finish_program(self, callback: Callable[[float], str | None], timeout: float) -> None:
        if late := callback(self.seconds_left()):
            engines = (self.engine, *self.sets.engines.values())
            waits = [_describe_wait(operation) for engine in engines for operation in engine.pending()]
            logs.logger.warning(
                "rank %d stops the engine while %s, after %.3g s (shutdown_timeout): %s",
                self.world.rank,
                late,
                timeout,
                "; ".join(waits[:SHOWN]) or "no collective is in flight, so it computes",
            )

    def _stop_metrics(self) -> None:
        if self.metrics_service is not None:
            self.metrics_service.stop()


def reason_of(error: BaseException) -> str:
    """Return the text of the abort by which this rank ends a world that it cannot start."""
    return f"engine.init() has failed: {format_exception(error)}"


def before_shutdown(callback: Callable[[float], str | None]) -> None:
    """Register a callback that is called whenever the engine is about to stop.

    A framework may run programs that have yet to submit collectives. The callback gets the longest time in seconds that
    it may wait for them. It returns a description of what has not ended by then, or None.
    """
    _before_shutdown.append(callback)


def _describe_wait(operation: dict[str, Any]) -> str:
    """Describe an operation in flight, with the ranks that have not submitted it."""
    missing = operation["missing"]
    if missing is None:
        return f"{operation['name']!r} waits for other ranks"
    if not missing:
        return f"{operation['name']!r} was submitted by all ranks"
    return f"{operation['name']!r} waits for rank {' and '.join(map(str, missing))}"
