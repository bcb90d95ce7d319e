"""Frozen passes: reductions of the same tensors each time, which ranks repeat without further negotiation.

The CUDA thread's work for a pass can be captured into a CUDA graph, and is then launched with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ..collectives import freezing
from ..config.config import Config
from ..errors import DeviceError, MismatchError, WorldError
from ..errors.formatting import format_whole_exception
from ..host.patience import Patience
from ..native import core
from . import texts
from .plane import OLDEST_FOR_SETS, SLAB, TICK, Plane

DTYPES = {"float16": (0, 2), "bfloat16": (1, 2), "float32": (2, 4), "float64": (3, 8)}  # number in kernels.h, and bytes
ALIGNMENT = 16  # bytes that the kernels read at once
UNDER_WAY = 2.0  # maximum seconds to wait for collectives in flight

Part = tuple[int, int, int, int, int]  # argument of `CudaThread.allocate_pass`
Row = tuple[int, int, int]


@dataclass(frozen=True)
class Frozen:
    """Tensor of a frozen pass."""

    name: str
    dtype: str
    count: int
    """Number of elements, which are contiguous."""
    address: int


@dataclass(frozen=True)
class Reduction:
    """Operation of a frozen pass, the same for all its tensors."""

    op: int
    prescale: float
    postscale: float
    wire: str | None
    """Dtype on the wire in place of a wider one; None: the tensors' own."""


class FrozenPass:
    """Repeatable reduction of the same tensors. Its construction and its repetitions are collective.

    `engine` is that of the world, and tensors are in the same order on all ranks. `start_timeout` limits the
    construction, `stall_limit` the time in which the CUDA thread enqueues a pass. `hold` is a context manager that
    makes other threads wait before they submit tensors on GPUs. It yields a function that returns the names of this
    rank's operations that are in flight nevertheless.

    All ranks raise MismatchError if they freeze different tensors. They raise DeviceError if a call failed on some
    rank, or a rank has a collective in flight. Raises WorldError if a rank died.
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
            self._run_collective_step(lambda: self._expect_nothing(under_way))
            told = self._run_collective_step(lambda: self._prepare(reduction, parts, rows, settings.start_timeout))
            self._run_collective_step(lambda: self._connect_ranks(told[0], settings.start_timeout))
            plane.united = True

    def _expect_nothing(self, under_way: Callable[[], list[str]]) -> str:
        """Wait for operations in flight, and raise if some remain: ranks would deadlock in NCCL in different orders.

        Operations that the engine itself submits end soon.
        """
        patience = Patience(UNDER_WAY)
        while (names := under_way()) or self._plane.cuda_thread.pending:
            if not patience.seconds_left():
                raise DeviceError(
                    f"{', '.join(names[:3]) or 'a collective'} is under way, which has no order with what is frozen: "
                    "wait for all collectives, in all threads and process sets, before freeze()"
                )
            time.sleep(0.001)
        return ""

    def _prepare(self, reduction: Reduction, parts: list[Part], rows: list[Row], seconds: float) -> str:
        """Wait for the CUDA thread's allocations for the pass. Rank 0 returns a communicator's id unless connected."""
        self._at = self._plane.cuda_thread.allocate_pass(
            reduction.op, reduction.prescale, reduction.postscale, parts, rows
        )
        if why := self._wait(seconds, "allocate for a frozen pass"):
            raise DeviceError(f"{why}: it takes up to {SLAB >> 20} MiB of its memory, and 0.4 % of what gradients take")
        return "" if self._plane.united or self._engine.rank else self._create_communicator_id(seconds)

    def _connect_ranks(self, its: str, seconds: float) -> str:
        """Wait in NCCL until all ranks are connected, and run the reduction."""
        self._plane.cuda_thread.connect_pass(self._at, bytes.fromhex(its) if its else None)
        if why := self._wait(seconds, "connect for a frozen pass"):
            raise DeviceError(why)
        return ""

    def _run_collective_step(self, work: Callable[[], str]) -> list[str]:
        """Do this rank's part of a step, and return the results of all ranks.

        Raises DeviceError if the step failed on some rank.
        """
        failure: Exception | None = None
        why = gave = ""
        try:
            gave = work()
        except WorldError:
            raise  # The other ranks have it, too.
        except DeviceError as error:
            why = str(error)
        except Exception as error:  # A defect, or no memory: the other ranks must be told.
            why, failure = format_whole_exception(error), error
        told: list[tuple[str, str]] = freezing.tell((gave, why))
        if failure is not None:
            raise failure
        for rank, (_, text) in enumerate(told):
            if text:
                raise DeviceError(f"rank {rank} cannot freeze a pass on its GPU: {text}")
        return [each for each, _ in told]

    def enqueue_pass(self, stream: int) -> None:
        """Enqueue the reduction on a stream, or capture it if the stream is being captured.

        Raises DeviceError if a call failed or does not return, and WorldError if the world has failed. Raises
        NotInitializedError after the end of the pass's world, and ForkedError in a forked child of its process.
        """
        self._expect_enqueued()  # An interrupt may have ended the last call's wait.
        self._plane.cuda_thread.replay_pass(self._at, stream)
        self._expect_enqueued()

    def _expect_enqueued(self) -> None:
        """Wait until the CUDA thread has enqueued the pass."""
        if why := self._wait(self._limit, "enqueue a frozen pass"):
            raise DeviceError(f"rank {self._engine.rank} cannot enqueue a frozen pass: {why}")

    def _create_communicator_id(self, seconds: float) -> str:
        """Return the id of a new communicator, from rank 0's CUDA thread."""
        cuda_thread, patience = self._plane.cuda_thread, Patience(seconds)
        with self._plane.jobs:
            cuda_thread.begin("name")
            while not cuda_thread.wait(TICK) and patience.seconds_left() and self._engine.failure is None:
                pass
            if not cuda_thread.wait(0):
                call = cuda_thread.call or "a call"
                self._engine.abort(f"{call} has not returned for {seconds:g} s, in which it had to name a communicator")
            if self._engine.failure is not None:
                raise self._engine.failure
            if cuda_thread.failure is not None:
                raise DeviceError(texts.explain_failure(cuda_thread.failure, seconds, cuda_thread.identity))
            return cuda_thread.id.hex()

    def _wait(self, seconds: float, what: str) -> str:
        """Wait for the CUDA thread's work on the pass; return the reason of its failure, or "" if it succeeded."""
        begun = time.monotonic()
        self._plane.expect_open()
        while (why := self._plane.cuda_thread.pass_ended(self._at, TICK)) is None and self._engine.failure is None:
            self._plane.expect_open()  # Another thread may close it.
            if seconds and time.monotonic() - begun > seconds:
                call = self._plane.cuda_thread.call or "a call"
                self._engine.abort(f"{call} has not returned for {seconds:g} s, in which its GPU had to {what}")
        if self._engine.failure is not None:
            raise self._engine.failure
        return why or ""


def _expect_agreement(tensors: list[Frozen], reduction: Reduction) -> None:
    """Raise MismatchError unless all ranks freeze the same tensors in the same order. Collective."""
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
    """Raise DeviceError unless NCCL can end several communicators at once: frozen passes add one to the world's."""
    nccl = plane.gpus[0]["nccl"]
    if tuple(map(int, nccl.split("."))) < OLDEST_FOR_SETS:
        raise DeviceError(
            f"NCCL {nccl} cannot end several communicators at once, and frozen passes have their own: install "
            f"{'.'.join(map(str, OLDEST_FOR_SETS))} or newer, or do not freeze()"
        )


def _laid_out(tensors: list[Frozen], wire: str | None) -> tuple[list[Part], list[Row]]:
    """Compute parts and rows: tensors of one dtype are adjacent, in their order."""
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
