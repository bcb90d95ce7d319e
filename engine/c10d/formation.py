"""Formation of a group when torch asks for one.

The default group is the session's engine, which `engine.init()` may have started before: so collectives of both
interfaces share a world, its metrics and its failures. Each further group is a set that its members form by themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from ..config import config
from ..errors import EngineError
from ..host.patience import LONGEST
from ..session import runtime
from ..session.pending import GATE
from .meeting import StoreMeeting, find_world
from .membership import Membership
from .tracing import hide_from_dynamo
from .work import translate_error


def form_membership(options: Any) -> Membership:
    """Form the group that torch's options describe. Collective over its ranks, of which torch calls only these.

    Parameters
    ----------
    options : torch's _DistributedBackendOptions
        Ranks, store, name and time-out of the group.

    Raises
    ------
    DistBackendError
        The ranks cannot meet, or the group cannot be formed; the cause is the engine's error.
    """
    hide_from_dynamo()
    ranks = list(options.global_ranks_in_group)  # none: the default group
    with _translated_errors():
        return _form_set(
            options.store, options.group_rank, options.group_size, ranks, options.group_id, options.timeout
        )


def split_membership(parent: Membership, places: list[int], store: Any, name: str, timeout: timedelta) -> Membership:
    """Form a group of some of the ranks of another, by their numbers in it. Collective over these."""
    ranks = [parent.engine.numbers[place] for place in places]
    with _translated_errors():
        return _form_set(store, places.index(parent.engine.rank), len(places), ranks, name, timeout)


@contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except EngineError as error:
        raise translate_error(error) from error


def _form_set(store: Any, rank: int, size: int, ranks: list[int], name: str, timeout: timedelta) -> Membership:
    seconds = timeout.total_seconds()
    meeting = StoreMeeting(store, rank, size, seconds)
    if not ranks:
        owner = _join_world(meeting, rank, size, seconds)
        return Membership(runtime.current_engine(), meeting, store, name, timeout, owner)
    sets = runtime.current_session().sets
    formed = f"torch {name} {meeting.key}"
    engine = sets.form_among(tuple(ranks), formed, meeting.exchange_texts, **_read_limit(seconds))
    return Membership(engine, meeting, store, name, timeout, owner=False)


def _join_world(meeting: StoreMeeting, rank: int, size: int, seconds: float) -> bool:
    """Start the engine, unless it runs; return whether it was started. Collective."""
    if GATE in os.environ:
        raise EngineError(
            "torch.distributed cannot use the engine in an elastic job of enginerun, whose ranks change: start the job "
            "without --min-np, --max-np and --host-discovery-script, or with torchrun"
        )
    if runtime.is_initialized():
        engine = runtime.current_engine()
        if (engine.rank, engine.size) != (rank, size):
            raise EngineError(
                f"init_process_group says rank {rank} of {size}, and engine.init() has made this process rank "
                f"{engine.rank} of {engine.size}: give both the same"
            )
        return False
    environ = config.read_environment()
    settings = config.read_given(environ, {})
    limit = _read_limit(seconds)
    if environ.get("ENGINE_SIZE") == str(size) and environ.get("ENGINE_RANK") == str(rank):
        runtime.init(**limit)
    else:
        runtime.init_in(find_world(meeting, settings.get("interface")), **limit)
    return True


def _read_limit(seconds: float) -> dict[str, Any]:
    """Return the setting that a time-out of torch stands for; none if the environment has it."""
    given = config.read_given(config.read_environment(), {})
    return {} if "stall_limit" in given else {"stall_limit": min(seconds, LONGEST)}
