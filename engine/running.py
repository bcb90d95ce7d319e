"""A running engine: how it is started among the other ranks, and what runs beside it."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from . import config, logs
from .device import Device
from .errors import ConfigError, RendezvousError
from .host import linux, stacks
from .host.machine import cpu_quota
from .metrics import own_page
from .metrics.export.in_process import InProcess
from .native import core, setup
from .process_sets import ProcessSet, Registry
from .rendezvous import CallOff, Gathered, gather, mpi_lanes
from .rendezvous.layout import Layout
from .rendezvous.set_links import SetLinks
from .trace.flight import Recorder
from .trace.timeline import Timeline
from .tuning.journals import check_log, knobs_of
from .tuning.knobs import words
from .tuning.trial_loop import Spent, Tuning
from .watch import Watch
from .world import World

DEFAULT_SPIN_US = 25.0
DEFAULT_YIELD_US = 50.0


@dataclass
class Told:
    """What a rank tells all others as a world begins.

    Attributes
    ----------
    last : int or None
        The number of the world that it was in before; None: of none.
    sets : list of tuple of int
        The ranks of the process sets that it has, in the order in which they were added.
    knobs : dict or None
        The knobs with which the new world shall go on; None: it knows of none.
    spent : Spent
        What trials of the tuner have cost the job, as far as it knows.
    searched : tuple of int
        The sizes of worlds in which it knows of a search that has come to its end.
    optimizers : int
        How many wrapped optimizers it has.
    """

    last: int | None = None
    sets: list[tuple[int, ...]] = field(default_factory=list)
    knobs: dict[str, Any] | None = None
    spent: Spent = field(default_factory=Spent)
    searched: tuple[int, ...] = ()
    optimizers: int = 0


@dataclass
class Running:
    """An initialised engine and what belongs to it."""

    engine: core.Engine
    world: World
    settings: config.Config
    watch: Watch
    sets: Registry
    pid: int
    pids: dict[int, int]
    """The processes of this host's ranks, by rank."""
    layout: Layout
    generation: int
    """The number of the world: its driver's, or counted by this process."""
    given: dict[str, Any]
    """The settings that the user has chosen, by name."""
    tune: Callable[..., None]
    """Of this, and of knobs that were found earlier: begins with those of a log, or with a search. On rank 0."""
    timeline: Timeline | None = None
    tuning: Tuning | None = None
    serving: InProcess | None = None
    device: Device | None = None
    searching: bool = False
    """Whether the tuner began to search in this world of an elastic job, on whichever rank."""
    told: Told = field(default_factory=Told)
    """What this rank knows of the worlds of an elastic job."""
    lost: list[ProcessSet] = field(default_factory=list)
    """Process sets of earlier worlds that this one does not have."""

    def show(self, added: ProcessSet) -> None:
        """Have a timeline that is being recorded show a new process set, too."""
        if self.timeline is not None and added.process_set_id is not None and added.included():
            self.timeline.add(added.process_set_id, added.engine)

    def let_go(self) -> None:
        """Let go of all that watches the engine, which has been closed or could not be."""
        self.watch.report_failure()  # A device may take long, and the launcher has little patience with a failed rank.
        try:
            if self.device is not None:
                self.device.close()
        finally:
            self.watch.stop(self.settings.shutdown_timeout)
            if self.timeline is not None:
                self.timeline.stop()
            if self.serving is not None:
                self.serving.stop()


def start(
    world: World,
    given: dict[str, Any],
    generation: int,
    environ: Mapping[str, str],
    called_off: CallOff | None = None,
) -> Running:
    """Meet the other ranks and start this one's engine with all that watches it, but for the tuner. Collective.

    Parameters
    ----------
    world : World
    given : dict
        The settings that the user has chosen, by name; the others have their defaults.
    generation : int
        The number of the world: ranks of different ones do not meet.
    environ : mapping
        As from `config.environment()`.
    called_off : CallOff, optional
        As for `rendezvous.gather`.
    """
    settings = config.Config(**given)
    setup.use_kernels(settings.kernels)
    # Before the ranks meet: a timeline that cannot be written is an error while it can be mended.
    timeline = None if settings.timeline is None else _timeline(settings.timeline, world, generation, settings)
    try:
        return _start(world, given, settings, generation, environ, timeline, called_off)
    except BaseException:
        if timeline is not None:
            timeline.stop()
        raise


def _start(
    world: World,
    given: dict[str, Any],
    settings: config.Config,
    generation: int,
    environ: Mapping[str, str],
    timeline: Timeline | None,
    called_off: CallOff | None,
) -> Running:
    known = _knobs_of_a_log(world, settings)
    page = _page(environ) if own_page.wanted(settings) else -1

    info, create = setup.segment_info(), partial(_memory, world, generation)
    levels = setup.kernel_levels() if settings.kernels == "auto" else [settings.kernels]
    gathered = gather(
        world,
        generation,
        info,
        settings.start_timeout,
        create,
        levels,
        settings.interface,
        settings.sockets_per_lane,
        settings.lanes,
        called_off,
    )
    if gathered.kernels is not None:
        setup.use_kernels(gathered.kernels)
    several = len(gathered.layout.crews) > 1
    set_links = SetLinks(world, generation, gathered, settings.start_timeout) if several else None
    mpi = _mpi(world, generation, gathered, settings.start_timeout) if several and settings.lanes == "mpi" else None
    # From here on the engine owns the descriptors, whether it succeeds or not.
    engine = core.Engine(
        world.rank,
        world.size,
        gathered.control,
        gathered.arena,
        gathered.peers,
        knobs={name: getattr(settings, name) for name in config.knobs()},
        stall_warning=settings.stall_warning,
        stall_limit=settings.stall_limit,
        host_silence=settings.host_silence,
        spin_us=spin_us(gathered) if settings.spin_us is None else settings.spin_us,
        yield_us=yield_us(gathered) if settings.spin_us is None else 0.0,
        counters=page,
        **_across(gathered),
        mpi=mpi,
        device_sums=settings.device_sums,
        another_follows=world.number is not None,
    )
    if page >= 0:
        name = environ.get("ENGINE_HOST_NAME") or platform.node()
        engine.tell(**own_page.begin(page, world.rank, world.local_rank, gathered.layout.hosts, name))
    crew = {rank: gathered.pids[rank] for rank in gathered.crew}
    device = Device(engine, crew, settings)
    sets = Registry(engine, settings.shutdown_timeout, device, set_links)
    watch = Watch(engine, sets, Recorder(settings.output_dir, world.rank, world.number))
    watch.start()
    stacks.enable(settings.output_dir, world.rank)
    running = Running(
        *(engine, world, settings, watch, sets, os.getpid(), crew, gathered.layout, generation, given),
        tune=partial(_tune, known=known, cpus=sorted(_processors(gathered))),
        timeline=timeline,
        device=device,
    )
    if timeline is not None:
        timeline.start(engine, sets, len(gathered.layout.crews))
    return running


def _page(environ: Mapping[str, str]) -> int:
    """Open this rank's page of counters."""
    try:
        return own_page.open_page(environ)
    except OSError as error:
        raise RendezvousError(f"there is no memory for counters: {linux.refusal('memfd_create', error)}") from None


def _across(gathered: Gathered) -> dict[str, Any]:
    """What an engine is told of other hosts: nothing, if there are none."""
    if len(gathered.layout.crews) == 1:
        return {}
    return {"hosts": gathered.hosts, "trunks": gathered.trunks, "lanes": gathered.lanes}


def _mpi(world: World, generation: int, gathered: Gathered, seconds: float) -> dict[str, Any]:
    """What the engine is told of MPI. If there is none, nobody has what was gathered."""
    try:
        return mpi_lanes.library(world, generation, seconds)
    except BaseException:
        gathered.close()
        raise


def _memory(world: World, generation: int) -> tuple[int, int]:
    """Make the memory of a host's ranks on the first of them; the descriptors of control segment and arena."""
    try:
        control = setup.create_segment(world.size, generation)
        try:
            return control, setup.create_arena()
        except BaseException:
            os.close(control)
            raise
    except OSError as error:
        raise RendezvousError(
            f"rank {world.rank} cannot make the memory that the ranks share: {linux.refusal('memfd_create', error)}"
        ) from None


def _knobs_of_a_log(world: World, settings: config.Config) -> dict[str, Any]:
    """The knobs of `autotune_from`, on rank 0. A log that cannot be written is an error here, too."""
    if world.rank != 0:
        return {}
    if settings.autotune and settings.autotune_log is not None:
        check_log(settings.autotune_log)
    return {} if settings.autotune_from is None else knobs_of(settings.autotune_from)


def _tune(
    running: Running,
    better: Mapping[str, Any] = MappingProxyType({}),
    version: int | None = None,
    *,
    known: dict[str, Any],
    cpus: Sequence[int],
) -> None:
    """Begin with the knobs of a log, those that the user has chosen excepted; or with a search.

    `better`: knobs that an earlier world of the job has found, which were put into force as that `version`.
    """
    given = running.given
    if not running.settings.autotune:
        chosen = {name: value for name, value in known.items() if name not in given}
        if chosen:
            running.engine.set_knobs(**chosen)
            logs.logger.info("autotune: knobs of %s: %s", running.settings.autotune_from, words(chosen))
        return
    held = {
        name: value
        for name, value in running.engine.knobs().items()
        if name in given and name != "sockets_per_lane"  # It says how many there are.
    }
    about = {"ranks": running.world.size, "hosts": len(running.layout.crews), "held": held}
    crews = [len(crew) for crew in running.layout.crews]
    elastic = running.world.number is not None
    running.tuning = Tuning(
        *(running.engine, running.settings, held, cpus, known, about, running.sets, crews),
        began=better,
        version=version,
        spent=running.told.spent,
        elastic=elastic,
    )
    running.tuning.start()


def spin_us(gathered: Gathered) -> float:
    """Spinning pays when every rank of this host has a processor; else it takes that of the rank that is waited for."""
    processors: float = len(_processors(gathered))
    try:
        quota = cpu_quota()
    except (ArithmeticError, LookupError, OSError, ValueError) as error:
        # What a file system of control groups says is nobody's promise, and how a wait spins is no reason to fail.
        logs.logger.debug("the CPU quota cannot be read, and the affinity decides alone: %r", error)
        quota = None
    if quota is not None:
        processors = min(processors, quota)
    return DEFAULT_SPIN_US if len(gathered.crew) <= processors else 0.0


def yield_us(gathered: Gathered) -> float:
    """Yielding pays when ranks share processors: whoever is waited for may be ready on this one.

    Where a quota alone is short, ranks have processors of their own: yielding would be spinning, and spend the quota.
    """
    return DEFAULT_YIELD_US if len(gathered.crew) > len(_processors(gathered)) else 0.0


def _processors(gathered: Gathered) -> set[int]:
    """The processors that the ranks of this host may run on, all together."""
    return {cpu for rank in gathered.crew for cpu in gathered.processors[rank]}


def _timeline(target: Path, world: World, generation: int, settings: config.Config) -> Timeline:
    try:
        return Timeline(
            target,
            world.rank,
            world.size,
            settings.timeline_limit,
            settings.timeline_mark_cycles,
            world.text(generation),
            world.number,
            world.elastic,
        )
    except OSError as error:
        raise ConfigError(f"timeline is {str(target)!r}: {error.strerror} ({error.filename})") from None
