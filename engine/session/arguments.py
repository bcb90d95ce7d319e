"""Arguments of `init`: settings and process sets, read together with this process's environment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from ..collectives.process_sets import ProcessSet, check_sets
from ..config import config
from ..config.world import World, detect_world
from ..errors import ConfigError, EngineError, RendezvousError
from ..host import linux
from ..net.rendezvous import mpi_bootstrap
from ..text import logs, readable
from .session import EngineSession
from .startup import tell_failure

ProcessSets = Iterable[ProcessSet | Iterable[int]] | str | None


def read_settings(settings: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any], config.Config]:
    """Return this process's environment, the settings that the user has chosen, and all settings."""
    linux.open_standard_descriptors()
    environ = config.read_environment()
    given = config.read_given(environ, settings)
    return environ, given, config.Config(**given)


def make_process_sets(process_sets: ProcessSets) -> list[ProcessSet]:
    """Return the process sets that were passed to `init`, as objects."""
    if process_sets is None or (isinstance(process_sets, str) and process_sets == "dynamic"):
        return []
    if isinstance(process_sets, str | bytes | Mapping | ProcessSet) or not isinstance(process_sets, Iterable):
        raise ConfigError(
            "process_sets is a list of sets, such as [[0, 1], [2, 3]], or 'dynamic', and not "
            f"{readable.quote_value(process_sets)}"
        )
    return [_make_process_set(number, each) for number, each in enumerate(process_sets)]


def _make_process_set(number: int, given: ProcessSet | Iterable[int]) -> ProcessSet:
    """Return a process set that was passed to `init` with others, as an object."""
    if isinstance(given, ProcessSet):
        return given
    try:
        return ProcessSet(given)
    except ValueError as error:
        raise ConfigError(f"process_sets[{number}]: {error}") from None


def create_session(
    settings: Mapping[str, Any], process_sets: ProcessSets, generation: int, world: World | None = None
) -> EngineSession:
    """Find this process's place, check the arguments of `init`, and create a session that has not started.

    `world` is the place if it is known already. A failure is told to the other ranks, which wait.
    """
    environ: Mapping[str, str] = {}
    try:
        environ, given, chosen = read_settings(settings)
        world = world or _detect_world(environ, chosen)
        logs.configure_logger(chosen.log_level, world.rank)
        sets = make_process_sets(process_sets)
        check_sets(sets, world.size)
        return EngineSession(world, given, generation, environ, sets)
    except Exception as error:
        if world is None and not isinstance(error, RendezvousError):  # Else the ranks have met, and know of it.
            with contextlib.suppress(EngineError):
                world = _detect_world(environ or config.read_environment(), config.Config())
        if world is not None:
            tell_failure(world, generation, error)
        raise


def _detect_world(environ: Mapping[str, str], chosen: config.Config) -> World:
    """Find this process's place in its job. Collective if ranks agree over MPI."""
    return detect_world(
        environ, partial(mpi_bootstrap.agree_over_mpi, seconds=chosen.start_timeout, interface=chosen.interface)
    )
