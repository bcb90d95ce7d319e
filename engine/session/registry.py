"""Process sets of the current world: their engines, and what ranks agree on when a set is added or removed."""

from __future__ import annotations

import itertools
import time
from array import array
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import accumulate, chain
from typing import Any

from ..collectives.process_sets import (
    ProcessSet,
    check_ranks,
    global_process_set,
    next_call_number,
    parse_ranks,
)
from ..errors import EngineError, NotInitializedError, RendezvousError, WorldError
from ..errors.formatting import format_exception, format_whole_exception
from ..gpu.device import Device
from ..host.patience import Patience
from ..native import core
from ..net.rendezvous.set_connections import Connections, Exchange, SetConnector
from ..net.unix_sockets import close_all
from ..text import readable
from .group_exchange import GroupExchange

IDLE = 2.0  # seconds for threads to leave a set that has no operation in flight


class ProcessSetRegistry:
    """Registry of the process sets of one world. Adding and removing a set is collective over the world.

    It lives from the start of the world's engine to its end.
    """

    def __init__(self, world: core.Engine, timeout: float, device: Device, links: SetConnector | None = None) -> None:
        self._world = world
        self._timeout = timeout  # seconds to wait for operations in flight when a set is removed
        self._device = device  # opener of this rank's GPU, with which each set of this rank is registered
        self._links = links  # connector of a set's ranks; None with one host
        self._sets: dict[int, ProcessSet] = {}
        self._next = 1
        self._tries = 0  # of connecting a set's ranks
        self._memberships: Counter[int] = Counter()
        self._groups: dict[int, core.Engine] = {}  # sets that their members alone have formed, counted down from -1
        self._entered = itertools.count(1)
        self._closing = False
        global_process_set._enter(0, world, world.numbers, world)

    @property
    def added(self) -> list[ProcessSet]:
        """Sets that were added, in the order of their addition, without the global one."""
        return list(self._sets.values())

    @property
    def engines(self) -> dict[int, core.Engine]:
        """Engines of the sets that this rank is in, by the set's number.

        Sets that their members alone have formed have negative numbers, which each rank counts by itself.
        """
        sets = {number: each._engine for number, each in list(self._sets.items()) if each._engine is not None}
        return sets | self._groups.copy()

    def get_by_id(self, number: int) -> ProcessSet:
        """Return the set with that `process_set_id`; 0 is the global one."""
        if number == 0:
            return global_process_set
        if number not in self._sets:
            raise NotInitializedError(f"there is no process set with the number {number}; it may have been removed")
        return self._sets[number]

    def get_by_call_number(self, number: int) -> ProcessSet:
        """Return the set with that `call_number`."""
        found = [each for each in (global_process_set, *self._sets.values()) if each.call_number == number]
        if not found:
            raise NotInitializedError(
                f"there is no process set that compiled programs call {number}: it was removed, or engine.shutdown() "
                "has ended it. Compile the program again for one that is there"
            )
        return found[0]

    @property
    def largest_membership(self) -> int:
        """Largest number of engines on one rank, including that of the world.

        It is equal on all ranks but for groups, which their members alone form and know: of these each rank counts its
        own.
        """
        named = sum(bool(each.group_name) for each in list(self._groups.values()))
        return 1 + max(self._memberships.values(), default=0) + named

    def add(self, chosen: ProcessSet | Iterable[int], moved: bool = False) -> ProcessSet:
        """Form a set and return it; a set is created if only ranks are given.

        `moved`: the set comes from an earlier world of an elastic job, and may have all ranks of this one.
        """
        process_set = chosen if isinstance(chosen, ProcessSet) else ProcessSet(chosen)
        if process_set.process_set_id is not None:
            raise ValueError(f"{process_set} was added already")
        ranks = process_set._ranks
        communicator = process_set._communicator
        if communicator is not None:
            ranks = parse_ranks(communicator.allgather(self._world.rank))
        self._check_agreement("add", ranks, process_set)
        others = (*(() if moved else (global_process_set,)), *self._sets.values())
        check_ranks(ranks, self._world.size, {each._ranks: each for each in others})
        engine = self._form_engine(process_set, ranks)
        if engine is not None:
            self._device.register_engine(engine, self._next)
        process_set._enter(self._next, self._world, ranks, engine)
        self._sets[self._next] = process_set
        self._memberships.update(ranks)
        self._next += 1
        return process_set

    def remove(self, process_set: ProcessSet) -> bool:
        """Remove a set; return False if it was not registered."""
        if process_set is global_process_set or process_set._world is not self._world:
            return False
        assert process_set.process_set_id is not None
        self._check_agreement("remove", process_set._ranks, process_set)
        self._expect_idle(process_set)
        if process_set._engine is not None:
            process_set._engine.close(self._timeout)
        self._world.barrier("engine.process_set.removed", True).wait()
        if process_set._engine is not None:
            self._device.release(process_set._engine)
        del self._sets[process_set.process_set_id]
        self._memberships.subtract(process_set._ranks)
        process_set._leave_world()
        return True

    def form_among(self, ranks: tuple[int, ...], name: str, exchange: Exchange, **settings: float) -> core.Engine:
        """Form a set of this rank and others, in which no other rank takes part. Collective over its ranks.

        Any number of sets may have the same ranks. It waits for all of them: ranks that form several sets do it in one
        order.

        `ranks` are in the order of their numbers in the set. `name` is equal on them and used for no other set of this
        world. `exchange` takes this rank's bytes, and returns those of each of `ranks`. `settings` are those of the
        set's engine that differ from the world's, such as `stall_limit`. An EngineError says that the set cannot be
        formed on one of the ranks.
        """
        forming = GroupExchange(ranks, exchange)
        engine, failure = None, ""
        offset = self._find_place(forming)
        try:
            engine = self.enter(ranks, offset, self._connect_group(forming, name), **settings)
        except Exception as error:  # Such as no memory, no further thread, or no connection.
            if self._world.failure is not None:
                raise self._world.failure from error
            if forming.broken:  # A rank is missing: nobody waits for it again.
                raise forming.make_error(format_exception(error)) from error
            failure = format_exception(error)
        try:
            forming.agree_on_success(failure)
        except BaseException:
            if engine is not None:
                self.leave_set(engine, 0.0)
            raise
        assert engine is not None
        return engine

    def _find_place(self, forming: GroupExchange) -> int:
        """Return where the segment of a group begins on this host, which the first of its ranks here claims."""
        hosts = (0,) * self._world.size if self._links is None else self._links.hosts
        leader = next(rank for rank in forming.ranks if hosts[rank] == hosts[self._world.rank])
        offset, failure = 0, ""
        try:
            if self._world.rank == leader:
                offset = self._world.claim(len(forming.ranks))
        except (OSError, EngineError) as error:
            failure = format_exception(error)
        return forming.agree_on_place(leader, offset, failure)

    def _connect_group(self, forming: GroupExchange, name: str) -> Connections:
        """Open connections to ranks of a group on other hosts."""
        if self._links is None:
            return {}, {}
        return self._links.open(forming.ranks, name, forming.exchange_texts, lambda: self._world.failure is not None)

    def are_on_one_host(self, ranks: tuple[int, ...]) -> bool:
        """Return whether ranks of the world share a host."""
        return self._links is None or len({self._links.hosts[rank] for rank in ranks}) == 1

    def claim_segment(self, size: int) -> int:
        """Return where the segment of a set of `size` ranks of this host begins, for `enter`."""
        return self._world.claim(size)

    def enter(
        self, ranks: tuple[int, ...], offset: int, connections: Connections = ({}, {}), **settings: float
    ) -> core.Engine:
        """Enter a set whose segment one of its ranks on this host has claimed at `offset`. Not collective."""
        engine = self._world.enter_set(ranks, next_call_number(), offset, *connections, settings=settings)
        self._groups[-next(self._entered)] = engine
        if self._closing:  # Another thread ends the session: it, too, may have seen this set.
            self.leave_set(engine, 0.0)
            raise NotInitializedError("engine.shutdown() was called while a group was formed")
        return engine

    def find_group(self, engine: core.Engine) -> int | None:
        """Return this rank's number of a set of `enter`; None: it is none, or was left."""
        return next((number for number, each in list(self._groups.items()) if each is engine), None)

    def leave_set(self, engine: core.Engine, seconds: float | None = None) -> None:
        """Leave a set of `enter`; operations in flight have `seconds`. Not collective."""
        for number, each in list(self._groups.items()):
            if each is engine and self._groups.pop(number, None) is not None:
                engine.close(self._timeout if seconds is None else seconds)

    def close(self, seconds: float | None = None) -> bool:
        """End all sets before the world ends, and return whether a set was ever added. Not collective.

        Operations in flight have `seconds`, in all sets together; by default the time-out of the registry.
        """
        seconds = self._timeout if seconds is None else seconds
        found = self._next > 1
        patience = Patience(seconds)
        self._closing = True
        while not all(each.idle for each in self.engines.values()) and patience.seconds_left():
            time.sleep(0.001)
        with ExitStack() as ends:
            ends.callback(global_process_set._leave_world)
            for group in list(self._groups.values()):
                ends.callback(self.leave_set, group, min(seconds, IDLE) if group.idle else 0.0)
            for number in reversed(self._sets):
                ends.callback(self._end_set, number, seconds)
        return found

    def _end_set(self, number: int, seconds: float) -> None:
        """End one set as the world ends."""
        process_set = self._sets[number]
        try:
            if process_set._engine is not None:
                process_set._engine.close(min(seconds, IDLE) if process_set._engine.idle else 0.0)
        finally:
            process_set._leave_world()
            del self._sets[number]

    def _form_engine(self, process_set: ProcessSet, ranks: tuple[int, ...]) -> core.Engine | None:
        """Create this rank's engine in a set. If a rank fails, no rank has the set, and numbers stay equal."""
        formed, failure = None, ""
        lanes, trunks = self._connect(ranks)  # The engine owns them from now on, even if it cannot start.
        try:
            formed = self._world.form(ranks, process_set._call_number, lanes, trunks)
        except WorldError:
            raise
        except Exception as error:  # A carrier from outside may raise any.
            failure = format_whole_exception(error)
        told = self._first_told("formed", failure)
        if told is not None:
            if formed is not None:
                formed.close(0.0)
            raise EngineError(
                f"a process set of the ranks {list(ranks)} cannot be formed: on rank {told[0]}: {told[1]}"
            )
        return formed

    def _connect(self, ranks: tuple[int, ...]) -> Connections:
        """Open connections to ranks of a set on other hosts. If one fails, no rank has the set."""
        if self._links is None:
            return {}, {}
        self._tries += 1
        connections: Connections = {}, {}
        failure = ""
        try:
            connections = self._links.open(
                ranks,
                f"process set {self._next}.{self._tries}",
                lambda text: _pick_texts(self._gather_texts("addresses", text), ranks),
                lambda: self._world.failure is not None,
            )
        except (OSError, RendezvousError) as error:
            failure = str(error)
        try:
            told = self._first_told("connected", failure)
            if told is not None:
                raise EngineError(
                    f"a process set of the ranks {list(ranks)} cannot be formed: rank {told[0]} has {told[1]}"
                )
        except BaseException:
            lanes, trunks = connections
            close_all([*chain(*lanes.values()), *trunks.values()])
            raise
        return connections

    def _first_told(self, subject: str, text: str) -> tuple[int, str] | None:
        """Return the first of all ranks' texts that is not empty, with its rank; None if all are empty. Collective."""
        for rank, told in enumerate(self._gather_texts(subject, text.encode())):
            if told:
                return rank, told.decode("utf-8", "replace")
        return None

    def _gather_texts(self, subject: str, text: bytes) -> list[bytes]:
        """Gather the texts of all ranks. Collective."""
        handle = self._world.allgather(array("b", text), f"engine.process_set.{subject}", True)
        handle.wait()
        return split_gathered(handle)

    def _expect_idle(self, process_set: ProcessSet) -> None:
        """Wait for operations in flight in a set. On a time-out every rank raises EngineError, and the set remains."""
        patience = Patience(self._timeout)
        while (waiting := self._pending(process_set)) and patience.seconds_left():
            time.sleep(0.001)
        told = self._first_told("pending", waiting)
        if told is not None:
            raise EngineError(
                f"{process_set} cannot be removed: rank {told[0]} has waited {self._timeout:.0f} s for {told[1]!r} in "
                "it, which other ranks have not submitted"
            )

    def _pending(self, process_set: ProcessSet) -> str:
        """Return the name of an operation that is in flight in a set on this rank; empty: there is none."""
        pending = [] if process_set._engine is None else process_set._engine.pending()
        return str(pending[0]["name"]) if pending else ""

    def _check_agreement(self, verb: str, ranks: tuple[int, ...], process_set: ProcessSet) -> None:
        """Check that all ranks mean the same set; else an error on all of them lists the sets. Collective."""
        said = array("q", (len(ranks), *ranks))
        handle = self._world.allgather(said, f"engine.process_set.{verb}", True)
        handle.wait()
        data, counts = handle.gathered
        everything = data.cast("B").cast("q").tolist()
        meant: dict[tuple[int, ...], list[int]] = {}
        for rank, count in enumerate(counts):
            if count == 0:
                raise EngineError(f"rank {rank} has joined: {verb} process sets before join(), or when all are back")
            meant.setdefault(tuple(everything[1:count]), []).append(rank)
            del everything[:count]
        if len(meant) > 1:
            told = ", ".join(f"{readable.format_ranks(who)}: {list(what)}" for what, who in meant.items())
            raise EngineError(
                f"the ranks disagree on the process set to {verb} ({told}). Every rank of the world gives the same "
                f"sets in the same order, also those that are not in them"
            )


def split_gathered(handle: Any) -> list[bytes]:
    """Return the bytes of each rank from the handle of an allgather that is complete."""
    data, counts = handle.gathered
    ends = accumulate(counts)
    return [bytes(data[end - count : end]) for end, count in zip(ends, counts, strict=True)]


def _pick_texts(texts: list[bytes], ranks: tuple[int, ...]) -> list[bytes]:
    """Return the texts of some of all ranks."""
    return [texts[rank] for rank in ranks]
