"""Frozen passes: the same tensors are reduced each time, so that ranks need not agree on anything while they are.

What the lane enqueues for one may be captured into a CUDA graph, and is launched with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from .. import freezing, readable
from ..config import Config
from ..errors import DeviceError, MismatchError, WorldError
from ..host.patience import Patience
from ..native import core
from . import texts
from .plane import OLDEST_FOR_SETS, SLAB, TICK, Plane

DTYPES = {"float16": (0, 2), "bfloat16": (1, 2), "float32": (2, 4), "float64": (3, 8)}  # number and bytes, of kernels.h
ALIGNMENT = 16  # bytes, of what the kernels read at once
UNDER_WAY = 2.0  # seconds for which collectives that are under way are waited for

Part = tuple[int, int, int, int, int]  # as `Lane.freeze` takes them
Row = tuple[int, int, int]


@dataclass(frozen=True)
class Frozen:
    """A tensor of a frozen pass."""

    name: str
    dtype: str
    count: int
    """Elements, which lie side by side."""
    address: int


@dataclass(frozen=True)
class Reduction:
    """What a frozen pass does with all of its tensors."""

    op: int
    prescale: float
    postscale: float
    wire: str | None
    """The dtype that travels in place of a wider one."""


class FrozenPass:
    """A reduction of the same tensors each time. Collective to make and to repeat.

    Parameters
    ----------
    engine : core.Engine
        Of the world.
    plane : Plane
    tensors : list of Frozen
        In the same order on all ranks.
    reduction : Reduction
        A sum or an average.
    settings : Config
        `start_timeout` limits the making, `stall_limit` the time in which the lane enqueues a pass.
    hold : callable
        Lets other threads that submit tensors on GPUs wait, within what it returns; and that gives a function, which
        says what of this rank is under way all the same.

    Raises
    ------
    MismatchError
        The ranks freeze different things; on all ranks alike.
    DeviceError
        A call failed on some rank, or it has a collective under way; on all ranks alike.
    WorldError
        A rank died.
    """

    def __init__(
        self,
        engine: core.Engine,
        plane: Plane,
        tensors: list[Frozen],
        reduction: Reduction,
        settings: Config,
        hold: Callable[[], AbstractContextManager[Callable[[], list[str]]]],
    ) -> None:
        self._engine = engine
        self._plane = plane
        self._limit = settings.stall_limit
        _expect_agreement(tensors, reduction)
        _expect_several_communicators(plane)
        parts, rows = _laid_out(tensors, reduction.wire)
        with plane.freezing, hold() as under_way:
            self._together(lambda: self._expect_nothing(under_way))
            told = self._together(lambda: self._prepare(reduction, parts, rows, settings.start_timeout))
            self._together(lambda: self._unite(told[0], settings.start_timeout))
            plane.united = True

    def _expect_nothing(self, under_way: Callable[[], list[str]]) -> str:
        """Refuse what is under way: ranks would wait in NCCL for each other, in different orders.

        What the engine itself compares ends by itself.
        """
        patience = Patience(UNDER_WAY)
        while (names := under_way()) or self._plane.lane.pending:
            if not patience.left():
                raise DeviceError(
                    f"{', '.join(names[:3]) or 'a collective'} is under way, which has no order with what is frozen: "
                    "wait for all collectives, in all threads and process sets, before freeze()"
                )
            time.sleep(0.001)
        return ""

    def _prepare(self, reduction: Reduction, parts: list[Part], rows: list[Row], seconds: float) -> str:
        """Wait until the lane has allocated what the pass needs. On rank 0: by what ranks connect, if they have not."""
        self._at = self._plane.lane.freeze(reduction.op, reduction.prescale, reduction.postscale, parts, rows)
        if why := self._wait(seconds, "allocate for a frozen pass"):
            raise DeviceError(f"{why}: it takes up to {SLAB >> 20} MiB of its memory, and 0.4 % of what gradients take")
        return "" if self._plane.united or self._engine.rank else self._id(seconds)

    def _unite(self, its: str, seconds: float) -> str:
        """Wait in NCCL until all ranks have come, and run the reduction."""
        self._plane.lane.unite(self._at, bytes.fromhex(its) if its else None)
        if why := self._wait(seconds, "connect for a frozen pass"):
            raise DeviceError(why)
        return ""

    def _together(self, work: Callable[[], str]) -> list[str]:
        """Do this rank's part of a step, and hear what came of it on every rank.

        Raises
        ------
        DeviceError
            It failed on some rank.
        """
        failure: Exception | None = None
        why = gave = ""
        try:
            gave = work()
        except WorldError:
            raise  # The others have it, too.
        except DeviceError as error:
            why = str(error)
        except Exception as error:  # A defect, or no memory: the others must hear of it.
            why, failure = readable.whole_exception(error), error
        told: list[tuple[str, str]] = freezing.tell((gave, why))
        if failure is not None:
            raise failure
        for rank, (_, text) in enumerate(told):
            if text:
                raise DeviceError(f"rank {rank} cannot freeze a pass on its GPU: {text}")
        return [each for each, _ in told]

    def repeat(self, stream: int) -> None:
        """Enqueue the reduction on a stream, behind what is there; or capture it, if the stream is being captured.

        Raises
        ------
        DeviceError
            A call failed, or does not return.
        WorldError
            The world has failed.
        NotInitializedError, ForkedError
            The world of the pass has ended; or this is a child of the process that was in it.
        """
        self._expect_enqueued()  # An interrupt may have ended the wait for the last time.
        self._plane.lane.repeat(self._at, stream)
        self._expect_enqueued()

    def _expect_enqueued(self) -> None:
        """Wait until the lane has done what it was given."""
        if why := self._wait(self._limit, "enqueue a frozen pass"):
            raise DeviceError(f"rank {self._engine.rank} cannot enqueue a frozen pass: {why}")

    def _id(self, seconds: float) -> str:
        """Rank 0's lane is asked for an id."""
        lane, patience = self._plane.lane, Patience(seconds)
        with self._plane.jobs:
            lane.begin("name")
            while not lane.wait(TICK) and patience.left() and self._engine.failure is None:
                pass
            if not lane.wait(0):
                call = lane.call or "a call"
                self._engine.abort(f"{call} has not returned for {seconds:g} s, in which it had to name a communicator")
            if self._engine.failure is not None:
                raise self._engine.failure
            if lane.failure is not None:
                raise DeviceError(texts.failed(lane.failure, seconds, lane.identity))
            return lane.id.hex()

    def _wait(self, seconds: float, what: str) -> str:
        """Why what the lane does with the pass has failed; "" if it has not."""
        begun = time.monotonic()
        self._plane.expect_open()
        while (why := self._plane.lane.pass_ended(self._at, TICK)) is None and self._engine.failure is None:
            self._plane.expect_open()  # Another thread may close it.
            if seconds and time.monotonic() - begun > seconds:
                call = self._plane.lane.call or "a call"
                self._engine.abort(f"{call} has not returned for {seconds:g} s, in which its GPU had to {what}")
        if self._engine.failure is not None:
            raise self._engine.failure
        return why or ""


def _expect_agreement(tensors: list[Frozen], reduction: Reduction) -> None:
    """Compare what the ranks freeze, and in which order. Collective.

    Raises
    ------
    MismatchError
    """
    own = [str(reduction), *(f"{each.name!r}: {each.count} x {each.dtype}" for each in tensors)]
    told: list[list[str]] = freezing.tell(own)
    for rank, theirs in enumerate(told):
        if theirs == told[0]:
            continue
        k = next(
            (k for k, (a, b) in enumerate(zip(theirs, told[0], strict=False)) if a != b), min(len(theirs), len(told[0]))
        )
        has, wants = (lines[k] if k < len(lines) else "nothing more" for lines in (theirs, told[0]))
        raise MismatchError(
            f"the ranks freeze different gradients: at place {k} rank {rank} has {has}, and rank 0 has {wants}: run "
            "the same step on all ranks before freeze(), in which the same parameters get gradients"
        )


def _expect_several_communicators(plane: Plane) -> None:
    """Frozen passes have a communicator of their own, which is ended with the world's. All ranks have one NCCL.

    Raises
    ------
    DeviceError
    """
    nccl = plane.gpus[0]["nccl"]
    if tuple(map(int, nccl.split("."))) < OLDEST_FOR_SETS:
        raise DeviceError(
            f"NCCL {nccl} cannot end several communicators at once, and frozen passes have their own: install "
            f"{'.'.join(map(str, OLDEST_FOR_SETS))} or newer, or do not freeze()"
        )


def _laid_out(tensors: list[Frozen], wire: str | None) -> tuple[list[Part], list[Row]]:
    """Parts and rows: those of a dtype side by side, in their order."""
    parts: list[Part] = []
    rows: list[Row] = []
    for dtype in dict.fromkeys(each.dtype for each in tensors):
        number, width = DTYPES[dtype]
        travels, travelling = DTYPES[wire] if wire is not None and DTYPES[wire][1] < width else (number, width)
        begin, offset, end = len(rows), 0, 0
        for each in tensors:
            if each.dtype == dtype:
                rows.append((each.address, offset, each.count * travelling))
                end = offset + each.count * travelling
                offset = -(-end // ALIGNMENT) * ALIGNMENT
        parts.append((number, travels, begin, len(rows), end))
    return parts, rows
