"""This rank's part in one group: what both of torch's shapes, a `ProcessGroup` and a `Backend`, have in common."""

from __future__ import annotations

import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch

from ..errors import EngineError, NotInitializedError
from ..native import core
from ..session import runtime
from . import NAME
from .meeting import StoreMeeting
from .operations import GroupOperations, Submission
from .point_to_point import Messenger
from .profiling import start_profiled
from .work import EngineWork, translate_error

UNDESCRIBED = "undefined"  # torch's description of groups that were given none
NAME_SHOWN, HASH_SHOWN = 16, 8  # characters
T = TypeVar("T")


class LiveObjects(Generic[T]):
    """Objects that others keep alive, in the order in which they were added.

    There is no lock: each step is one of the interpreter's own, so threads and signal handlers may come in between.
    """

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[T]] = {}

    def add(self, item: T) -> None:
        key, references = id(item), self._references
        references[key] = weakref.ref(item, lambda gone: references.pop(key, None))

    def list_items(self) -> list[T]:
        """Return the objects that are alive."""
        return [item for each in list(self._references.values()) if (item := each()) is not None]


_live: LiveObjects[Membership] = LiveObjects()


class Membership:
    """This rank's part in a group, from its formation to its end."""

    def __init__(
        self, engine: core.Engine, meeting: StoreMeeting, store: Any, name: str, timeout: timedelta, owner: bool
    ) -> None:
        self.engine = engine
        self.meeting = meeting
        self.store = store
        self.name = name  # torch's name of the group
        self.description = UNDESCRIBED
        self.timeout = timeout  # longest time for an operation
        self._works: LiveObjects[EngineWork] = LiveObjects()
        self.messenger = Messenger(engine, meeting, timeout.total_seconds())
        self.owns_session = owner  # whether the session was started for this group, and ends with it
        self._over = False
        self.ending = ""
        _live.add(self)
        self._name_engine()

    def add_work(self, work: EngineWork) -> None:
        """Note the work of a collective, which somebody else keeps until it is over."""
        self._works.add(work)

    def list_works(self) -> list[EngineWork]:
        """Return the works of collectives that are not concluded."""
        return [work for work in self._works.list_items() if not work.over]

    def rename_group(self, name: str | None = None, description: str | None = None) -> None:
        """Change torch's name or description of the group, which torch tells once the group is formed."""
        self.name = self.name if name is None else name
        self.description = self.description if description is None else description
        self._name_engine()

    @property
    def title(self) -> str:
        """Torch's description and name, as reports show them."""
        return format_name(self.name, self.description)

    def _name_engine(self) -> None:
        """Have reports and timelines call the group as torch does. The default group is the world and has no name."""
        if self.engine.world is not None and not self._over:
            with suppress(NotInitializedError):
                runtime.current_session().record_group(self.engine, self.title)

    def end_with_world(self, reason: str) -> None:
        """End a group whose world is over. Later calls raise an error that tells the reason."""
        self.ending = reason
        self.leave_group()

    def make_ending_error(self) -> BaseException:
        """Return the error of operations in a group that has ended."""
        why = f" when {self.ending}: make it anew" if self.ending else ""
        return translate_error(NotInitializedError(f"the group {self.title!r} was destroyed{why}"))

    def leave_group(self) -> None:
        """Leave the group; operations in flight have the session's `shutdown_timeout`. The second time does nothing."""
        if self._over:
            return
        self._over = True
        try:
            session = runtime.current_session()
        except NotInitializedError:  # `engine.shutdown()` came before, and ended all groups.
            session = None
        if session is not None:
            self.messenger.close()
            if self.engine is not session.engine:
                session.sets.leave_set(self.engine)
            elif self.owns_session:
                runtime.shutdown()
        gone = self.make_ending_error()
        for work in self.list_works():
            work.settle_work(gone)


def end_groups_of(world: core.Engine, reason: str) -> None:
    """End this rank's part in all groups of a world that is over."""
    for each in _live.list_items():
        if world in (each.engine, each.engine.world):
            each.end_with_world(reason)


def format_name(name: str, description: str) -> str:
    """Format torch's description and name of a group as `tp (3)`; many groups of a mesh have one description."""
    short = name if len(name) <= NAME_SHOWN else name[:HASH_SHOWN]  # some are hashes
    text = short if description in ("", UNDESCRIBED) else f"{description} ({short})"
    return "".join(letter if letter.isprintable() else "?" for letter in text)


class MemberOperations(GroupOperations):
    """Operations and questions that torch asks of a group in either shape."""

    def __init__(self, membership: Membership) -> None:
        self.engine = membership.engine
        self.membership = membership

    def rank(self) -> int:
        return self.engine.rank

    def size(self) -> int:
        return self.engine.size

    def name(self) -> str:
        return NAME

    getBackendName = name
    _get_backend_name = name

    def set_timeout(self, timeout: timedelta) -> None:
        self.membership.timeout = timeout
        self.membership.messenger.limit = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def open_submission(self, kind: str, event: str = "") -> Submission:
        if self.membership.ending:
            raise self.membership.make_ending_error()
        return super().open_submission(kind, event)

    def keep_work(self, work: EngineWork) -> None:
        self.membership.add_work(work)

    def list_works(self) -> list[EngineWork]:
        return self.membership.list_works()

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> EngineWork:
        return start_profiled("send", self.membership.messenger.send, tensors[0], rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> EngineWork:
        return start_profiled("recv", self.membership.messenger.receive, tensors[0], rank, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> EngineWork:
        return self.membership.messenger.receive_from_any(tensors[0], tag)

    recvAnysource = recv_anysource

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; an error names those that have not come within the time-out, a `timedelta` or options."""
        given = getattr(timeout, "timeout", timeout)
        unset = given is None or given < timedelta(0)
        seconds = (self.membership.timeout if unset else given).total_seconds()
        try:
            self.membership.meeting.exchange_texts(b"", seconds)
        except EngineError as error:
            raise translate_error(error) from error

    def shutdown(self) -> None:
        """Leave the group. Called by torch."""
        self.membership.leave_group()

    def abort(self) -> None:
        """Fail the world of this group, so that no rank waits in it."""
        self.engine.abort(f"the group {self.membership.title!r} was aborted (torch.distributed)")
        self.shutdown()
