"""GPU of this rank and its communicator with the other ranks, opened collectively.

The CUDA thread (`engine_ext/gpu/cuda_thread.h`) does the work: it alone calls CUDA and NCCL. Ranks exchange their
results through collectives of host memory, so all ranks learn which rank fails, dies or hangs. Waits for the CUDA
thread or for other ranks are limited by `start_timeout`; a CUDA thread that does not return is abandoned.
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

from engine_ext.gpu.cuda_thread import CudaThread

from ..config.config import Config
from ..config.setting import variable_name
from ..errors import DeviceError, ForkedError, NotInitializedError, UnsupportedTensorError, WorldError
from ..errors.formatting import format_exception, format_whole_exception
from ..host.patience import Patience
from ..native import core
from ..text import readable
from ..text.logs import logger
from . import texts
from .identity import FAILED, check_gpus, describe_gpu, refuse_failed
from .libraries import Libraries, load

NAME = "engine.gpu"  # operation name of the exchanges between ranks
TICK = 0.05  # seconds between two checks whether the world has failed
GRACE = 9.0  # seconds beyond the limit in which ranks learn the others' results
RETURN = 7.0  # seconds of these in which a cancelled CUDA thread must return; it waits 4 s for its device
SLAB = 64 << 20  # bytes of the buffer in which tensors travel together; larger entries go in pieces
TABLES = 4 << 20  # bytes of the ring that holds tensor addresses for the kernels
CLOSING = 20.0  # maximum seconds of a close; in it the CUDA thread waits at most 10 s, and for an abort

OLDEST_FOR_SETS = (2, 24, 0)  # first NCCL version that can end several communicators at once

_pid = 0  # process that loaded the libraries
_stuck: list[CudaThread] = []  # objects of CUDA threads that did not return and still use them


class Plane:
    """Open GPU, created by `Plane.open`."""

    def __init__(
        self, cuda_thread: CudaThread, rank: int, ordinal: int, gpus: list[dict[str, Any]], seconds: dict[str, float]
    ) -> None:
        self.cuda_thread = cuda_thread  # has a context, a stream of highest priority, kernels, events, a communicator
        self.rank = rank
        self.ordinal = ordinal  # number of the GPU among those that the process sees
        self.gpus = gpus  # results of `identity.describe_gpu`, by rank
        self.seconds = seconds  # duration of this rank's part of each step of the opening
        self.jobs = threading.Lock()  # the CUDA thread does one job at a time
        self.freezing = threading.Lock()  # held while a frozen pass is constructed
        self.united = False  # whether the ranks are connected for frozen passes
        self._pid = os.getpid()
        self._open = True

    @classmethod
    def open(cls, engine: core.Engine, ordinal: int, settings: Config, keep: Callable[[Plane], None]) -> Plane:
        """Open a GPU together with the other ranks. Collective.

        `engine` is that of the world, and `ordinal` the number of the GPU among those that this process sees.
        `start_timeout` limits the opening once all ranks have arrived. Before that, `stall_limit` applies, as in every
        collective.

        `keep` takes a partly opened GPU after the world has failed, for example by a death. Then ranks cannot tell each
        other that their GPUs are idle, and others may still read its memory; close it when they have left.

        All ranks raise DeviceError if a rank has no GPU, driver or NCCL, these are incompatible, or a call failed.
        Raises WorldError if a rank died or did not arrive, and ForkedError if the parent of this process had opened a
        GPU.
        """
        return _Opening(engine, ordinal, settings).run(keep)

    def check_device(self, ordinal: int) -> None:
        """Raise UnsupportedTensorError for tensors of another GPU: a process uses one."""
        if ordinal != self.ordinal:
            raise UnsupportedTensorError(
                f"rank {self.rank}: a tensor on cuda:{ordinal}, but the engine works on cuda:{self.ordinal} "
                f"({self.gpus[self.rank]['name']}), where the first tensor was: a rank uses one GPU; move the tensor "
                "there, or call torch.cuda.set_device() before the first collective"
            )

    def expect_open(self) -> None:
        """Raise NotInitializedError if the GPU was closed, and ForkedError if the parent of this process opened it."""
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
        """Connect the ranks of a process set, and return the address of their communicator. Collective among them.

        `number` is that of the process set, equal on all ranks; `ordinal` is that of the GPU on which this rank has a
        tensor. `start_timeout` limits the connection, from when it is the set's turn on all ranks.

        All ranks raise DeviceError if a rank's tensor is on another GPU than its engine uses, or NCCL is too old.
        Raises WorldError if a rank died, did not arrive or could not be connected: the world has failed.
        """
        joining = _Joining(engine, self, number, ordinal, settings)
        joining.run_among_ranks()
        return joining.at

    def end_communicator(self, engine: core.Engine, at: int) -> None:
        """End the communicator of a process set.

        Collective among its ranks. Their engines in the set are closed, and their devices have done all work of the
        set.
        """
        patience = Patience(CLOSING)
        self.cuda_thread.destroy_communicator(at)
        engine.want_turn()
        stage = self.cuda_thread.await_stage(at, "destroyed", TICK)  # also of a plane that is closed meanwhile
        while stage is None and patience.seconds_left() and self._open:
            stage = self.cuda_thread.await_stage(at, "destroyed", TICK)
        if stage == "destroyed":
            engine.take_turns(0)
            self.cuda_thread.free_communicator(at)

    def close(self) -> None:
        """End the communicators and release the GPU. Not collective; does nothing in a forked child."""
        if self._open and os.getpid() == self._pid:
            self._open = False
            _close(self.cuda_thread, self.rank)


class _Opening:
    """Steps of `Plane.open`."""

    def __init__(self, engine: core.Engine, ordinal: int, settings: Config) -> None:
        self.engine = engine
        self.ordinal = ordinal
        self.settings = settings
        self.patience = Patience(settings.start_timeout)
        self.cuda_thread: CudaThread | None = None
        self.seconds: dict[str, float] = {}

    def run(self, keep: Callable[[Plane], None]) -> Plane:
        """Run the steps, and return when all ranks are ready. `keep` is the argument of `Plane.open`."""
        _expect_no_fork()
        # An operation reveals which ranks have submitted it only from its second use on.
        self.engine.allgather(np.zeros(1, np.uint8), NAME, True).wait()
        self.patience.reset(self.settings.start_timeout)
        try:
            gpus = self._run_collective_step("identity", self._identify_gpu)
            check_gpus(gpus)
            told = self._run_collective_step("preparation", self._prepare)
            self._run_collective_step("communicator", lambda: self._connect(bytes.fromhex(told[0]["id"])))
        except BaseException:
            if self.cuda_thread is not None and self.cuda_thread not in _stuck:
                self.cuda_thread.cancel()
                half = Plane(self.cuda_thread, self.engine.rank, self.ordinal, [], self.seconds)
                half.close() if self.engine.failure is None else keep(half)
            raise
        assert self.cuda_thread is not None
        logger.debug(
            "GPU %s of rank %d is open, with NCCL %s", gpus[self.engine.rank]["uuid"], self.engine.rank, gpus[0]["nccl"]
        )
        return Plane(self.cuda_thread, self.engine.rank, self.ordinal, gpus, self.seconds)

    # ---- steps of this rank ------------------------------------------------------------------------------------------

    def _identify_gpu(self) -> dict[str, Any]:
        """Load the libraries, start the CUDA thread, and identify the GPU."""
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
        self.cuda_thread = CudaThread(
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
        self._run_job("identify")
        return describe_gpu(self.cuda_thread.identity, self.ordinal, libraries, self.settings.device_sums)

    def _prepare(self) -> dict[str, Any]:
        """Do the preparation that needs no other rank. On rank 0, also return the communicator's id."""
        assert self.cuda_thread is not None
        self._run_job("prepare")
        if self.engine.rank:
            return {}
        self._run_job("name")
        return {"id": self.cuda_thread.id.hex()}

    def _connect(self, id: bytes) -> dict[str, Any]:
        """Wait in NCCL until all ranks are connected."""
        self._run_job("connect", id)
        return {}

    def _run_job(self, job: str, id: bytes | None = None) -> None:
        """Let the CUDA thread do a job, and wait for it.

        Raises DeviceError if a call failed or did not end in time, and WorldError if the world has failed in the
        meantime.
        """
        cuda_thread = self.cuda_thread
        assert cuda_thread is not None
        cuda_thread.begin(job, id)
        try:
            while not cuda_thread.wait(TICK) and self.patience.seconds_left() and self.engine.failure is None:
                pass
        finally:
            if not cuda_thread.wait(0):
                cuda_thread.cancel()
                if not _has_ended(cuda_thread, RETURN):
                    _stuck.append(cuda_thread)
        if self.engine.failure is not None:
            raise self.engine.failure
        if cuda_thread in _stuck:
            raise DeviceError(texts.explain_stuck_call(cuda_thread.call, self.settings.start_timeout))
        if cuda_thread.failure is not None:
            limit = self.settings.start_timeout
            raise DeviceError(texts.explain_failure(cuda_thread.failure, limit, cuda_thread.identity))

    # ---- exchanges between ranks -------------------------------------------------------------------------------------

    def _run_collective_step(self, step: str, work: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """Do this rank's part of a step, and return the results of all ranks.

        Raises DeviceError if the step failed on some rank, and WorldError if a rank died or hangs.
        """
        failure: Exception | None = None
        begun = time.perf_counter()
        try:
            own = work()
        except WorldError:
            raise  # The other ranks have it, too.
        except DeviceError as error:
            own = {FAILED: str(error)}
        except Exception as error:  # A defect, or no memory: the other ranks must be told.
            own, failure = {FAILED: format_whole_exception(error)}, error
        self.seconds[step] = time.perf_counter() - begun
        told = self._exchange_messages(step, json.dumps(own).encode())
        if failure is not None:
            raise failure
        refuse_failed(told, self.engine.numbers)
        return told

    def _exchange_messages(self, step: str, own: bytes) -> list[dict[str, Any]]:
        """Exchange messages with all ranks, within the step's limit and some grace for ranks that have just failed."""
        handle = self.engine.allgather(np.frombuffer(own, np.uint8), NAME, False)
        patience, again = Patience(self.patience.seconds_left() + GRACE), self.engine.rank != 0
        while not handle.done:
            if not patience.seconds_left():
                missing = next((each["missing"] for each in self.engine.pending() if each["name"] == NAME), None)
                if missing or not again:
                    self._fail_world(step, missing or [])
                patience.reset(GRACE)  # Only the coordinator knows which ranks on other hosts are missing.
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

    def _fail_world(self, step: str, missing: list[int]) -> Never:
        """Fail the world because a rank has not arrived."""
        limit = f"within {self.settings.start_timeout:g} s ({variable_name('start_timeout')})"
        if missing:
            others = (
                f", nor {'has' if len(missing) == 2 else 'have'} {readable.format_ranks(missing[1:])}"
                if missing[1:]
                else ""
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
    """Steps of `Plane.join`. Preparation that needs no other rank was done when the GPUs were opened."""

    def __init__(self, engine: core.Engine, plane: Plane, number: int, ordinal: int, settings: Config) -> None:
        super().__init__(engine, ordinal, settings)
        self.plane = plane
        self.cuda_thread = plane.cuda_thread
        self.number = number
        self.at = 0

    def run_among_ranks(self) -> None:
        """Run the steps, and return when all ranks are connected.

        From the second step on, a failure is one of the whole world: the CUDA thread also serves the world and other
        sets, and may be in the middle of the step.
        """
        self.engine.allgather(np.zeros(1, np.uint8), NAME, True).wait()
        self.patience.reset(self.settings.start_timeout)
        try:
            self._run_collective_step("identity", self._identify_gpu)
        except BaseException:
            self.engine.take_turns(0)
            raise
        try:
            told = self._run_collective_step("preparation", self._prepare)
            self._connect(bytes.fromhex(told[0]["id"]))
            self.patience.reset(self.settings.start_timeout)
            self._run_collective_step("communicator", self._await_communicator)
        except WorldError:
            raise
        except BaseException as error:
            self.engine.abort(f"the GPUs of a process set were not connected: {format_exception(error)}")
            raise

    def _identify_gpu(self) -> dict[str, Any]:
        """Check GPU and NCCL, and register for the set's turns. GPUs were compared when they were opened."""
        assert self.cuda_thread is not None
        self.plane.check_device(self.ordinal)
        nccl = self.plane.gpus[0]["nccl"]
        if tuple(map(int, nccl.split("."))) < OLDEST_FOR_SETS:
            raise DeviceError(
                f"NCCL {nccl} cannot end several communicators at once, and a process set of tensors on GPUs has its "
                f"own: install {'.'.join(map(str, OLDEST_FOR_SETS))} or newer, or move the tensors with .cpu()"
            )
        self.at = self.cuda_thread.add_communicator(self.number, self.engine.rank, self.engine.size)
        self.engine.take_turns(self.at)
        return {}

    def _prepare(self) -> dict[str, Any]:
        """Return the communicator's id on the set's first rank."""
        assert self.cuda_thread is not None
        if self.engine.rank:
            return {}
        with self.plane.jobs:
            self._run_job("name")
            return {"id": self.cuda_thread.id.hex()}

    def _connect(self, id: bytes) -> dict[str, Any]:
        """Let the CUDA thread connect in the set's turn, after all earlier work of each of its ranks.

        Returns when all ranks have reached the turn, without a limit of its own, as in any collective. Before the turn,
        each CUDA thread may wait for ranks of other sets, which have their own limits. The engine reports a rank that
        gives no turn.
        """
        assert self.cuda_thread is not None
        self.cuda_thread.connect_communicator(self.at, id)
        self.engine.want_turn()
        while self.cuda_thread.await_stage(self.at, "begun", TICK) is None and self.engine.failure is None:
            pass
        self.engine.allgather(np.zeros(1, np.uint8), NAME, True).wait()
        return {}

    def _await_communicator(self) -> dict[str, Any]:
        """Wait in NCCL until all ranks are connected."""
        cuda_thread, stage = self.cuda_thread, None
        assert cuda_thread is not None
        while stage is None and self.patience.seconds_left() and self.engine.failure is None:
            stage = cuda_thread.await_stage(self.at, "connected", TICK)
        if self.engine.failure is not None:
            raise self.engine.failure
        if cuda_thread.failure is not None:
            limit = self.settings.start_timeout
            raise DeviceError(texts.explain_failure(cuda_thread.failure, limit, cuda_thread.identity))
        if stage != "connected":
            raise DeviceError(texts.not_connected(cuda_thread.call, self.settings.start_timeout))
        return {}


def _expect_no_fork() -> None:
    if _pid not in (0, os.getpid()):
        raise ForkedError(
            f"process {_pid} had loaded CUDA, and this is its forked child {os.getpid()}, in which CUDA does not work: "
            "use the start method 'spawn' or 'forkserver' for processes that use a GPU"
        )


def _has_ended(cuda_thread: CudaThread, seconds: float) -> bool:
    """Wait for a CUDA thread's job for at most `seconds`, regardless of signals; return whether it has ended."""
    patience = Patience(seconds)
    while not cuda_thread.wait(TICK):
        if not patience.seconds_left():
            return False
    return True


def _close(cuda_thread: CudaThread, rank: int) -> None:
    """End a CUDA thread, or abandon it if it does not end."""
    if cuda_thread.pending:
        cuda_thread.cancel()
    cuda_thread.begin("close")
    if not _has_ended(cuda_thread, CLOSING):
        _stuck.append(cuda_thread)
        logger.error("rank %d: %s", rank, texts.explain_stuck_call(cuda_thread.call, CLOSING))
    else:
        cuda_thread.join_thread()
        if cuda_thread.left:
            logger.error("rank %d: %s", rank, texts.LEFT)
