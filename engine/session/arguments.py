"""Arguments of `init`: settings and process sets, read together with this process's environment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from ..collectives.process_sets import ProcessSet, check_sets
from ..config import config
from ..config.world import World, detect
from ..errors import ConfigError, EngineError, RendezvousError
from ..host import linux
from ..net.rendezvous import mpi_bootstrap
from ..text import logs
from .session import EngineSession
from .startup import tell_failure

ProcessSets = Iterable[ProcessSet | Iterable[int]] | str | None


def read_settings(settings: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any], config.Config]:
    """Return this process's environment, the settings that the user has chosen, and all settings."""
    linux.open_standard_descriptors()
    environ = config.environment()
    given = config.given(environ, settings)
    return environ, given, config.Config(**given)


def make_process_sets(process_sets: ProcessSets) -> list[ProcessSet]:
    """Return the process sets that were passed to `init`, as objects."""
    if isinstance(process_sets, str):
        if process_sets != "dynamic":
            raise ConfigError(f"process_sets is a list of sets, or 'dynamic', not {process_sets!r}")
        return []
    return [each if isinstance(each, ProcessSet) else ProcessSet(each) for each in process_sets or ()]


def create_session(settings: Mapping[str, Any], process_sets: ProcessSets, generation: int) -> EngineSession:
    """Find this process's place, check the arguments of `init`, and create a session that has not started.

    A failure is told to the other ranks, which wait.
    """
    environ: Mapping[str, str] = {}
    world: World | None = None
    try:
        environ, given, chosen = read_settings(settings)
        world = _detect_world(environ, chosen)
        logs.configure(chosen.log_level, world.rank)
        sets = make_process_sets(process_sets)
        check_sets(sets, world.size)
        return EngineSession(world, given, generation, environ, sets)
    except Exception as error:
        if world is None and not isinstance(error, RendezvousError):  # Else the ranks have met, and know of it.
            with contextlib.suppress(EngineError):
                world = _detect_world(environ or config.environment(), config.Config())
        if world is not None:
            tell_failure(world, generation, error)
        raise


def _detect_world(environ: Mapping[str, str], chosen: config.Config) -> World:
    """Find this process's place in its job. Collective if ranks agree over MPI."""
    return detect(
        environ, partial(mpi_bootstrap.agree_over_mpi, seconds=chosen.start_timeout, interface=chosen.interface)
    )
