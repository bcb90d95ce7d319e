"""The GPU of this rank and its communicator with the other ranks: opened by all of them together, and closed.

The lane (`engine_ext/gpu/lane.h`), a thread that alone calls CUDA and NCCL, does the work. Ranks hear of each other
through collectives of host memory, so a rank that fails, dies or stands still is named on all of them. Whoever waits
for the lane or for other ranks does so within `start_timeout`, and leaves a lane alone that does not come back.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable
from importlib.resources import files
from typing import Any, Never

import numpy as np

from engine_ext.gpu.lane import Lane

from .. import readable
from ..config import Config
from ..errors import DeviceError, ForkedError, NotInitializedError, UnsupportedTensorError, WorldError
from ..host.patience import Patience
from ..logs import logger
from ..native import core
from ..setting import variable
from . import texts
from .identity import FAILED, compare, described, refuse_failed
from .libraries import Libraries, load

NAME = "engine.gpu"  # of what ranks tell each other
TICK = 0.05  # seconds between two looks at whether the world is well
GRACE = 9.0  # seconds beyond the limit in which ranks hear how the others fared
RETURN = 7.0  # of these: in which a lane that is told to give up comes back; it waits 4 for its device
SLAB = 64 << 20  # bytes of the buffer in which tensors travel together; an entry that is larger goes in pieces
TABLES = 4 << 20  # bytes of the ring that tells kernels where tensors lie
CLOSING = 20.0  # seconds that a close may take; the lane waits at most 10 in it, and for an abort

OLDEST_FOR_SETS = (2, 24, 0)  # the first NCCL that ends several communicators at once

_pid = 0  # of the process that has loaded the libraries
_stuck: list[Lane] = []  # those that did not come back: their threads still use them


class Plane:
    """An open GPU. `Plane.open` makes one.

    Attributes
    ----------
    lane : Lane
        The thread, with a context, a stream of highest priority, the kernels, events and a communicator.
    ordinal : int
        The GPU's number among those that the process sees.
    gpus : list of dict
        By rank, what `identity.described` gives.
    seconds : dict of str to float
        How long this rank's part of each step of the opening took.
    jobs : threading.Lock
        Held by whoever gives the lane a job, until that has ended.
    freezing : threading.Lock
        Held by whoever makes a frozen pass.
    united : bool
        The ranks are connected for frozen passes.
    """

    def __init__(
        self, lane: Lane, rank: int, ordinal: int, gpus: list[dict[str, Any]], seconds: dict[str, float]
    ) -> None:
        self.lane = lane
        self.rank = rank
        self.ordinal = ordinal
        self.gpus = gpus
        self.seconds = seconds
        self.jobs = threading.Lock()  # the lane does one at a time
        self.freezing = threading.Lock()
        self.united = False
        self._pid = os.getpid()
        self._open = True

    @classmethod
    def open(cls, engine: core.Engine, ordinal: int, settings: Config, keep: Callable[[Plane], None]) -> Plane:
        """Open a GPU together with the other ranks. Collective.

        Parameters
        ----------
        engine : core.Engine
            Of the world.
        ordinal : int
            The GPU's number among those that this process sees.
        settings : Config
            `start_timeout` limits the opening, from when all ranks have come. Before, `stall_limit` holds, as in every
            collective.
        keep : callable
            Takes what is half open when the ranks cannot tell each other any more that their GPUs have come to rest, as
            when one has died: those of others may still read its memory, so it is to be closed when they have left.

        Raises
        ------
        DeviceError
            A rank has no GPU, driver or NCCL, or they do not fit together, or a call failed; on all ranks alike.
        WorldError
            A rank died, or did not come: the world has failed.
        ForkedError
            The parent of this process had opened a GPU.
        """
        return _Opening(engine, ordinal, settings).run(keep)

    def expect(self, ordinal: int) -> None:
        """Refuse tensors of another GPU: a process has one.

        Raises
        ------
        UnsupportedTensorError
        """
        if ordinal != self.ordinal:
            raise UnsupportedTensorError(
                f"rank {self.rank}: a tensor on cuda:{ordinal}, but the engine works on cuda:{self.ordinal} "
                f"({self.gpus[self.rank]['name']}), where the first tensor was: a rank uses one GPU; move the tensor "
                "there, or call torch.cuda.set_device() before the first collective"
            )

    def expect_open(self) -> None:
        """Refuse work for a lane that does none any more.

        Raises
        ------
        ForkedError
            The GPU was opened by the parent of this process.
        NotInitializedError
            It was closed.
        """
        if os.getpid() != self._pid:
            raise ForkedError(
                f"process {self._pid} had opened the GPU, and this is its forked child {os.getpid()}, in which CUDA "
                "does not work: use the start method 'spawn' or 'forkserver' for processes that use a GPU"
            )
        if not self._open:
            raise NotInitializedError(
                f"rank {self.rank}: the world for which the GPU was opened has ended, by engine.shutdown() or for "
                "another one: what was frozen in it has to be wrapped and frozen anew"
            )

    def join(self, engine: core.Engine, number: int, ordinal: int, settings: Config) -> int:
        """Connect the ranks of a process set. Collective among them.

        Parameters
        ----------
        engine : core.Engine
            Of the set.
        number : int
            The set's, equal on all ranks.
        ordinal : int
            The GPU on which this rank has a tensor.
        settings : Config
            `start_timeout` limits the connecting, from when it is the set's turn on all ranks.

        Returns
        -------
        int
            The address of the communicator.

        Raises
        ------
        DeviceError
            A rank's tensor is on another GPU than its engine works on, or NCCL is too old; on all ranks alike.
        WorldError
            A rank died, or did not come, or could not be connected: the world has failed.
        """
        joining = _Joining(engine, self, number, ordinal, settings)
        joining.run_among_ranks()
        return joining.at

    def part(self, engine: core.Engine, at: int) -> None:
        """End the communicator of a process set.

        Collective among its ranks, whose engines in it are closed: the device of each has passed all of its items.
        """
        patience = Patience(CLOSING)
        self.lane.part(at)
        engine.want_turn()
        while not (stage := self.lane.reached(at, "parted", TICK)) and patience.left() and self._open:
            pass
        if stage == "parted":
            engine.take_turns(0)
            self.lane.forget(at)

    def close(self) -> None:
        """End the communicators, and let go of the GPU. Not collective; in a forked child it does nothing."""
        if self._open and os.getpid() == self._pid:
            self._open = False
            _close(self.lane, self.rank)


class _Opening:
    """The steps of `Plane.open`."""

    def __init__(self, engine: core.Engine, ordinal: int, settings: Config) -> None:
        self.engine = engine
        self.ordinal = ordinal
        self.settings = settings
        self.patience = Patience(settings.start_timeout)
        self.lane: Lane | None = None
        self.seconds: dict[str, float] = {}

    def run(self, keep: Callable[[Plane], None]) -> Plane:
        """Returns when all ranks are ready. `keep`: as of `Plane.open`."""
        _expect_no_fork()
        # From the second time on ranks see who has submitted a name.
        self.engine.allgather(np.zeros(1, np.uint8), NAME, True).wait()
        self.patience.begin(self.settings.start_timeout)
        try:
            gpus = self._together("identity", self._identify)
            compare(gpus)
            told = self._together("preparation", self._prepare)
            self._together("communicator", lambda: self._connect(bytes.fromhex(told[0]["id"])))
        except BaseException:
            if self.lane is not None and self.lane not in _stuck:
                self.lane.cancel()
                half = Plane(self.lane, self.engine.rank, self.ordinal, [], self.seconds)
                half.close() if self.engine.failure is None else keep(half)
            raise
        assert self.lane is not None
        logger.debug(
            "GPU %s of rank %d is open, with NCCL %s", gpus[self.engine.rank]["uuid"], self.engine.rank, gpus[0]["nccl"]
        )
        return Plane(self.lane, self.engine.rank, self.ordinal, gpus, self.seconds)

    # ---- what this rank does

    def _identify(self) -> dict[str, Any]:
        """Load the libraries, start the lane, and look which GPU it is."""
        global _pid
        if _stuck:
            raise DeviceError(
                f"{_stuck[0].call or 'a call'} has not returned since an earlier attempt in this process (pid "
                f"{os.getpid()}): start the process again"
            )
        libraries: Libraries = load(self.settings.cuda_library, self.settings.nccl_library)
        _pid = os.getpid()
        image = files("engine_ext.gpu").joinpath("kernels.ptx").read_bytes()
        kernels = re.findall(rb"\.entry (\w+)", image)
        self.lane = Lane(
            libraries.addresses,
            self.ordinal,
            self.engine.rank,
            self.engine.size,
            image,
            kernels,
            slab=SLAB,
            tables=TABLES,
            ordered=self.settings.device_sums == "ordered",
        )
        self._do("identify")
        return described(self.lane.identity, self.ordinal, libraries, self.settings.device_sums)

    def _prepare(self) -> dict[str, Any]:
        """All that needs no other rank; and on rank 0, by what the communicator is known."""
        assert self.lane is not None
        self._do("prepare")
        if self.engine.rank:
            return {}
        self._do("name")
        return {"id": self.lane.id.hex()}

    def _connect(self, id: bytes) -> dict[str, Any]:
        """Wait in NCCL until all ranks have come."""
        self._do("connect", id)
        return {}

    def _do(self, job: str, id: bytes | None = None) -> None:
        """Have the lane do a job.

        Raises
        ------
        DeviceError
            A call failed, or did not end in time.
        WorldError
            The world has failed meanwhile.
        """
        lane = self.lane
        assert lane is not None
        lane.begin(job, id)
        try:
            while not lane.wait(TICK) and self.patience.left() and self.engine.failure is None:
                pass
        finally:
            if not lane.wait(0):
                lane.cancel()
                if not _has_ended(lane, RETURN):
                    _stuck.append(lane)
        if self.engine.failure is not None:
            raise self.engine.failure
        if lane in _stuck:
            raise DeviceError(texts.stuck(lane.call, self.settings.start_timeout))
        if lane.failure is not None:
            raise DeviceError(texts.failed(lane.failure, self.settings.start_timeout, lane.identity))

    # ---- what ranks tell each other

    def _together(self, step: str, work: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """Do this rank's part of a step, and hear what came of it on every rank.

        Raises
        ------
        DeviceError
            It failed on some rank.
        WorldError
            A rank died, or stands still.
        """
        failure: Exception | None = None
        begun = time.perf_counter()
        try:
            own = work()
        except WorldError:
            raise  # The others have it, too.
        except DeviceError as error:
            own = {FAILED: str(error)}
        except Exception as error:  # A defect, or no memory: the others must hear of it.
            own, failure = {FAILED: readable.whole_exception(error)}, error
        self.seconds[step] = time.perf_counter() - begun
        told = self._exchange(step, json.dumps(own).encode())
        if failure is not None:
            raise failure
        refuse_failed(told, self.engine.numbers)
        return told

    def _exchange(self, step: str, own: bytes) -> list[dict[str, Any]]:
        """What every rank tells. The limit is that of the step, and some grace for ranks that have just failed it."""
        handle = self.engine.allgather(np.frombuffer(own, np.uint8), NAME, False)
        patience, again = Patience(self.patience.left() + GRACE), self.engine.rank != 0
        while not handle.done:
            if not patience.left():
                missing = next((each["missing"] for each in self.engine.pending() if each["name"] == NAME), None)
                if missing or not again:
                    self._accuse(step, missing or [])
                patience.begin(GRACE)  # Of ranks on other hosts the coordinator knows.
                again = False
            time.sleep(0.001)
        handle.wait()
        data, counts = handle.gathered
        told, begin = [], 0
        for rank, count in enumerate(counts):
            if not count:
                number = self.engine.numbers[rank]
                raise DeviceError(f"rank {number} has joined: open the GPUs before join(), or when all are back")
            told.append(json.loads(bytes(data[begin : begin + count])))
            begin += count
        return told

    def _accuse(self, step: str, missing: list[int]) -> Never:
        """Fail the world for a rank that has not come."""
        limit = f"within {self.settings.start_timeout:g} s ({variable('start_timeout')})"
        if missing:
            others = (
                f", nor {'has' if len(missing) == 2 else 'have'} {readable.ranks(missing[1:])}" if missing[1:] else ""
            )
            said = f"it has not finished the {step} of the GPUs {limit}{others}: it is stopped, or hangs in a call"
            self.engine.accuse(self.engine.numbers.index(missing[0]), said)
        elif self.engine.rank:
            said = f"it has not told how the {step} of the GPUs went {limit}: it is stopped, or hangs in a call"
            self.engine.accuse(0, said)
        else:
            said = f"the {step} of the GPUs has not ended {limit}, though all ranks have finished their part"
            self.engine.abort(said)
        raise self.engine.failure or DeviceError(said)


class _Joining(_Opening):
    """The steps of `Plane.join`. All that needs no other rank has been done when the GPUs were opened."""

    def __init__(self, engine: core.Engine, plane: Plane, number: int, ordinal: int, settings: Config) -> None:
        super().__init__(engine, ordinal, settings)
        self.plane = plane
        self.lane = plane.lane
        self.number = number
        self.at = 0

    def run_among_ranks(self) -> None:
        """Returns when all ranks are connected.

        From the second step on a failure is the world's: the lane, which may be in the middle of it, serves the world
        and other sets, too.
        """
        self.engine.allgather(np.zeros(1, np.uint8), NAME, True).wait()
        self.patience.begin(self.settings.start_timeout)
        try:
            self._together("identity", self._identify)
        except BaseException:
            self.engine.take_turns(0)
            raise
        try:
            told = self._together("preparation", self._prepare)
            self._connect(bytes.fromhex(told[0]["id"]))
            self.patience.begin(self.settings.start_timeout)
            self._together("communicator", self._await_communicator)
        except WorldError:
            raise
        except BaseException as error:
            self.engine.abort(f"the GPUs of a process set were not connected: {readable.exception(error)}")
            raise

    def _identify(self) -> dict[str, Any]:
        """All that the ranks compare was compared; and from now on this rank hears when it is the set's turn."""
        assert self.lane is not None
        self.plane.expect(self.ordinal)
        nccl = self.plane.gpus[0]["nccl"]
        if tuple(map(int, nccl.split("."))) < OLDEST_FOR_SETS:
            raise DeviceError(
                f"NCCL {nccl} cannot end several communicators at once, and a process set of tensors on GPUs has its "
                f"own: install {'.'.join(map(str, OLDEST_FOR_SETS))} or newer, or move the tensors with .cpu()"
            )
        self.at = self.lane.add(self.number, self.engine.rank, self.engine.size)
        self.engine.take_turns(self.at)
        return {}

    def _prepare(self) -> dict[str, Any]:
        """On the set's first rank, ask by what the communicator is known."""
        assert self.lane is not None
        if self.engine.rank:
            return {}
        with self.plane.jobs:
            self._do("name")
            return {"id": self.lane.id.hex()}

    def _connect(self, id: bytes) -> dict[str, Any]:
        """Have the lane connect, in the set's turn: behind all that any rank of it does before.

        Returns when all ranks have come to the turn, as to any collective: before it the lane of each may wait for
        ranks of other sets, which have limits of their own. Who gives no turn is told by the engine.
        """
        assert self.lane is not None
        self.lane.connect(self.at, id)
        self.engine.want_turn()
        while self.lane.reached(self.at, "begun", TICK) is None and self.engine.failure is None:
            pass
        self.engine.allgather(np.zeros(1, np.uint8), NAME, True).wait()
        return {}

    def _await_communicator(self) -> dict[str, Any]:
        """Wait in NCCL until all ranks have come."""
        lane, stage = self.lane, None
        assert lane is not None
        while stage is None and self.patience.left() and self.engine.failure is None:
            stage = lane.reached(self.at, "connected", TICK)
        if self.engine.failure is not None:
            raise self.engine.failure
        if lane.failure is not None:
            raise DeviceError(texts.failed(lane.failure, self.settings.start_timeout, lane.identity))
        if stage != "connected":
            raise DeviceError(texts.not_connected(lane.call, self.settings.start_timeout))
        return {}


def _expect_no_fork() -> None:
    if _pid not in (0, os.getpid()):
        raise ForkedError(
            f"process {_pid} had loaded CUDA, and this is its forked child {os.getpid()}, in which CUDA does not work: "
            "use the start method 'spawn' or 'forkserver' for processes that use a GPU"
        )


def _has_ended(lane: Lane, seconds: float) -> bool:
    """Wait for a lane's job, at most so long; signals do not shorten that."""
    patience = Patience(seconds)
    while not lane.wait(TICK):
        if not patience.left():
            return False
    return True


def _close(lane: Lane, rank: int) -> None:
    """End a lane, or leave it alone if it does not end."""
    if lane.pending:
        lane.cancel()
    lane.begin("close")
    if not _has_ended(lane, CLOSING):
        _stuck.append(lane)
        logger.error("rank %d: %s", rank, texts.stuck(lane.call, CLOSING))
    else:
        lane.join()
        if lane.left:
            logger.error("rank %d: %s", rank, texts.LEFT)
