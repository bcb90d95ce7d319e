"""What can be changed, asked and recorded while the engine runs: knobs, counters, the timeline; and its abort."""

from __future__ import annotations

import os
from typing import Any, Never

from . import config, runtime
from .errors import EngineError
from .trace.timeline import Timeline


def set_knobs(
    *,
    fusion_threshold: int | str | None = None,
    cycle_time_ms: float | str | None = None,
    stores: str | None = None,
    chunk_bytes: int | str | None = None,
    between_hosts: str | None = None,
    compression: str | None = None,
    sockets_per_lane: int | str | None = None,
    **unknown: Never,
) -> int:
    """Change knobs while running. On rank 0 only: every rank sees the change at the same schedule entry.

    A search of the tuner ends by it: the knobs are the program's then.

    Parameters
    ----------
    fusion_threshold, cycle_time_ms, stores, chunk_bytes, between_hosts, compression, sockets_per_lane : optional
        Those settings of `engine.config.Config` that are knobs, with values as of `init`, such as 65536 or `"64K"`;
        None leaves a knob as it is. `compression` changes the results of tensors with `Compression.tuned`. Of
        `sockets_per_lane` no more can be used than were opened at the start.

    Returns
    -------
    int
        The version that the next entry carries; `knobs()["version"]` on every rank once it has executed that entry.

    Raises
    ------
    EngineError
        On another rank than 0.
    ConfigError
        A value that cannot be, or what is no knob.
    """
    changes = {
        "fusion_threshold": fusion_threshold,
        "cycle_time_ms": cycle_time_ms,
        "stores": stores,
        "chunk_bytes": chunk_bytes,
        "between_hosts": between_hosts,
        "compression": compression,
        "sockets_per_lane": sockets_per_lane,
        **unknown,
    }
    running = runtime.current()
    if running.world.rank != 0:
        raise EngineError(f"set_knobs was called on rank {running.world.rank}; rank 0 decides, call it there")
    checked = config.check_knobs(changes)
    if running.tuning is not None:
        running.tuning.leave_knobs()
    return running.engine.set_knobs(**checked)


def knobs() -> dict[str, Any]:
    """The knobs as stamped on the last schedule entry that this rank executed."""
    return runtime.engine().knobs()


def counters() -> dict[str, int]:
    """Counts since `init`: entries, tensors, bytes, and nanoseconds `wait_ns` and `busy_ns`."""
    return runtime.engine().counters()


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record a timeline from now on. Each rank that calls it writes a file of its own; rank 0 has to be among them, and
    the first rank of each process set that is to be shown.

    Parameters
    ----------
    file_path : path
        `NAME.json`, for `NAME.rankN.json`; or a directory, for `rank.N.trace.json` in it. Directories are made, files
        that exist are overwritten.
    mark_cycles : bool
        Mark when each batch closes.

    Raises
    ------
    TypeError
        What is no path.
    ValueError
        An empty path.
    EngineError
        A timeline is being recorded already.
    OSError
        The file cannot be made.
    """
    running = runtime.current()
    with runtime.alone("start_timeline"):
        if running.timeline is not None:
            path = running.timeline.path
            raise EngineError(f"a timeline is being recorded to {path}; call engine.stop_timeline() first")
        world, limit = running.world, running.settings.timeline_limit
        told = world.text(running.generation)
        timeline = Timeline(file_path, world.rank, world.size, limit, mark_cycles, world.number, world.elastic)
        timeline.start(running.engine, running.sets, len(running.layout.crews), told)
        running.timeline = timeline


def stop_timeline() -> None:
    """End this rank's timeline and complete its file, as `shutdown` does. Does nothing if none is being recorded."""
    running = runtime.current()
    with runtime.alone("stop_timeline"):
        timeline, running.timeline = running.timeline, None
        if timeline is not None:
            timeline.stop()


def abort(reason: str) -> None:
    """End the world: every rank's calls raise an error that names this rank and `reason`."""
    runtime.engine().abort(reason)
