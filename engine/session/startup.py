"""Steps by which a session starts: what a rank prepares by itself, the world that it joins, and its services.

Each step takes the session, and registers how it comes down again. `PREPARE` may fail on this rank alone, `JOIN` meets
the other ranks, `OPEN` completes `init`; a process that enters a later world carries its state over instead of `OPEN`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import select
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from ..collectives.process_sets import ProcessSet
from ..config import config
from ..config.world import World
from ..errors import ConfigError, EngineError, RendezvousError
from ..errors.formatting import format_exception
from ..gpu.device import Device
from ..host import linux, stacks
from ..host.machine import cpu_quota
from ..host.patience import Patience
from ..metrics import own_page, step_parts
from ..metrics.export.in_process import listen
from ..native import core, setup
from ..net.connection import GRACE
from ..net.rendezvous import CancellationToken, Gathered, RendezvousOptions, gather_ranks
from ..net.rendezvous.mpi_bootstrap import OtherFailedError
from ..net.rendezvous.set_connections import SetConnector
from ..text import logs, readable
from ..trace.flight import Recorder
from ..tuning.journals import check_log, knobs_of
from ..tuning.knobs import format_knobs
from ..tuning.trial_loop import Tuning
from .carriers import compare_carriers, open_provider
from .monitor import Monitor
from .registry import ProcessSetRegistry
from .session import EngineSession, reason_of

DEFAULT_SPIN_US = 25.0
DEFAULT_YIELD_US = 50.0
_SHORTEST, _LONGEST = 0.0002, 0.02  # seconds between two polls while waiting for the other ranks
LONGEST_SETS = 400  # largest description of process sets that ranks compare, in characters
SPARE = 24  # approximate number of descriptors for the engine's own files and sockets


def listen_for_metrics(session: EngineSession) -> None:
    """Open the port of the metrics service, if this rank serves its host."""
    session.metrics_service = listen(session.settings, session.world.local_rank)


def select_kernels(session: EngineSession) -> None:
    """Select the kernels that the settings name."""
    setup.use_kernels(session.settings.kernels)


def reserve_descriptors(session: EngineSession) -> None:
    """Raise the limit of descriptors as far as needed, so that this process does not run out in the rendezvous."""
    world, settings = session.world, session.settings
    lanes = (world.size - world.local_size) * settings.sockets_per_lane
    others = (3 if world.leads else 1) * world.local_size  # A leader has a connection and a pidfd for each local rank.
    count = others + (world.local_size if world.leads else 1) * lanes + SPARE
    try:
        linux.reserve_descriptors(count)
    except OSError as error:
        raise RendezvousError(
            f"rank {world.rank} needs about {count} more descriptors to meet the others: {linux.explain_error(error)}"
        ) from None


def read_known_knobs(session: EngineSession) -> None:
    """Read the knobs of `autotune_from` on rank 0, and check that the tuner's log can be written."""
    settings = session.settings
    session.known_knobs = {}
    if session.world.rank == 0:
        if settings.autotune and settings.autotune_log is not None:
            check_log(settings.autotune_log)
        if settings.autotune_from is not None:
            session.known_knobs = knobs_of(settings.autotune_from)


def describe_build(session: EngineSession) -> None:
    """Collect what must be equal on all ranks: the build, and the process sets of `init`."""
    sets = session.initial_sets
    session.build = setup.segment_info() | ({"process_sets": _describe_sets(sets)} if sets else {})


def open_page(session: EngineSession) -> None:
    """Open this rank's page of counters, which stays open after the session."""
    if own_page.should_count(session.settings):
        session.page = _open_own_page(session.environ)


def open_timeline(session: EngineSession) -> None:
    """Create the file of the timeline, if the settings name one."""
    target = session.settings.timeline
    if target is not None:
        try:
            session.timeline = session.make_timeline(target, session.settings.timeline_mark_cycles)
        except OSError as error:
            raise ConfigError(f"timeline is {str(target)!r}: {linux.explain_error(error)}") from None


def join_world(session: EngineSession, cancel: CancellationToken | None = None) -> None:
    """Meet the other ranks and create this rank's engine. Collective.

    A failure after the rendezvous ends the new world on all ranks, with this rank's reason.
    """
    session.announced = True
    try:
        gathered = _gather_ranks(session, cancel)
    except Exception as error:
        if not isinstance(error, RendezvousError):  # This rank failed before the rendezvous.
            tell_failure(session.world, session.generation, error)
        raise
    with _tell_others_of_failure(session, gathered) as control:
        session.layout, session.generation = gathered.layout, gathered.generation
        session.pids = {rank: gathered.pids[rank] for rank in gathered.crew}
        session.processors = sorted(_find_processors(gathered))
        session.engine, connector = _create_engine(session, gathered, control)
    session.joined = True
    session.ends.callback(session.close_engine)  # Also if the monitor, which is closed with it, does not start.
    _start_services(session, connector)


def _start_services(session: EngineSession, connector: SetConnector | None) -> None:
    """Start all that a rank with an engine needs before the others are waited for."""
    engine, world, settings = session.engine, session.world, session.settings
    if session.page >= 0:
        host_name = session.environ.get("ENGINE_HOST_NAME") or platform.node()
        engine.tell(
            **own_page.make_start_fields(session.page, world.rank, world.local_rank, session.layout.hosts, host_name)
        )
    session.device = Device(engine, session.pids, settings)
    session.ends.callback(session.device.close)
    session.sets = ProcessSetRegistry(engine, settings.shutdown_timeout, session.device, connector)
    session.ends.callback(session.sets.close, 0.0)  # Again, if the monitor does not start.
    session.monitor = Monitor(engine, session.sets, Recorder(settings.output_dir, world.rank, world.number))
    session.ends.callback(session.stop_monitor)
    session.monitor.start()
    stacks.enable_stacks(settings.output_dir, world.rank)
    session.ends.callback(session.close_process_sets)
    session.ends.callback(session.stop_tuner)
    if session.page >= 0:
        session.ends.callback(step_parts.watch_steps(engine))
    if session.timeline is not None:
        session.start_timeline(session.timeline)
    session.ends.callback(session.finish_programs)


def add_initial_sets(session: EngineSession) -> None:
    """Form the process sets of `init`. Collective."""
    if session.initial_sets:  # Adding them needs all engines, and has no time-out of its own.
        await_engines(session)
    for each in session.initial_sets:
        session.record_process_set(session.sets.add(each))


def serve_metrics(session: EngineSession) -> None:
    """Serve the pages of this host's ranks, if this rank does."""
    if session.metrics_service is not None:
        session.metrics_service.start(session.pids)


def start_tuner(session: EngineSession) -> None:
    """Apply the knobs of a log or start a search, on rank 0."""
    if session.world.rank == 0:
        start_tuning(session)


def log_start(session: EngineSession) -> None:
    """Log this process's rank, and variables of its environment that are ignored, misspelt or without effect."""
    log_environment(session.world, session.environ)


def await_engines(session: EngineSession) -> None:
    """Wait until every rank has created its engine, since later steps have no time-out. Collective.

    Raises the errors of `await_all`.
    """
    handle = session.engine.barrier("engine.init.engines")
    _await_start(session, list, handle)


def await_all(session: EngineSession) -> None:
    """Wait until every rank has completed its start. Collective.

    It raises a WorldError if the start has failed on some rank. It raises a RendezvousError if a rank has not completed
    it within `start_timeout`.
    """
    engine = session.engine
    if engine.carrier is None:
        _await_start(session, engine.starting, engine.barrier("engine.init") if session.several_hosts else None)
        return
    handle = engine.allgather(array("q", engine.carrier), "engine.init")
    _await_start(session, engine.starting, handle)
    numbers = handle.gathered[0].cast("B").cast("q").tolist()
    compare_carriers(list(zip(numbers[::2], numbers[1::2], strict=True)))


PREPARE = (select_kernels, reserve_descriptors, read_known_knobs, describe_build, open_page, open_timeline)
OPEN = (add_initial_sets, serve_metrics, start_tuner, log_start, await_all)


def log_environment(world: World, environ: Mapping[str, str]) -> None:
    """Log a process's rank, and variables of its environment that are ignored, misspelt or without effect."""
    logs.logger.info("rank %d of %d, found by %s", world.rank, world.size, world.source)
    for name, value in config.service_links(environ).items():
        logs.logger.info("%s=%s is set by Kubernetes for a Service of that name, and ignored", name, value)
    for name, meant in config.find_misspelt(environ).items() if world.rank == 0 else ():
        logs.logger.warning("%s is set, and there is no such setting; is %s meant?", name, meant)
    if unused := config.without_effect(environ):
        logs.logger.debug("set, and without effect here: %s", ", ".join(unused))


def _describe_sets(sets: Sequence[ProcessSet]) -> str:
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
        gather_ranks(
            world,
            RendezvousOptions(
                generation,
                setup.segment_info(),
                settings.start_timeout,
                partial(_create_memory, world, generation),
                failure=format_exception(error),
            ),
        ).close()


def _gather_ranks(session: EngineSession, cancel: CancellationToken | None) -> Gathered:
    world, settings = session.world, session.settings

    def abort(control: int, hosts: Sequence[int], error: BaseException) -> None:
        setup.abort_segment(control, world.rank, world.size, hosts, reason_of(error))

    options = RendezvousOptions(
        session.generation,
        session.build,
        settings.start_timeout,
        partial(_create_memory, world, session.generation),
        setup.kernel_levels() if settings.kernels == "auto" else [settings.kernels],
        settings.interface,
        settings.sockets_per_lane,
        settings.lanes,
        abort=abort,
    )
    return gather_ranks(world, options, cancel)


@contextlib.contextmanager
def _tell_others_of_failure(session: EngineSession, gathered: Gathered) -> Iterator[int]:
    """Context in which this rank's engine is created; yields a descriptor of the control segment.

    If the creation fails, the reason is told to the other ranks, which may have their engines already.
    """
    world, control = session.world, -1
    try:
        control = os.dup(gathered.control)
        yield control
    except BaseException as error:
        if control < 0 or _is_open(gathered.control, control):  # Else a partly created engine owns the descriptors.
            _give_up(session, gathered, error)
        else:
            setup.abort_segment(control, world.rank, world.size, gathered.hosts, reason_of(error))
        raise
    finally:
        if control >= 0:
            os.close(control)


def _open_carrier(session: EngineSession, gathered: Gathered, control: int) -> object | None:
    """Return the provider of carriers for lanes; None without one, or if another rank gives up meanwhile.

    An engine without lanes then learns the other rank's reason.
    """
    world = session.world
    trunks = select.poll()
    for trunk in gathered.trunks.values():
        trunks.register(trunk, select.POLLRDHUP)

    def other_failed() -> bool:
        return bool(trunks.poll(0)) or setup.is_aborted(control, world.rank, world.size, gathered.hosts)

    try:
        settings = session.settings
        return open_provider(settings.lanes, world, gathered.generation, settings.start_timeout, other_failed)
    except OtherFailedError:
        return None


def _create_engine(session: EngineSession, gathered: Gathered, control: int) -> tuple[core.Engine, SetConnector | None]:
    """Create this rank's engine in the world, and the connector of process sets; None on one host."""
    world, settings = session.world, session.settings
    if gathered.kernels is not None:
        setup.use_kernels(gathered.kernels)
    several = len(gathered.layout.crews) > 1
    set_links = SetConnector(world, gathered, settings.start_timeout) if several else None
    carrier = _open_carrier(session, gathered, control) if several else None
    spin = spin_us(gathered) if settings.spin_us is None else settings.spin_us
    pause = yield_us(gathered) if settings.spin_us is None else 0.0
    return _construct_engine(session, gathered, spin, pause, carrier), set_links


def _construct_engine(
    session: EngineSession, gathered: Gathered, spin: float, pause: float, carrier: object | None
) -> core.Engine:
    """Create an engine. It owns the descriptors, even if its creation fails."""
    world, settings = session.world, session.settings
    return core.Engine(
        world.rank,
        world.size,
        gathered.control,
        gathered.arena,
        gathered.peers,
        knobs={name: getattr(settings, name) for name in config.list_knobs()},
        stall_warning=settings.stall_warning,
        stall_limit=settings.stall_limit,
        host_silence=settings.host_silence,
        spin_us=spin,
        yield_us=pause,
        counters=session.page,
        **_make_host_options(gathered),
        carrier=carrier,
        device_sums=settings.device_sums,
        another_follows=world.number is not None,
    )


def _give_up(session: EngineSession, gathered: Gathered, error: BaseException) -> None:
    """Tell the other ranks, after the rendezvous, why this rank has no engine: by an engine that only aborts."""
    try:
        engine = _construct_engine(session, gathered, 0.0, 0.0, None)
    except BaseException:
        gathered.close()
        raise
    engine.abort(reason_of(error))
    engine.close(0.0)


def _is_open(descriptor: int, duplicate: int) -> bool:
    """Return whether a descriptor is still open on the file of its duplicate."""
    try:
        return os.path.sameopenfile(descriptor, duplicate)
    except OSError:
        return False


def _await_start(session: EngineSession, starting: Callable[[], list[int]], handle: Any) -> None:
    """Wait until `starting` lists no rank of this host any more, and for the other hosts until `handle` is done."""
    engine, seconds = session.engine, session.settings.start_timeout
    patience = Patience(seconds if engine.rank == 0 else seconds + GRACE)  # Rank 0 tells all others which rank is late.
    pause = _SHORTEST
    while (late := starting()) or (handle is not None and not handle.done):
        if (failure := engine.failure) is not None:
            raise failure
        if not patience.seconds_left():
            late = late or [rank for each in engine.pending() for rank in each["missing"] or ()]
            who = readable.format_ranks(late) if late else "some rank"
            raise RendezvousError(f"{who} did not come to the end of engine.init() within {seconds:g} s")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
    if handle is not None:
        handle.wait()


def _open_own_page(environ: Mapping[str, str]) -> int:
    """Open this rank's page of counters and return its descriptor."""
    try:
        return own_page.open_page(environ)
    except OSError as error:
        raise RendezvousError(
            f"there is no memory for counters: {linux.explain_refusal('memfd_create', error)}"
        ) from None


def _make_host_options(gathered: Gathered) -> dict[str, Any]:
    """Return an engine's parameters about other hosts; empty if there are none."""
    if len(gathered.layout.crews) == 1:
        return {}
    return {"hosts": gathered.hosts, "trunks": gathered.trunks, "lanes": gathered.lanes}


def _create_memory(world: World, generation: int) -> tuple[int, int]:
    """Create the shared memory of a host's ranks; return the descriptors of control segment and arena."""
    try:
        control = setup.create_segment(world.size, generation)
        try:
            return control, setup.create_arena()
        except BaseException:
            os.close(control)
            raise
    except OSError as error:
        why = linux.explain_refusal("memfd_create", error)
        raise RendezvousError(f"rank {world.rank} cannot make the memory that the ranks share: {why}") from None


def start_tuning(
    session: EngineSession, better: Mapping[str, Any] = MappingProxyType({}), version: int | None = None
) -> None:
    """Apply the knobs of a log, except those that the user has chosen; or start a search.

    `better`: knobs that an earlier world of the job has found, which are in force as that `version`.
    """
    given, known = session.given, session.known_knobs
    if not session.settings.autotune:
        chosen = {name: value for name, value in known.items() if name not in given}
        if chosen:
            session.engine.set_knobs(**chosen)
            logs.logger.info("autotune: knobs of %s: %s", session.settings.autotune_from, format_knobs(chosen))
        return
    held = {
        name: value
        for name, value in session.engine.knobs().items()
        if name in given and name != "sockets_per_lane"  # The setting opens the sockets; the knob says how many to use.
    }
    about = {"ranks": session.world.size, "hosts": len(session.layout.crews), "held": held}
    crews = [len(crew) for crew in session.layout.crews]
    elastic = session.world.number is not None
    session.tuning = Tuning(
        *(session.engine, session.settings, held, session.processors, known, about, session.sets, crews),
        began=better,
        version=version,
        spent=session.state.spent,
        elastic=elastic,
    )
    session.tuning.start()


def spin_us(gathered: Gathered) -> float:
    """Return the microseconds to spin before sleeping: 0 if this host has fewer processors than ranks.

    Without a processor for each rank, spinning would take the processor of the rank that is waited for.
    """
    processors: float = len(_find_processors(gathered))
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
    return DEFAULT_YIELD_US if len(gathered.crew) > len(_find_processors(gathered)) else 0.0


def _find_processors(gathered: Gathered) -> set[int]:
    """Return the union of the processors that the ranks of this host may run on."""
    return {cpu for rank in gathered.crew for cpu in gathered.processors[rank]}
