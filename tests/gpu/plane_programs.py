"""Programs of ranks for tests of the GPU plane: worlds of real processes, whose GPUs are stand-ins.

python -m tests.gpu.plane_programs NAME RANK SIZE ...    # in a directory of the job
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import engine
from engine.config import config
from engine.errors import DeviceError, EngineError, RankDiedError, RankStalledError, WorldError
from engine.session import runtime

from ..waiting import let_pass, until
from . import mutants

mutants.take_place()  # the mutant, if this is a run of one

from engine.gpu import libraries  # noqa: E402
from engine.gpu import plane as planes  # noqa: E402
from engine.gpu.freezing import Frozen, FrozenPass, Reduction  # noqa: E402, F401 (for freeze_programs.py)
from engine.gpu.plane import Plane  # noqa: E402

KERNELS = re.findall(r"\.entry (\w+)", (Path(__file__).parents[2] / "engine_ext/gpu/kernels.ptx").read_text())
KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


class Rank:
    """This process: the stand-in's controls, and consecutive worlds."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.cuda.stand_calls.restype = ctypes.c_long
        self.cuda.stand_report.restype = ctypes.c_size_t
        self.cuda.stand_deadline.argtypes = [ctypes.c_double]
        self.launched: list[str] = []
        self.kernels = [KERNEL(lambda _shape, _parameters, name=name: self.launched.append(name)) for name in KERNELS]
        for name, kernel in zip(KERNELS, self.kernels, strict=True):
            self.cuda.stand_register_kernel(name.encode(), kernel)

    @contextmanager
    def world(self, job: str, size: int | None = None, rank: int | None = None, **settings: object) -> Iterator[None]:
        """Start a world with this name, in which this process has its rank or another one."""
        size, rank = size or self.size, str(self.rank if rank is None else rank)
        os.environ.update({"RANK": rank, "LOCAL_RANK": rank, "ENGINE_JOB": f"{job} in {Path.cwd()}"})
        os.environ.update({"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)})
        if "ENGINE_HUB" in os.environ:  # ranks pretend to be on several hosts
            each = int(os.environ.get("RANKS_PER_HOST", "1"))
            host, local = divmod(int(rank), each)
            os.environ.update({"GROUP_RANK": str(host), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(each)})
        engine.init(**{"stall_warning": 0, "shutdown_timeout": 2.0, **settings})
        try:
            yield
        finally:
            engine.shutdown()

    def open(self, ordinal: int = 0, **settings: object) -> Plane:
        """Open the plane in the current world."""
        chosen = config.load(config.read_environment(), settings)
        return Plane.open(runtime.current_engine(), ordinal, chosen, runtime.current_device().keep_half)

    def refusal(self, ordinal: int = 0, **settings: object) -> str:
        """Return the error of opening."""
        try:
            self.open(ordinal, **settings)
        except DeviceError as error:
            return str(error)
        raise AssertionError("it has opened")

    def then(self, act: Callable[[], None]) -> None:
        """Replace the first kernel's action."""
        self.kernels[0] = KERNEL(lambda _shape, _parameters: act())
        self.cuda.stand_register_kernel(KERNELS[0].encode(), self.kernels[0])

    def slow(self, seconds: float) -> None:
        """Make kernels take this many seconds."""
        self.cuda.stand_kernels_take(ctypes.c_double(1000 * seconds))

    def context(self) -> None:
        """Make the device's context current in this thread."""
        context = ctypes.c_void_p()
        assert self.cuda.cuInit(0) == 0
        assert self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert self.cuda.cuCtxSetCurrent(context) == 0

    def calls(self, name: str) -> int:
        """Return the number of calls of a function."""
        return int(self.cuda.stand_calls(name.encode()))

    def fail(self, call: str, n: int, code: int) -> None:
        """Make the n-th call from now fail with a code."""
        self.cuda.stand_fail(call.encode(), n, code)

    def reports(self) -> list[str]:
        """Return the reports of the stand-ins."""
        text = ctypes.create_string_buffer(1 << 16)
        self.cuda.stand_report(text, ctypes.c_size_t(len(text)))
        return text.value.decode().splitlines()

    @contextmanager
    def refused_world(self, job: str, **settings: object) -> Iterator[None]:
        """Start a world that may end with an error, which is printed."""
        try:
            with self.world(job, **settings):  # type: ignore[arg-type]
                yield
        except EngineError as error:
            print(f"refused: {type(error).__name__}: {error}")

    @contextmanager
    def losing_world(self, job: str, **settings: object) -> Iterator[None]:
        """Start a world in which the last rank is lost: the others must be told so, and that it was the last."""
        told, last = None, self.size - 1
        try:
            with self.world(job, **settings):  # type: ignore[arg-type]
                yield
        except WorldError as error:
            told = error
        assert self.rank == last if told is None else told.rank == last, told

    def works(self) -> None:
        """Check that collectives in host memory work."""
        total = engine.allreduce(np.full(3, self.rank, np.float32), op=engine.Sum, name="host memory")
        assert total[0] == sum(range(engine.size())), total


MADE = {  # calls that make something, and those that end it
    "cuDevicePrimaryCtxRetain": "cuDevicePrimaryCtxRelease",
    "cuStreamCreateWithPriority": "cuStreamDestroy",
    "cuModuleLoadDataEx": "cuModuleUnload",
    "cuEventCreate": "cuEventDestroy",
    "ncclCommInitRankConfig": "ncclCommAbort",
}


def opens(me: Rank) -> None:
    """Open, inspect and close, twice in one world and once in another; one thread makes all calls."""
    me.slow(0.004)
    prepare = planes._Opening._prepare

    def prepares(self: planes._Opening) -> dict[str, object]:
        told = prepare(self)
        assert sorted(me.launched) == sorted(KERNELS), me.launched  # all are loaded, launched and over
        return told

    planes._Opening._prepare = prepares
    for turn in range(2):
        with me.world(f"turn {turn}"):
            for _ in range(2):
                me.launched.clear()
                plane = me.open()
                assert [gpu["ordinal"] for gpu in plane.gpus] == [0] * me.size
                assert len({gpu["uuid"] for gpu in plane.gpus}) == me.size
                plane.check_device(0)
                with pytest.raises(engine.errors.UnsupportedTensorError, match=r"cuda:1, but .* works on cuda:0"):
                    plane.check_device(1)
                me.works()
                plane.close()
                plane.close()
    for made, ended in MADE.items():
        assert me.calls(made) == me.calls(ended) > 0, made
    assert me.calls("ncclCommRevoke") == 0
    assert me.calls("ncclCommFinalize") == 4, "what NCCL had still to send was dropped"
    assert me.reports() == []


def refused(me: Rank, ordinal: str = "0", limit: str = "20") -> None:
    """Expect that opening fails, and that the world goes on."""
    with me.world("refused"):
        print(me.refusal(int(ordinal), start_timeout=float(limit)))
        me.works()
    assert me.reports() == []


def accepted(me: Rank, ordinal: str = "0") -> None:
    """Expect that opening succeeds."""
    with me.world("accepted"):
        plane = me.open(int(ordinal))
        print(plane.gpus[me.rank]["uuid"], plane.gpus[me.rank]["nccl"])
        me.works()
        plane.close()
    assert me.reports() == []


# The calls of OPEN in their order, each with a code that it may return, and those that only rank 0 makes.
CALLS = {
    "cuInit": 999,
    "cuDriverGetVersion": 1,
    "cuDeviceGetCount": 3,
    "cuDeviceGet": 101,
    "cuDeviceGetName": 101,
    "cuDeviceGetUuid": 101,
    "cuDeviceGetPCIBusId": 1,
    "cuDevicePrimaryCtxRetain": 2,
    "cuCtxSetCurrent": 201,
    "cuThreadExchangeStreamCaptureMode": 1,
    "cuCtxGetStreamPriorityRange": 201,
    "cuStreamCreateWithPriority": 2,
    "cuModuleLoadDataEx": 222,
    "cuModuleGetFunction": 500,
    "cuLaunchKernel": 719,
    "cuStreamQuery": 600,
    "cuEventCreate": 2,
    "ncclGetUniqueId": 2,
    "ncclCommInitRankConfig": 2,
    "ncclCommGetAsyncError": 3,
    "ncclAllReduce": 3,
    "ncclBroadcast": 3,
    "ncclSend": 3,
    "ncclRecv": 3,
    "ncclGroupEnd": 3,
    "ncclAllGather": 3,
    "ncclReduceScatter": 3,
}


def failing(me: Rank) -> None:
    """Make each call of OPEN fail in turn on one rank: all ranks report it, and then it opens in the same world."""
    with me.world("failing"):
        for call, code in CALLS.items():
            if code in (600, 719):  # the first is no failure, the second ends the context and has a test of its own
                continue
            bad = 0 if call == "ncclGetUniqueId" else 1
            if me.rank == bad:
                # Loading asks for the driver's version, too.
                me.fail(call, 2 if call == "cuDriverGetVersion" else 1, code)
            text = me.refusal(start_timeout=2.0 if call.startswith("nccl") and call != "ncclGetUniqueId" else 30)
            assert f"rank {bad}: {call}" in text, (call, text)
            assert "returned" in text, (call, text)
            me.works()
            plane = me.open()
            plane.close()
    assert me.reports() == []


def codes(me: Rank) -> None:
    """Check that the text for each code of NCCL says what to do."""
    hints = ("P2P_DISABLE", "shm-size", "at fault", "versions", "share a GPU", "failed first")
    with me.world("codes"):
        for code, hint in enumerate(hints, 1):
            if me.rank == 1:
                me.fail("ncclCommInitRankConfig", 1, code)
            text = me.refusal(start_timeout=0.5)
            assert hint in text and "failed by order of the test" in text, text
            assert "rank 0: the wait for ncclCommInitRankConfig was given up" in text, text
    assert me.reports() == []


def survives(me: Rank, how: str, culprit: str, limit: str, *calls: str) -> None:
    """Kill or stop a rank in each call of OPEN; the others report it in time, and begin a new world."""
    seconds, bad = float(limit), int(culprit)
    for call in calls:
        Path(f"{call}.{me.rank}").touch()
        with me.world(f"{how} {call}", me.size + 1, me.rank + (me.rank >= bad), start_timeout=60.0):
            begun = time.monotonic()
            with pytest.raises(RankDiedError if how == "kill" else RankStalledError) as caught:
                me.open(start_timeout=seconds)
            took = time.monotonic() - begun
            assert caught.value.rank == bad, (call, caught.value)
            # The limit, the grace period for news of other ranks, and some time for a slow machine.
            assert took < 8 + (0 if how == "kill" else seconds + planes.GRACE + planes.RETURN), (call, took)
            print(call, f"{took:.2f} s", caught.value, flush=True)
        with me.world(f"after {how} {call}", start_timeout=60.0):
            plane = me.open(start_timeout=30.0)
            me.works()
            plane.close()
    assert me.reports() == []


def victim(me: Rank, how: str, culprit: str, call: str) -> None:
    """Run the rank that is killed or stopped, once the others are there."""
    until(lambda: all(Path(f"{call}.{rank}").exists() for rank in range(me.size - 1)), "the others", 600)
    with me.world(f"{how} {call}", rank=int(culprit), start_timeout=60.0):
        me.fail(call, 2 if call == "cuDriverGetVersion" else 1, -2 if how == "kill" else -3)
        me.open(start_timeout=60.0)
    raise AssertionError("still there")


def half_open(me: Rank) -> None:
    """Kill a rank in the warm-up; one rank reacts later than another, and its kernel's memory stays until then."""

    class Late(planes.CudaThread):
        told = False

        def wait(self, seconds: float) -> bool:
            """Wait as usual, but look at the world's state with a delay."""
            ended = super().wait(seconds)
            if not Late.told and runtime.current_engine().failure is not None:
                Late.told = True
                let_pass(0.7)
            return ended

    if me.rank == 0:
        planes.CudaThread = Late  # type: ignore[misc]
    with me.world("half open", start_timeout=60.0):
        if me.rank == 2:
            me.fail("ncclReduceScatter", 1, -2)  # all ranks have enqueued the calls before it
        with pytest.raises(RankDiedError, match="rank 2"):
            me.open()
    assert Late.told == (me.rank == 0)
    for made, ended in MADE.items():
        assert me.calls(made) == me.calls(ended) > 0, made
    with me.world("after", 2):
        me.open().close()
    assert me.reports() == [], me.reports()


def hangs(me: Rank, call: str, limit: str) -> None:
    """Make a call hang: all ranks report it, the world goes on, and the hanging thread is left alone."""
    with me.world("hangs"):
        if me.rank == 1:
            me.fail(call, 1, -1)
        begun = time.monotonic()
        text = me.refusal(start_timeout=float(limit))
        assert f"rank 1: {call}" in text and "has not returned" in text, text
        me.works()
        text = me.refusal(start_timeout=float(limit))
        assert f"rank 1: {call}" in text and "start the process again" in text, text
        me.works()
        assert time.monotonic() - begun < float(limit) + planes.GRACE + 4, "somebody has waited for the CUDA thread"
    print("the world has ended", flush=True)


def captures(me: Rank) -> None:
    """Open while another thread captures a graph, which other threads must not spoil."""
    stream, graph = ctypes.c_void_p(), ctypes.c_void_p()
    me.context()
    assert me.cuda.cuStreamCreateWithPriority(ctypes.byref(stream), 1, 0) == 0
    with me.world("captures"):
        assert me.cuda.cuStreamBeginCapture_v2(stream, 0) == 0  # global mode: unsafe calls of any thread spoil it
        plane = me.open()
        plane.close()
        assert me.cuda.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0
    assert me.reports() == []


def forks(me: Rank) -> None:
    """Fork: the child can neither use nor close the plane, nor open one; the parent goes on."""
    with me.world("forks"):
        plane = me.open()
        child, begun = os.fork(), time.monotonic()
        if child == 0:
            plane.close()
            try:
                planes._expect_no_fork()
            except engine.errors.ForkedError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert time.monotonic() - begun < 5, "the child has waited for a thread that it does not have"
        plane.close()
        me.open().close()
    assert me.calls("ncclCommAbort") == 2


def late(me: Rank, seconds: str) -> None:
    """Let one rank come to the communicator late: none is ready before it has come."""
    with me.world("late"):
        if me.rank == 1:
            work = planes._Opening._connect

            def connect(self: object, id: bytes) -> object:
                until(lambda: Path("waiting").exists(), "the other")
                let_pass(float(seconds))
                Path("came").touch()
                return work(self, id)

            planes._Opening._connect = connect
        else:
            do = planes._Opening._run_job

            def waits(self: object, job: str, id: bytes | None = None) -> None:
                if job == "connect":
                    Path("waiting").touch()
                do(self, job, id)
                assert job != "connect" or Path("came").exists(), "ready before all have come"

            planes._Opening._run_job = waits
        plane = me.open()
        plane.close()
    assert me.reports() == []


def busy(me: Rank) -> None:
    """Close a GPU with work on its stream: the work ends first, and its memory is freed afterwards."""
    with me.world("busy"):
        plane = me.open()
        freed: list[int] = []
        me.slow(0.3)
        me.then(lambda: freed.append(me.calls("ncclCommAbort") + me.calls("cuModuleUnload")))
        zero = ctypes.c_uint64(0)
        parameters = (ctypes.c_void_p * 16)(*[ctypes.addressof(zero)] * 16)
        thread = plane.cuda_thread
        stream, kernel = thread.stream, thread.kernel(0)  # only the CudaThread of mutants.py has them
        me.context()
        least, greatest, priority = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        me.cuda.cuCtxGetStreamPriorityRange(ctypes.byref(least), ctypes.byref(greatest))
        me.cuda.cuStreamGetPriority(stream, ctypes.byref(priority))
        assert priority.value == greatest.value < least.value
        status = me.cuda.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, stream, parameters, None)
        assert status == 0, status
        plane.close()
        assert freed == [0], "closed under a running kernel"
    assert me.reports() == []


def visited(me: Rank) -> None:
    """Close a GPU during another thread's call, which still finds everything that it uses, for good."""
    with me.world("visited"):
        plane = me.open()
        stream = ctypes.c_void_p()
        me.context()
        assert me.cuda.cuStreamCreateWithPriority(ctypes.byref(stream), 1, 0) == 0
        assert plane.cuda_thread.mark(stream) == ""  # only the CudaThread of mutants.py has it
        asked = me.calls("cuStreamIsCapturing")
        me.fail("cuStreamIsCapturing", 1, -1)
        threading.Thread(target=plane.cuda_thread.mark, args=(stream,), daemon=True).start()
        until(lambda: me.calls("cuStreamIsCapturing") > asked, "the call")
        plane.close()
        assert plane.cuda_thread.left
        for call in ("cuEventDestroy", "cuModuleUnload", "cuStreamDestroy", "cuDevicePrimaryCtxRelease"):
            assert me.calls(call) == 0, call
        assert plane.cuda_thread.mark(stream) == "it has been closed"
    assert me.reports() == []


def slow_kernel(me: Rank) -> None:
    """Give up a kernel that does not end; its resources are freed when it ends within the limit of the close."""
    me.cuda.stand_deadline(60000.0)
    with me.world("slow"):
        if me.rank == 1:
            me.slow(0.08)  # each of 42 kernels
        text = me.refusal(start_timeout=0.5)
        assert "rank 1: the wait for cuStreamQuery was given up" in text, text
        assert me.calls("cuModuleUnload") == me.calls("cuDevicePrimaryCtxRelease") == 1
        me.works()


def never_ends(me: Rank) -> None:
    """Run a kernel for longer than a close waits: nothing that it uses is freed, and that is reported."""
    with me.world("never"):
        me.slow(8.0)
        begun = time.monotonic()
        assert "cuStreamQuery was given up" in me.refusal(start_timeout=0.5)
        assert time.monotonic() - begun < 0.5 + 2 * 2 + 3
        assert me.calls("cuModuleUnload") == me.calls("cuDevicePrimaryCtxRelease") == 0
        me.works()


def rings(me: Rank) -> None:
    """Use the CUDA thread alone: a waiter sleeps exactly until it has ended, and an idle one starts at once."""
    found = libraries.load(None, None)
    cuda_thread = planes.CudaThread(found.addresses, 0, 0, 1, b"", [], slab=0, tables=0)
    for turn in range(2):
        let_pass(0.3)  # until the CUDA thread sleeps
        begun = time.monotonic()
        cuda_thread.begin("identify")
        assert cuda_thread.wait(20) or cuda_thread.wait(20)
        assert time.monotonic() - begun < 10, "nobody was woken"
        assert (cuda_thread.failure, cuda_thread.identity["devices"], cuda_thread.call) == (None, 1, None), turn
    me.fail("cuInit", 1, -1)
    cuda_thread.begin("identify")
    begun = time.monotonic()
    assert not cuda_thread.wait(0.5)
    assert time.monotonic() - begun > 0.4, "a wait that does not wait"
    assert cuda_thread.call == "cuInit"


def signalled(me: Rank) -> None:
    """Receive signals while a call that exceeds the limit is awaited: the CUDA thread still returns."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    with me.world("signalled"):
        signal.signal(signal.SIGALRM, lambda number, frame: None)
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        assert "was given up" in me.refusal(start_timeout=0.3)
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.5)  # after the limit, and before the call's end
        with pytest.raises(KeyboardInterrupt):
            me.open(start_timeout=0.3)
        assert planes._stuck == []
        me.open().close()
    assert me.reports() == []


if __name__ == "__main__":
    faulthandler.enable()
    program, number, ranks, *rest = sys.argv[1:]
    globals()[program](Rank(int(number), int(ranks)), *rest)
    sys.stdout.flush()
    if program != "hangs":
        os._exit(0)  # without the interpreter's shutdown, which other tests cover
