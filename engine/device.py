"""The GPU of this rank: opened when its first tensor comes, together with all ranks, and closed with the engine.

Nothing of `engine.gpu` is imported before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from . import readable
from .config import Config
from .errors import DeviceError, WorldError
from .host.patience import Patience
from .logs import logger

if TYPE_CHECKING:
    from .gpu.freezing import Frozen, FrozenPass, Reduction
    from .gpu.plane import Plane
    from .native import core

LEAVING = 2.0  # seconds for which the other ranks are waited for, whose GPUs may still read from this one's


@dataclass
class _Member:
    """The world, or a process set that this rank is in."""

    number: int
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Held while its ranks are connected. Those of different sets may be at the same time, by different threads; but
    not while something is frozen, which holds all of them."""
    opening: bool = False
    used: bool = False
    communicator: int = 0
    rooms: threading.Thread | None = None

    @property
    def what(self) -> str:
        """For messages."""
        return f"process set {self.number}" if self.number else "the world"


class Device:
    """What `core.Engine` calls when it is given a tensor of a GPU on which its ranks are not connected.

    Parameters
    ----------
    engine : core.Engine
        Of the world.
    crew : collection of int
        The ranks of this host.
    settings : Config
    """

    def __init__(self, engine: core.Engine, crew: Collection[int], settings: Config) -> None:
        self._engine = engine
        self._crew = crew
        self._settings = settings
        self._plane: Plane | None = None
        self._halves: list[Plane] = []
        self._closed = False
        self._members: dict[core.Engine, _Member] = {}
        self.admit(engine, 0)

    def admit(self, engine: core.Engine, number: int) -> None:
        """Be called by an engine: of the world, or of the process set that has this number on all ranks."""
        member = self._members[engine] = _Member(number)
        engine.opener = partial(self._open, engine, member)

    def keep(self, half: Plane) -> None:
        """Take a GPU that is half open, until the other ranks have left."""
        self._halves.append(half)

    def _open(self, engine: core.Engine, member: _Member, ordinal: int) -> None:
        """Open the GPU with this number, and connect the ranks of an engine; or refuse it if another is open.

        Collective among these ranks, if they are not connected; and among those of the world, if its GPUs are not open.

        Raises
        ------
        DeviceError, WorldError, ForkedError
            As `Plane.open` and `Plane.join`.
        UnsupportedTensorError
            The rank works on another GPU.
        """
        with self._members[self._engine].lock:
            pass  # Whoever freezes has it, and waits for those who connect the ranks of a set.
        with member.lock:
            if member.opening:  # by this thread: this is a signal handler
                raise DeviceError(
                    "the GPU is being opened, or something is being frozen, by the code that this one has interrupted"
                )
            if self._closed:
                raise DeviceError("the engine has been shut down")
            if not member.used:  # Nor is it after an interrupt right behind the opening.
                member.opening = True
                try:
                    plane = self._connect(engine, member, ordinal)
                finally:
                    member.opening = False
                if member.rooms is None:
                    # A thread of its own, as it waits for the framework's allocator, and that, at times, for the GPU.
                    rooms = threading.Thread(target=engine.make_rooms, name="engine-rooms", daemon=True)
                    rooms.start()
                    member.rooms = rooms
                engine.use(plane.lane)
                member.used = True
            assert self._plane is not None
            self._plane.expect(ordinal)

    def freeze(self, ordinal: int, tensors: list[Frozen], reduction: Reduction) -> FrozenPass:
        """Make a frozen pass of the world. Collective. Errors as of `FrozenPass`, and of `_open`.

        It has no turn among what the ranks have under way, which may be nothing then. What other threads submit
        meanwhile waits until all ranks have frozen it.
        """
        from .gpu.freezing import FrozenPass

        self._open(self._engine, self._members[self._engine], ordinal)
        assert self._plane is not None
        return FrozenPass(self._engine, self._plane, tensors, reduction, self._settings, self._hold)

    def expect(self, ordinal: int) -> None:
        """Refuse tensors of another GPU than that which is open.

        Raises
        ------
        UnsupportedTensorError
        """
        if self._plane is not None:
            self._plane.expect(ordinal)

    @contextmanager
    def _hold(self) -> Iterator[Callable[[], list[str]]]:
        """Let other threads that submit tensors on GPUs wait. Gives what says which of it is under way all the same."""
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
        """Collectives of this rank that have not ended, in the world and in process sets."""
        return [
            repr(each["name"]) + (f" of {member.what}" if member.number else "")
            for engine, member in list(self._members.items())
            for each in engine.pending()
        ]

    def _connect(self, engine: core.Engine, member: _Member, ordinal: int) -> Plane:
        """The plane, on which the ranks of an engine are connected then."""
        from .gpu.plane import Plane

        if engine is self._engine:
            if self._plane is None:
                self._plane = Plane.open(engine, ordinal, self._settings, self.keep)
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
        """A process set is removed: all its ranks have closed their engines in it. Collective among them."""
        member = self._members.pop(engine)
        self._end_rooms(engine, member)
        if member.communicator and self._plane is not None:
            self._plane.part(engine, member.communicator)
        engine.bury()

    def stay(self, seconds: float) -> None:
        """Rank 0 gives process sets their turns on GPUs: it goes when nobody may need one any more, or time is over.

        So do those of its host, which carry what other hosts' ranks ask for and their farewells; and the leader of
        another host, which carries those of its own ranks.
        """
        rank, patience = self._engine.rank, Patience(seconds)
        if self._plane is None or (0 not in self._crew and rank != min(self._crew)):
            return
        mine = {0} if rank == 0 else set(self._crew)
        if 0 not in self._crew:  # who waits for it waits for none that waits for this one
            mine = {each["rank"] for each in self._engine.ranks()} - set(self._crew) | {rank}
        while self._engine.failure is None:
            there = [each["rank"] for each in self._engine.ranks() if not each["left"] and each["rank"] not in mine]
            if not there:
                return
            if not patience.left():
                logger.warning(
                    "rank %d leaves, though %s may still want turns on GPUs for process sets: "
                    "end all ranks behind a barrier",
                    rank,
                    readable.ranks(there),
                )
                return
            time.sleep(0.005)

    def close(self) -> None:
        """Let go of the GPU. The engines are closed, and nothing runs on the device any more.

        What NCCL frees may be what kernels of other ranks of this host still read. A rank says that it has left when
        its device has come to rest.
        """
        self._closed = True
        for engine, member in self._members.items():
            with member.lock:
                self._end_rooms(engine, member)
        planes = [*self._halves, *([self._plane] if self._plane is not None else [])]
        if not planes:
            return
        patience = Patience(LEAVING)
        while patience.left() and not self._all_have_left():
            time.sleep(0.005)
        for plane in planes:
            plane.close()
        for engine in self._members:
            engine.bury()

    @staticmethod
    def _end_rooms(engine: core.Engine, member: _Member) -> None:
        engine.opener = None
        if member.rooms is not None:
            engine.close_rooms()
            member.rooms.join(LEAVING)

    def _all_have_left(self) -> bool:
        failure = self._engine.failure
        culprit = failure.rank if isinstance(failure, WorldError) else None  # who may never leave
        ranks = [each for each in self._engine.ranks() if each["rank"] in self._crew]
        return all(each["left"] or each["rank"] == culprit for each in ranks)
