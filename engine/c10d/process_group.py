"""Process group of torch.distributed over the engine, in place of torch's own `ProcessGroup`.

The default group is the session's engine, which `engine.init()` may have started before: so collectives of both
interfaces share a world, its metrics and its failures. Each further group is a set that its members form by themselves.
"""

from __future__ import annotations

import os
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..config import config
from ..errors import EngineError, NotInitializedError
from ..host.patience import LONGEST
from ..native import core
from ..session import runtime
from ..session.pending import GATE
from . import NAME
from .meeting import StoreMeeting, find_world
from .operations import GroupOperations
from .point_to_point import Messenger
from .tracing import hide_from_dynamo
from .work import EngineWork, translate_error

_CPU = torch.device("cpu")
_TorchGroup: Any = dist.ProcessGroup  # torch's declarations of its methods are not those that it calls


class EngineProcessGroup(GroupOperations, _TorchGroup):
    """Process group whose collectives run on the engine.

    Parameters
    ----------
    engine : core.Engine
        Engine of the group's ranks.
    meeting : StoreMeeting
        Store of the group.
    name : str
        Torch's name of the group.
    timeout : timedelta
        Longest time for an operation.
    owner : bool
        Whether the session was started for this group, and ends with it.
    """

    def __init__(
        self, engine: core.Engine, meeting: StoreMeeting, store: Any, name: str, timeout: timedelta, owner: bool
    ) -> None:
        _TorchGroup.__init__(self, engine.rank, engine.size)
        self.engine = engine
        self._store = store
        self._group_name = name
        self._description = "undefined"
        self._timeout = timeout
        self._owner = owner
        self._closed = False
        self._works: weakref.WeakSet[EngineWork] = weakref.WeakSet()
        self._messenger = Messenger(engine, meeting)

    # ---- what torch asks of a group

    def rank(self) -> int:
        return self.engine.rank

    def size(self) -> int:
        return self.engine.size

    def name(self) -> str:
        return NAME

    getBackendName = name

    @property
    def group_name(self) -> str:
        return self._group_name

    pg_name = group_name

    @property
    def group_desc(self) -> str:
        return self._description

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    _set_group_name = setGroupName

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    _set_group_desc = setGroupDesc

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    @property
    def supports_coalescing(self) -> bool:
        return False

    def _get_backend(self, device: torch.device) -> EngineProcessGroup:
        return self

    def _get_backend_name(self) -> str:
        return NAME

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    set_timeout = _set_default_timeout

    def get_group_store(self) -> Any:
        return self._store

    def __repr__(self) -> str:
        return f"<EngineProcessGroup {self._group_name!r} of ranks {list(self.engine.numbers)}>"

    # ---- point to point

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> EngineWork:
        return self._messenger.send(tensors[0], rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> EngineWork:
        return self._messenger.receive(tensors[0], rank, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> EngineWork:
        return self._messenger.receive_from_any(tensors[0], tag)

    recvAnysource = recv_anysource

    # ---- the end

    def keep_work(self, work: EngineWork) -> None:
        self._works.add(work)

    def shutdown(self) -> None:
        """Leave the group; operations in flight have the session's `shutdown_timeout`. Called by torch."""
        if self._closed:
            return
        self._closed = True
        try:
            session = runtime.current_session()
        except NotInitializedError:  # `engine.shutdown()` came before, and ended all groups.
            session = None
        if session is not None:
            self._messenger.close()
            if self.engine is not session.engine:
                session.sets.leave_set(self.engine)
            elif self._owner:
                runtime.shutdown()
        gone = translate_error(NotInitializedError(f"the process group {self._group_name!r} was destroyed"))
        for work in list(self._works):
            work.settle_work(gone)

    def abort(self) -> None:
        """Fail the world of this group, so that no rank waits in it."""
        self.engine.abort(f"the process group {self._group_name!r} was aborted (torch.distributed)")
        self.shutdown()


def form_group(options: Any) -> EngineProcessGroup:
    """Create a process group. Collective over its ranks, of which torch calls only these.

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
    try:
        return _form_group(options)
    except EngineError as error:
        raise translate_error(error) from error


def _form_group(options: Any) -> EngineProcessGroup:
    rank, size, seconds = options.group_rank, options.group_size, options.timeout.total_seconds()
    ranks = tuple(options.global_ranks_in_group)
    meeting = StoreMeeting(options.store, rank, size, seconds)
    if not ranks:  # the default group
        owner = _join_world(meeting, rank, size, seconds)
        engine = runtime.current_engine()
    else:
        owner, sets = False, runtime.current_session().sets
        name = f"torch {options.group_id} {meeting.key}"
        engine = sets.form_among(ranks, name, meeting.exchange_texts, **_read_limit(seconds))
    return EngineProcessGroup(engine, meeting, options.store, options.group_id, options.timeout, owner)


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
