"""Start of this rank's engine together with the other ranks, and the components that run beside it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..collectives.process_sets import ProcessSet
from ..config import config
from ..config.world import World
from ..errors import ConfigError, EngineError, RendezvousError
from ..gpu.device import Device
from ..host import linux, stacks
from ..host.machine import cpu_quota
from ..host.patience import Patience
from ..metrics import own_page
from ..metrics.export.in_process import InProcess
from ..native import core, setup
from ..net.connection import GRACE
from ..net.rendezvous import CancellationToken, Gathered, gather, mpi_lanes
from ..net.rendezvous.layout import Layout
from ..net.rendezvous.mpi_bootstrap import OtherFailedError
from ..net.rendezvous.set_connections import SetConnector
from ..text import logs, readable
from ..trace.flight import Recorder
from ..trace.timeline import Timeline
from ..tuning.journals import check_log, knobs_of
from ..tuning.knobs import words
from ..tuning.trial_loop import Spent, Tuning
from .monitor import Watch
from .registry import ProcessSetRegistry

DEFAULT_SPIN_US = 25.0
DEFAULT_YIELD_US = 50.0
_SHORTEST, _LONGEST = 0.0002, 0.02  # seconds between two polls while waiting for the other ranks
LONGEST_SETS = 400  # largest description of process sets that ranks compare, in characters
SPARE = 24  # approximate number of descriptors for the engine's own files and sockets


@dataclass
class Told:
    """State that ranks exchange when a world of an elastic job starts.

    Attributes
    ----------
    last : int or None
        Number of the rank's previous world; None: it was in none.
    sets : list of tuple of int
        Ranks of each of its process sets, in the order in which these were added.
    knobs : dict or None
        Knobs that it proposes for the new world; None: it knows of none.
    spent : Spent
        Cost of the tuner's trials for the job, as far as the rank knows.
    searched : tuple of int
        Sizes of the worlds in which a search of the tuner has ended, as far as the rank knows.
    optimizers : int
        Number of its wrapped optimizers.
    """

    last: int | None = None
    sets: list[tuple[int, ...]] = field(default_factory=list)
    knobs: dict[str, Any] | None = None
    spent: Spent = field(default_factory=Spent)
    searched: tuple[int, ...] = ()
    optimizers: int = 0


@dataclass
class Running:
    """An initialised engine and its components."""

    engine: core.Engine
    world: World
    settings: config.Config
    watch: Watch
    sets: ProcessSetRegistry
    pid: int
    pids: dict[int, int]
    """Process ids of this host's ranks, by rank."""
    layout: Layout
    generation: int
    """Number of the world, set by the driver of an elastic job, or counted by this process."""
    given: dict[str, Any]
    """Settings that the user has chosen, by name."""
    tune: Callable[..., None]
    """Function that applies the knobs of a log or starts a search, given this object and earlier knobs. On rank 0."""
    timeline: Timeline | None = None
    tuning: Tuning | None = None
    serving: InProcess | None = None
    device: Device | None = None
    searching: bool = False
    """Whether the tuner began to search in this world of an elastic job, on any rank."""
    told: Told = field(default_factory=Told)
    """State of this rank from earlier worlds of an elastic job."""
    lost: list[ProcessSet] = field(default_factory=list)
    """Process sets of earlier worlds that this one does not have."""

    def show(self, added: ProcessSet) -> None:
        """Add a new process set to the timeline, if one is being recorded."""
        if self.timeline is not None and added.process_set_id is not None and added.included():
            self.timeline.add(added.process_set_id, added.engine)

    def let_go(self, seconds: float) -> None:
        """Stop all components beside the engine after its end. The monitor thread has `seconds` to end."""
        self.watch.report_failure()  # First, since closing the device may take longer than the launcher waits.
        with contextlib.ExitStack() as ends:  # The last one is called first, each even if another one raises.
            if self.serving is not None:
                ends.callback(self.serving.stop)
            if self.timeline is not None:
                ends.callback(self.timeline.stop)
            ends.callback(self.watch.stop, seconds)
            if self.device is not None:
                ends.callback(self.device.close)


@dataclass
class Prepared:
    """Resources that a rank prepares before the rendezvous, so that errors in them are raised early.

    Attributes
    ----------
    world : World
    given : dict
        Settings that the user has chosen, by name; the others have their defaults.
    settings : Config
    generation : int
        Number of the world, as in `rendezvous.gather`.
    build : dict
        Properties of the build, and process sets, that must be equal on all ranks.
    host_name : str
        Name of this host, for its page of counters.
    known : dict
        Knobs of `autotune_from`, on rank 0.
    page : int
        Descriptor of the page of counters; -1: there is none.
    timeline : Timeline or None
    heard_of : bool
        Whether `start` has begun, which announces a failure to the other ranks itself.
    """

    world: World
    given: dict[str, Any]
    settings: config.Config
    generation: int
    build: dict[str, str | int]
    host_name: str
    known: dict[str, Any]
    page: int
    timeline: Timeline | None = None
    heard_of: bool = False

    def close(self) -> None:
        """Release the resources that no engine has taken over."""
        if self.timeline is not None:
            self.timeline.stop()
            self.timeline = None


def prepare(
    world: World,
    given: dict[str, Any],
    generation: int,
    environ: Mapping[str, str],
    sets: Sequence[ProcessSet] = (),
) -> Prepared:
    """Prepare everything that can fail on this rank alone, before the rendezvous.

    Parameters
    ----------
    world : World
    given : dict
        Settings that the user has chosen, by name.
    generation : int
        Same as in `rendezvous.gather`.
    environ : mapping
        Result of `config.environment()`.
    sets : sequence of ProcessSet
        Sets that are added right after the rendezvous.
    """
    settings = config.Config(**given)
    setup.use_kernels(settings.kernels)
    _reserve_descriptors(world, settings)
    known = _knobs_of_a_log(world, settings)
    build = setup.segment_info() | ({"process_sets": _described(sets)} if sets else {})
    host_name = environ.get("ENGINE_HOST_NAME") or platform.node()
    page = _page(environ) if own_page.wanted(settings) else -1
    timeline = None if settings.timeline is None else _timeline(settings.timeline, world, settings)  # the last to fail
    return Prepared(world, given, settings, generation, build, host_name, known, page, timeline)


def _described(sets: Sequence[ProcessSet]) -> str:
    """Describe process sets in a text that differs if they differ, and is short enough for a rank's first message."""
    text = " ".join(map(repr, sets))
    if len(text) <= LONGEST_SETS:
        return text
    return f"{text[:LONGEST_SETS]}... ({len(sets)} sets, digest {hashlib.sha256(text.encode()).hexdigest()[:16]})"


def tell_failure(world: World, generation: int, error: Exception) -> None:
    """Tell the ranks that wait for this one why it cannot start. Takes about `messages.TELLING` seconds at most."""
    if world.size == 1:
        return
    settings = config.Config()  # The defaults, since this process's settings may be invalid.
    with contextlib.suppress(EngineError, OSError):
        gather(
            world,
            generation,
            setup.segment_info(),
            settings.start_timeout,
            partial(_memory, world, generation),
            failure=readable.exception(error),
        ).close()


def start(prepared: Prepared, called_off: CancellationToken | None = None) -> Running:
    """Meet the other ranks and start this rank's engine and its components, except the tuner. Collective.

    A failure after the rendezvous ends the new world on all ranks, with this rank's reason.

    Parameters
    ----------
    prepared : Prepared
        Resources of this rank; closed if this fails.
    called_off : CancellationToken, optional
        Same as in `rendezvous.gather`.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(prepared.close)
        prepared.heard_of = True
        try:
            gathered = _gather(prepared, called_off)
        except Exception as error:
            if not isinstance(error, RendezvousError):  # This rank failed before the rendezvous.
                tell_failure(prepared.world, prepared.generation, error)
            raise
        with _others_told(prepared, gathered) as control:
            engine, set_links = _engine(prepared, gathered, control)
        undo.push(partial(_end, engine))
        running = _surround(engine, prepared, gathered, set_links)
        undo.pop_all()
        return running


def _gather(prepared: Prepared, called_off: CancellationToken | None) -> Gathered:
    world, settings = prepared.world, prepared.settings

    def abort(control: int, hosts: Sequence[int], error: BaseException) -> None:
        setup.abort_segment(control, world.rank, world.size, hosts, _reason(error))

    return gather(
        world,
        prepared.generation,
        prepared.build,
        settings.start_timeout,
        partial(_memory, world, prepared.generation),
        setup.kernel_levels() if settings.kernels == "auto" else [settings.kernels],
        settings.interface,
        settings.sockets_per_lane,
        settings.lanes,
        called_off,
        abort=abort,
    )


@contextlib.contextmanager
def _others_told(prepared: Prepared, gathered: Gathered) -> Iterator[int]:
    """Context in which this rank's engine is created; yields a descriptor of the control segment.

    If the creation fails, the reason is told to the other ranks, which may have their engines already.
    """
    world, control = prepared.world, -1
    try:
        control = os.dup(gathered.control)
        yield control
    except BaseException as error:
        if control < 0 or _is_open(gathered.control, control):  # Else a partly created engine owns the descriptors.
            _give_up(prepared, gathered, error)
        else:
            setup.abort_segment(control, world.rank, world.size, gathered.hosts, _reason(error))
        raise
    finally:
        if control >= 0:
            os.close(control)


def _mpi(prepared: Prepared, gathered: Gathered, control: int) -> dict[str, Any] | None:
    """Return the parameters of lanes over MPI; None if another rank gives up meanwhile.

    An engine without lanes then learns the other rank's reason.
    """
    world = prepared.world
    trunks = select.poll()
    for trunk in gathered.trunks.values():
        trunks.register(trunk, select.POLLRDHUP)

    def other_failed() -> bool:
        return bool(trunks.poll(0)) or setup.is_aborted(control, world.rank, world.size, gathered.hosts)

    try:
        return mpi_lanes.library(world, gathered.generation, prepared.settings.start_timeout, other_failed)
    except OtherFailedError:
        return None


def _engine(prepared: Prepared, gathered: Gathered, control: int) -> tuple[core.Engine, SetConnector | None]:
    """Create this rank's engine in the world, and the connector of process sets; None on one host."""
    world, settings = prepared.world, prepared.settings
    if gathered.kernels is not None:
        setup.use_kernels(gathered.kernels)
    several = len(gathered.layout.crews) > 1
    set_links = SetConnector(world, gathered, settings.start_timeout) if several else None
    over_mpi = several and settings.lanes == "mpi"
    mpi = _mpi(prepared, gathered, control) if over_mpi else None
    spin = spin_us(gathered) if settings.spin_us is None else settings.spin_us
    pause = yield_us(gathered) if settings.spin_us is None else 0.0
    return _made_engine(prepared, gathered, spin, pause, mpi), set_links


def _made_engine(
    prepared: Prepared, gathered: Gathered, spin: float, pause: float, mpi: dict[str, Any] | None
) -> core.Engine:
    """Create an engine. It owns the descriptors, even if its creation fails."""
    world, settings = prepared.world, prepared.settings
    return core.Engine(
        world.rank,
        world.size,
        gathered.control,
        gathered.arena,
        gathered.peers,
        knobs={name: getattr(settings, name) for name in config.knobs()},
        stall_warning=settings.stall_warning,
        stall_limit=settings.stall_limit,
        host_silence=settings.host_silence,
        spin_us=spin,
        yield_us=pause,
        counters=prepared.page,
        **_across(gathered),
        mpi=mpi,
        device_sums=settings.device_sums,
        another_follows=world.number is not None,
    )


def _give_up(prepared: Prepared, gathered: Gathered, error: BaseException) -> None:
    """Tell the other ranks, after the rendezvous, why this rank has no engine: by an engine that only aborts."""
    try:
        engine = _made_engine(prepared, gathered, 0.0, 0.0, None)
    except BaseException:
        gathered.close()
        raise
    engine.abort(_reason(error))
    engine.close(0.0)


def _reason(error: BaseException) -> str:
    """Return the text of the abort by which this rank ends the new world."""
    return f"engine.init() has failed: {readable.exception(error)}"


def _is_open(descriptor: int, duplicate: int) -> bool:
    """Return whether a descriptor is still open on the file of its duplicate."""
    try:
        return os.path.sameopenfile(descriptor, duplicate)
    except OSError:
        return False


def _surround(engine: core.Engine, prepared: Prepared, gathered: Gathered, set_links: SetConnector | None) -> Running:
    """Create all components of a new engine. If one of them fails, all are destroyed."""
    world, settings = prepared.world, prepared.settings
    crew = {rank: gathered.pids[rank] for rank in gathered.crew}
    with contextlib.ExitStack() as undo:
        undo.push(partial(_end, engine))
        if prepared.page >= 0:
            layout = gathered.layout
            engine.tell(**own_page.begin(prepared.page, world.rank, world.local_rank, layout.hosts, prepared.host_name))
        device = Device(engine, crew, settings)
        undo.callback(device.close)
        sets = ProcessSetRegistry(engine, settings.shutdown_timeout, device, set_links)
        undo.callback(sets.close, 0.0)
        watch = Watch(engine, sets, Recorder(settings.output_dir, world.rank, world.number))
        undo.callback(watch.stop, settings.shutdown_timeout)
        undo.push(partial(_end, engine))  # Pushed again to run first, since the watch ends with the engine.
        watch.start()
        stacks.enable(settings.output_dir, world.rank)
        running = Running(
            *(engine, world, settings, watch, sets, os.getpid(), crew, gathered.layout),
            *(gathered.generation, prepared.given),
            tune=partial(_tune, known=prepared.known, cpus=sorted(_processors(gathered))),
            timeline=prepared.timeline,
            device=device,
        )
        if prepared.timeline is not None:
            text = world.text(gathered.generation)
            prepared.timeline.start(engine, sets, len(gathered.layout.crews), text)
        undo.pop_all()
    return running


def await_engines(running: Running) -> None:
    """Wait until every rank has created its engine, since later steps have no time-out. Collective.

    Raises the errors of `await_all`.
    """
    handle = running.engine.barrier("engine.init.engines")
    _await_start(running, list, handle)


def await_all(running: Running) -> None:
    """Wait until every rank has completed its start. Collective.

    Raises
    ------
    WorldError
        The start has failed on some rank.
    RendezvousError
        A rank has not completed its start within `start_timeout`.
    """
    several = len(running.layout.crews) > 1
    _await_start(running, running.engine.starting, running.engine.barrier("engine.init") if several else None)


def _await_start(running: Running, starting: Callable[[], list[int]], handle: Any) -> None:
    """Wait until `starting` lists no rank of this host any more, and for the other hosts until `handle` is done."""
    engine, seconds = running.engine, running.settings.start_timeout
    patience = Patience(seconds if engine.rank == 0 else seconds + GRACE)  # Rank 0 tells all others which rank is late.
    pause = _SHORTEST
    while (late := starting()) or (handle is not None and not handle.done):
        if (failure := engine.failure) is not None:
            raise failure
        if not patience.left():
            late = late or [rank for each in engine.pending() for rank in each["missing"] or ()]
            who = readable.ranks(late) if late else "some rank"
            raise RendezvousError(f"{who} did not come to the end of engine.init() within {seconds:g} s")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
    if handle is not None:
        handle.wait()


def _reserve_descriptors(world: World, settings: config.Config) -> None:
    """Raise the limit of descriptors as far as needed, so that this process does not run out in the rendezvous."""
    lanes = (world.size - world.local_size) * settings.sockets_per_lane
    others = (3 if world.leads else 1) * world.local_size  # A leader has a connection and a pidfd for each local rank.
    count = others + (world.local_size if world.leads else 1) * lanes + SPARE
    try:
        linux.reserve_descriptors(count)
    except OSError as error:
        raise RendezvousError(
            f"rank {world.rank} needs about {count} more descriptors to meet the others: {linux.explain(error)}"
        ) from None


def _end(engine: core.Engine, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
    """End the world because this rank's start has failed with `error`."""
    if error is not None:
        engine.abort(_reason(error))
        engine.close(0.0)


def _page(environ: Mapping[str, str]) -> int:
    """Open this rank's page of counters and return its descriptor."""
    try:
        return own_page.open_page(environ)
    except OSError as error:
        raise RendezvousError(f"there is no memory for counters: {linux.refusal('memfd_create', error)}") from None


def _across(gathered: Gathered) -> dict[str, Any]:
    """Return an engine's parameters about other hosts; empty if there are none."""
    if len(gathered.layout.crews) == 1:
        return {}
    return {"hosts": gathered.hosts, "trunks": gathered.trunks, "lanes": gathered.lanes}


def _memory(world: World, generation: int) -> tuple[int, int]:
    """Create the shared memory of a host's ranks; return the descriptors of control segment and arena."""
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
    """Read the knobs of `autotune_from` on rank 0, and check that the tuner's log can be written."""
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
    """Apply the knobs of a log, except those that the user has chosen; or start a search.

    `better`: knobs that an earlier world of the job has found, which are in force as that `version`.
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
        if name in given and name != "sockets_per_lane"  # The setting opens the sockets; the knob says how many to use.
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
    """Return the microseconds to spin before sleeping: 0 if this host has fewer processors than ranks.

    Without a processor for each rank, spinning would take the processor of the rank that is waited for.
    """
    processors: float = len(_processors(gathered))
    try:
        quota = cpu_quota()
    except (ArithmeticError, LookupError, OSError, ValueError) as error:
        # The cgroup file system has no guaranteed format, and the spin time is no reason to fail.
        logs.logger.debug("the CPU quota cannot be read, and the affinity decides alone: %r", error)
        quota = None
    if quota is not None:
        processors = min(processors, quota)
    return DEFAULT_SPIN_US if len(gathered.crew) <= processors else 0.0


def yield_us(gathered: Gathered) -> float:
    """Return the microseconds to yield before sleeping: 0 unless ranks of this host share processors.

    If they do, the rank that is waited for may be ready to run on this processor. If only the CPU quota is short, ranks
    have processors of their own; yielding would then be spinning, and use up the quota.
    """
    return DEFAULT_YIELD_US if len(gathered.crew) > len(_processors(gathered)) else 0.0


def _processors(gathered: Gathered) -> set[int]:
    """Return the union of the processors that the ranks of this host may run on."""
    return {cpu for rank in gathered.crew for cpu in gathered.processors[rank]}


def _timeline(target: Path, world: World, settings: config.Config) -> Timeline:
    try:
        return Timeline(
            target,
            world.rank,
            world.size,
            settings.timeline_limit,
            settings.timeline_mark_cycles,
            world.number,
            world.elastic,
        )
    except OSError as error:
        raise ConfigError(f"timeline is {str(target)!r}: {linux.explain(error)}") from None
