"""GPU of this rank, which all ranks open together for its first tensor, and which is closed with the engine.

`engine.gpu` is not imported before that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ..config.config import Config
from ..errors import DeviceError, WorldError
from ..host.patience import Patience
from ..text import readable
from ..text.logs import logger

if TYPE_CHECKING:
    from ..native import core
    from .freezing import Frozen, FrozenPass, Reduction
    from .plane import Plane

LEAVING = 2.0  # seconds to wait for other ranks, whose GPUs may still read memory of this one


@dataclass
class _Member:
    """World or process set that this rank is in."""

    number: int
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Lock that is held while the ranks of the set are being connected.

    Threads may connect different sets at the same time. A freeze holds the locks of all sets.
    """
    opening: bool = False
    used: bool = False
    communicator: int = 0
    rooms: threading.Thread | None = None

    @property
    def what(self) -> str:
        """Name of the set in messages."""
        return f"process set {self.number}" if self.number else "the world"


class Device:
    """Opener of this rank's GPU, called by `core.Engine` for a tensor on a GPU whose ranks are not connected yet."""

    def __init__(self, engine: core.Engine, crew: Collection[int], settings: Config) -> None:
        self._engine = engine  # engine of the world
        self._crew = crew  # ranks of this host
        self._settings = settings
        self._plane: Plane | None = None
        self._halves: list[Plane] = []
        self._closed = False
        self._members: dict[core.Engine, _Member] = {}
        self.register_engine(engine, 0)

    def register_engine(self, engine: core.Engine, number: int) -> None:
        """Register as the opener of an engine: that of the world, or of the process set with this number."""
        member = self._members[engine] = _Member(number)
        engine.opener = partial(self._open, engine, member)

    def keep_half(self, half: Plane) -> None:
        """Keep a GPU that is only partly opened until the other ranks have left."""
        self._halves.append(half)

    def _open(self, engine: core.Engine, member: _Member, ordinal: int) -> None:
        """Open the GPU with this number, and connect the ranks of an engine; refuse it if another GPU is open.

        Collective among these ranks, if they are not connected; and over the world, if its GPUs are not open.

        Raises the errors of `Plane.open` and `Plane.join`, and UnsupportedTensorError if the rank already uses another
        GPU.
        """
        with self._members[self._engine].lock:
            pass  # A thread that freezes holds it, and waits for threads that connect the ranks of a set.
        with member.lock:
            if member.opening:  # This thread is opening it, so this call comes from a signal handler.
                raise DeviceError(
                    "the GPU is being opened, or something is being frozen, by the code that this one has interrupted"
                )
            if self._closed:
                raise DeviceError("the engine has been shut down")
            if not member.used:  # Also after an interrupt right after the opening.
                member.opening = True
                try:
                    plane = self._connect(engine, member, ordinal)
                finally:
                    member.opening = False
                if member.rooms is None:
                    # In a thread of its own, since the framework's allocator may wait for the GPU.
                    rooms = threading.Thread(target=engine.serve_allocations, name="engine-rooms", daemon=True)
                    rooms.start()
                    member.rooms = rooms
                engine.use(plane.cuda_thread)
                member.used = True
            assert self._plane is not None
            self._plane.check_device(ordinal)

    def freeze(self, ordinal: int, tensors: list[Frozen], reduction: Reduction) -> FrozenPass:
        """Make a frozen pass of the world. Collective. Errors are those of `FrozenPass` and of `_open`.

        No collective may be under way then. Submissions of other threads wait until all ranks have frozen the pass.
        """
        from .freezing import FrozenPass

        self._open(self._engine, self._members[self._engine], ordinal)
        assert self._plane is not None
        return FrozenPass(self._engine, self._plane, tensors, reduction, self._settings, self._hold_threads)

    def check_device(self, ordinal: int) -> None:
        """Raise UnsupportedTensorError for tensors of another GPU than the open one."""
        if self._plane is not None:
            self._plane.check_device(ordinal)

    @contextmanager
    def _hold_threads(self) -> Iterator[Callable[[], list[str]]]:
        """Make other threads that submit tensors on GPUs wait.

        Yields a function that returns descriptions of the work that is still under way.
        """
        held: dict[core.Engine, _Member] = {}

        def under_way() -> list[str]:
            for engine, member in list(self._members.items()):
                if engine not in held and not member.opening and member.lock.acquire(blocking=False):
                    held[engine] = member
                    member.opening = True
                    engine.hold(True)
            others = [
                f"the connecting of {each.what}" for engine, each in list(self._members.items()) if engine not in held
            ]
            return others + self._under_way()

        try:
            yield under_way
        finally:
            for engine, member in held.items():
                engine.hold(False)
                member.opening = False
                member.lock.release()

    def _under_way(self) -> list[str]:
        """Return the names of this rank's unfinished collectives, in the world and in process sets."""
        return [
            repr(each["name"]) + (f" of {member.what}" if member.number else "")
            for engine, member in list(self._members.items())
            for each in engine.pending()
        ]

    def _connect(self, engine: core.Engine, member: _Member, ordinal: int) -> Plane:
        """Connect the ranks of an engine on the GPU plane, which is opened if necessary, and return the plane."""
        from .plane import Plane

        if engine is self._engine:
            if self._plane is None:
                self._plane = Plane.open(engine, ordinal, self._settings, self.keep_half)
                if engine.rank == 0 and engine.size > 1:
                    logger.warning(
                        "tensors on GPUs are reduced by NCCL; this has been tried on one GPU, with two ranks that "
                        "shared it, and never yet on several: compare the first results with those of tensors in the "
                        "host's memory"
                    )
            return self._plane
        if self._plane is None or not self._members[self._engine].used:
            self._open(self._engine, self._members[self._engine], ordinal)
        assert self._plane is not None
        if not member.communicator:
            member.communicator = self._plane.join(engine, member.number, ordinal, self._settings)
        return self._plane

    def release(self, engine: core.Engine) -> None:
        """Release the GPU resources of a removed process set, whose ranks have closed its engines. Collective in it."""
        member = self._members.pop(engine)
        self._end_rooms(engine, member)
        if member.communicator and self._plane is not None:
            self._plane.end_communicator(engine, member.communicator)
        engine.free_deferred()

    def wait_for_dependents(self, seconds: float) -> None:
        """Wait, at most so many seconds, for the ranks that may still need this one for their GPU collectives.

        Rank 0 stays since it assigns process sets their turns on GPUs. The other ranks of its host stay since they
        relay messages of other hosts' ranks. The leader of another host stays since it relays for its own ranks.
        """
        rank, patience = self._engine.rank, Patience(seconds)
        if self._plane is None or (0 not in self._crew and rank != min(self._crew)):
            return
        mine = {0} if rank == 0 else set(self._crew)
        if 0 not in self._crew:  # No rank that this one waits for may wait for this one.
            mine = {each["rank"] for each in self._engine.ranks()} - set(self._crew) | {rank}
        while self._engine.failure is None:
            there = [each["rank"] for each in self._engine.ranks() if not each["left"] and each["rank"] not in mine]
            if not there:
                return
            if not patience.seconds_left():
                logger.warning(
                    "rank %d leaves, though %s may still want turns on GPUs for process sets: "
                    "end all ranks behind a barrier",
                    rank,
                    readable.format_ranks(there),
                )
                return
            time.sleep(0.005)

    def close(self) -> None:
        """Close the GPU, after the engines are closed and nothing runs on the device any more.

        Kernels of other ranks on this host may still read the memory that NCCL frees. So this waits up to `LEAVING`
        seconds for them; a rank is marked as left once its device is idle.
        """
        self._closed = True
        for engine, member in self._members.items():
            with member.lock:
                self._end_rooms(engine, member)
        planes = [*self._halves, *([self._plane] if self._plane is not None else [])]
        if not planes:
            return
        patience = Patience(LEAVING)
        while patience.seconds_left() and not self._all_have_left():
            time.sleep(0.005)
        for plane in planes:
            plane.close()
        for engine in self._members:
            engine.free_deferred()

    @staticmethod
    def _end_rooms(engine: core.Engine, member: _Member) -> None:
        engine.opener = None
        if member.rooms is not None:
            engine.stop_allocations()
            member.rooms.join(LEAVING)

    def _all_have_left(self) -> bool:
        failure = self._engine.failure
        culprit = failure.rank if isinstance(failure, WorldError) else None  # a rank that may never leave
        ranks = [each for each in self._engine.ranks() if each["rank"] in self._crew]
        return all(each["left"] or each["rank"] == culprit for each in ranks)
