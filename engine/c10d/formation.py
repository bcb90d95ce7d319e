"""Formation of a group when torch asks for one, and of a smaller one of the ranks that are left of it.

The default group is the session's engine, which `engine.init()` may have started before: so collectives of both
interfaces share a world, its metrics and its failures. Each further group is a set that its members form by themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore

from ..config import config
from ..config.world import World
from ..errors import EngineError, RendezvousError
from ..host.patience import LONGEST
from ..session import runtime
from ..session.pending import GATE
from ..text import readable
from .meeting import StoreMeeting, SurvivorMeeting, find_world, parse_number
from .membership import Membership, end_groups_of
from .tracing import hide_from_dynamo
from .work import translate_error


def form_membership(options: Any) -> Membership:
    """Form the group that torch's options describe. Collective over its ranks, of which torch calls only these.

    Raises DistBackendError if the ranks cannot meet, or the group cannot be formed; the cause is the engine's error.
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


def shrink_membership(parent: Membership, excluded: Sequence[int], abort: bool, timeout: timedelta) -> Membership:
    """Form a group of the ranks of another that are not excluded, by their numbers in it. Collective over these.

    The default group is left for a world of its own, which may follow on one that has failed. Another group needs a
    world that has not failed.

    `abort` ends operations in flight in the group at once, with an error. `timeout` limits the wait for the other
    ranks. Raises DistBackendError like `form_membership`.
    """
    left = [place for place in range(parent.engine.size) if place not in excluded]
    with _translated_errors():
        if parent.engine.world is None:
            return _shrink_world(parent, left, abort, timeout)
        return _shrink_set(parent, left, abort, timeout)


def _shrink_set(parent: Membership, left: list[int], abort: bool, timeout: timedelta) -> Membership:
    """Form a set of the ranks of a set that are left."""
    session = runtime.current_session()
    if session.engine.failure is not None:
        raise EngineError(
            f"the group {parent.title!r} cannot shrink, because its world has failed ({session.engine.failure}): "
            "shrink the default group, by shrink_group(ranks_to_exclude) without a group, and make other groups anew"
        )
    ranks = [parent.engine.numbers[place] for place in left]
    if ranks != [rank for rank in parent.engine.numbers if rank in left]:
        raise EngineError(
            f"shrink_group cannot exclude numbers of the group {parent.title!r}, whose ranks are "
            f"{list(parent.engine.numbers)}: torch takes them for ranks of the world afterwards. Use "
            f"new_group({ranks}, sort_ranks=False, use_local_synchronization=True)"
        )
    if abort:
        session.sets.leave_set(parent.engine, 0.0)
    store = PrefixStore(f"shrunk {'-'.join(map(str, left))}/", parent.store)
    formed = _form_set(store, left.index(parent.engine.rank), len(left), ranks, f"{parent.name}:shrunk", timeout)
    formed.rename_group(description=parent.description)
    return formed


def _shrink_world(parent: Membership, left: list[int], abort: bool, timeout: timedelta) -> Membership:
    """Leave the world for one of the ranks that are left, which keeps settings, counters and optimizers."""
    session = runtime.current_session()
    store = PrefixStore("shrunk/", parent.store)
    try:
        meeting = SurvivorMeeting(store, parent.engine.rank, left, timeout.total_seconds())
        numbers = [parse_number(text) for text in meeting.exchange_texts(str(session.generation).encode())]
        world = find_world(meeting, session.settings.interface)
    except EngineError:
        raise
    except RuntimeError as error:  # torch's, of its store
        raise RendezvousError(
            f"the group cannot shrink, because torch's store does not answer ({error}): it has ended with the process "
            "that serves it, which is rank 0's unless a launcher such as torchrun serves it. Start the job again"
        ) from error
    _follow_world(parent, replace(world, **_describe_succession(session.world, left, max(numbers))), abort)
    formed = StoreMeeting(store, meeting.rank, meeting.size, timeout.total_seconds(), key=f"{meeting.key} met")
    return Membership(
        runtime.current_engine(), formed, store, f"{parent.name}:shrunk", parent.timeout, parent.owns_session
    )


def _describe_succession(former: World, left: list[int], number: int) -> dict[str, Any]:
    """Return what files and reports say of a world that follows on `former`, of which some ranks are left."""
    gone = [rank for rank in range(former.size) if rank not in left]
    return {
        "host_name": former.host_name,
        "number": number + 1,
        "workers": tuple(former.workers[rank] if former.workers else rank for rank in left),
        "reason": f"shrink_group excluded {readable.format_ranks(gone)} of world {number}",
    }


def _follow_world(parent: Membership, world: World, abort: bool) -> None:
    """End the world of a group and enter another; this process is in none if that fails."""
    if abort:
        for each in (*runtime.current_session().sets.engines.values(), parent.engine):
            each.close(0.0)
    try:
        runtime.enter_world(world)
    except BaseException:
        runtime.shutdown()
        raise
    finally:
        end_groups_of(parent.engine, "the default group shrank")


@contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except EngineError as error:
        raise translate_error(error) from error


def _form_set(store: Any, rank: int, size: int, ranks: list[int], name: str, timeout: timedelta) -> Membership:
    seconds = timeout.total_seconds()
    if not ranks:
        meeting = StoreMeeting(store, rank, size, seconds)
        owner = _join_world(meeting, rank, size, seconds)
        return Membership(runtime.current_engine(), meeting, store, name, timeout, owner)
    session = runtime.current_session()
    sets = session.sets
    meeting = StoreMeeting(store, rank, size, seconds, world=session.world.key)
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
