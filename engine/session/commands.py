"""Controls of a running engine: knobs, counters, the timeline and `abort`."""

from __future__ import annotations

import os
from typing import Any, Never

from ..config import config
from ..errors import EngineError
from . import runtime


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
    """Change knobs while running. On rank 0 only; every rank applies the change at the same schedule entry.

    This ends a search of the tuner: the program controls the knobs from then on.

    Parameters
    ----------
    fusion_threshold, cycle_time_ms, stores, chunk_bytes, between_hosts, compression, sockets_per_lane : optional
        Settings of `engine.config.Config` that are knobs, with the values that `init` takes, such as 65536 or `"64K"`.
        None leaves a knob unchanged. `compression` changes the results of tensors with
        `Compression.tuned` or `tuned8`.
        `sockets_per_lane` is at most the number of sockets that were opened at the start.

    Returns
    -------
    int
        Version of the knobs on the next entry: `knobs()["version"]` on every rank once it has executed that entry.

    Raises
    ------
    EngineError
        It was called on a rank other than 0.
    ConfigError
        A value is invalid, or a name is not that of a knob.
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
    session = runtime.current_session()
    if session.world.rank != 0:
        raise EngineError(f"set_knobs was called on rank {session.world.rank}; rank 0 decides, call it there")
    checked = config.check_knobs(changes)
    if session.tuning is not None:
        session.tuning.leave_knobs()
    return session.engine.set_knobs(**checked)


def knobs() -> dict[str, Any]:
    """Return the knobs that were stamped on the last schedule entry that this rank has executed."""
    return runtime.current_engine().knobs()


def counters() -> dict[str, int]:
    """Return counts since `init`: entries, tensors, bytes, and nanoseconds `wait_ns` and `busy_ns`."""
    return runtime.current_engine().counters()


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Start to record a timeline. Each rank that calls it writes a file of its own.

    Rank 0 has to be among them, and the first rank of each process set that is to be shown.

    Parameters
    ----------
    file_path : path
        `NAME.json`, for `NAME.rankN.json`; or a directory, for `rank.N.trace.json` in it. Missing directories are
        created, existing files are overwritten.
    mark_cycles : bool
        Whether to mark when each batch closes.

    Raises
    ------
    TypeError
        `file_path` is not a path.
    ValueError
        `file_path` is empty.
    EngineError
        A timeline is being recorded already.
    OSError
        The file cannot be created.
    """
    session = runtime.current_session()
    with runtime.owner.hold_alone("start_timeline"):
        if session.timeline is not None:
            path = session.timeline.path
            raise EngineError(f"a timeline is being recorded to {path}; call engine.stop_timeline() first")
        session.start_timeline(session.make_timeline(file_path, mark_cycles))


def stop_timeline() -> None:
    """Stop this rank's timeline and complete its file, as `shutdown` does. Does nothing if none is being recorded."""
    session = runtime.current_session()
    with runtime.owner.hold_alone("stop_timeline"):
        session.stop_timeline()


def abort(reason: str) -> None:
    """End the world: calls on every rank raise an error that names this rank and `reason`."""
    runtime.current_engine().abort(reason)
