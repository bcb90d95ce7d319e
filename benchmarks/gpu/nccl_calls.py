"""Cost of a call of NCCL for the calling thread, with blocking and non-blocking communicators.

`python -m benchmarks.gpu.nccl_calls DIRECTORY HERE SAMPLES` is a rank; rank 0's file has the rows of the table.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu import ranks
from benchmarks.gpu.driver import CudaDriver
from benchmarks.gpu.native_calls import Calls, NcclCalls, make_row

COUNT = 256
CUDA_THREAD_NAP_NS = 20_000
"""Nanoseconds between two polls of the engine's CUDA thread (`NAP_NS`, engine_ext/gpu/cuda_thread.c)."""
IN_PROGRESS, UNDEFINED, ID_BYTES = 7, -(2**31), 128
WAIT = 60.0


class NcclConfig(ctypes.Structure):
    """Structure `ncclConfig_t` of 2.17, with the engine's values (engine_ext/gpu/nccl.h)."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        *((name, ctypes.c_uint) for name in ("magic", "version")),
        *((name, ctypes.c_int) for name in ("blocking", "cgaClusterSize", "minCTAs", "maxCTAs")),
        ("netName", ctypes.c_char_p),
        ("splitShare", ctypes.c_int),
    )


class Id(ctypes.Structure):
    """Structure `ncclUniqueId`."""

    _fields_ = (("bytes", ctypes.c_ubyte * ID_BYTES),)


class NcclError(RuntimeError):
    """Error of a failed call of NCCL."""


class NcclRank:
    """This process: NCCL, and its rank in the world."""

    def __init__(self, where: Path, here: dict[str, Any]) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = CudaDriver(ranks.get_ordinal(self.rank, here))
        self.nccl = ctypes.CDLL(here["nccl_library"], mode=os.RTLD_NOW)
        self.nccl.ncclGetLastError.restype = ctypes.c_char_p
        self.where = where
        self.calls = Calls(self.device)

    def call_nccl(self, name: str, *arguments: Any) -> None:
        """Call a function; with a non-blocking communicator, it may still be in progress."""
        if (code := getattr(self.nccl, name)(*arguments)) not in (0, IN_PROGRESS):
            raise NcclError(f"{name} returned {code}: {(self.nccl.ncclGetLastError(None) or b'').decode()}")

    def name(self, turn: int) -> Id:
        """Return the id of a communicator, which rank 0 publishes in a file."""
        made, file = Id(), self.where / f"id{turn}"
        if self.rank == 0:
            self.call_nccl("ncclGetUniqueId", ctypes.byref(made))
            partial = file.with_suffix(".partial")
            partial.write_bytes(bytes(made))
            partial.replace(file)
        deadline = time.monotonic() + WAIT
        while not file.exists():
            if time.monotonic() > deadline:
                raise NcclError("rank 0 has told no id")
            time.sleep(0.005)
        return Id.from_buffer_copy(file.read_bytes())

    def open(self, turn: int, blocking: bool) -> ctypes.c_void_p:
        """Open a communicator over all ranks."""
        made = ctypes.c_void_p()
        undefined = (UNDEFINED, UNDEFINED, UNDEFINED, None, UNDEFINED)
        config = NcclConfig(ctypes.sizeof(NcclConfig), 0xCAFEBEEF, 21700, int(blocking), *undefined)
        known = ctypes.byref(config)
        self.call_nccl("ncclCommInitRankConfig", ctypes.byref(made), self.size, self.name(turn), self.rank, known)
        self.wait_until_settled(made, "opened")
        return made

    def wait_until_settled(self, communicator: ctypes.c_void_p, what: str) -> None:
        """Wait until nothing is in progress."""
        state, deadline = ctypes.c_uint(IN_PROGRESS), time.monotonic() + WAIT
        while state.value == IN_PROGRESS:
            self.call_nccl("ncclCommGetAsyncError", communicator, ctypes.byref(state))
            if time.monotonic() > deadline:
                raise NcclError(f"a communicator has not {what}")
            time.sleep(0.001)
        if state.value:
            raise NcclError(f"a communicator has not {what}: code {state.value}")

    def close(self, communicator: ctypes.c_void_p, kind: str) -> list[dict[str, Any]]:
        """End a communicator together with the other rank, whose kernels may read from this one until then.

        A blocking communicator is destroyed, a non-blocking one aborted, as the engine does. Returns rows with the
        times.
        """
        self.device.synchronize()
        begun = time.perf_counter()
        self.call_nccl("ncclCommFinalize", communicator)
        self.wait_until_settled(communicator, "ended")
        finalized = time.perf_counter()
        end = "ncclCommDestroy" if kind == "blocking" else "ncclCommAbort"
        self.call_nccl(end, communicator)
        taken = {"ncclCommFinalize": finalized - begun, end: time.perf_counter() - finalized}
        return [make_row(f"{kind}: {name}", np.array([seconds])) for name, seconds in taken.items()]

    def measure_communicator(self, turn: int, samples: int) -> list[dict[str, Any]]:
        """Return rows for a communicator of one kind: blocking for turn 0, non-blocking for turn 1."""
        blocking = turn == 0
        begun = time.perf_counter()
        communicator = self.open(turn, blocking)
        opened = time.perf_counter() - begun
        source, target = (self.device.allocate_memory(4 * COUNT) for _ in range(2))
        self.device.put(source, np.zeros(COUNT, np.float32))
        kind = "blocking" if blocking else "non-blocking"
        rows = [make_row(f"{kind}: communicator opened", np.array([opened]))]
        addresses = [ctypes.cast(getattr(self.nccl, name), ctypes.c_void_p).value for name in FUNCTIONS]
        for grouped in (0, 1):
            for nap in (0,) if blocking else (0, CUDA_THREAD_NAP_NS):
                given = (communicator.value, source, target, COUNT, self.device.stream.value)
                calls = NcclCalls(*addresses, *given, grouped, int(not blocking), nap)
                self.calls.time_allreduce(calls, 3)  # connects the ranks
                returned, enqueued = self.calls.time_allreduce(calls, samples)
                what = f"{kind}: {'group of two allreduces' if grouped else 'allreduce'} of 1 KiB"
                if blocking:
                    rows.append(make_row(what, returned))
                    continue
                how = "looked at every 20 us, as the CUDA thread does" if nap else "looked at all the time"
                if not nap:
                    rows.append(make_row(f"{what}, the call alone", returned))
                rows.append(make_row(f"{what}, until it is enqueued, {how}", enqueued))
        rows += self.close(communicator, kind)
        for at in (source, target):
            self.device.free_memory(at)
        return rows


FUNCTIONS = ("ncclAllReduce", "ncclGroupStart", "ncclGroupEnd", "ncclCommGetAsyncError")


def main() -> None:
    """Measure both kinds of communicators."""
    where, known, samples = sys.argv[1:]
    me = NcclRank(Path(where), json.loads(Path(known).read_text(encoding="utf-8")))
    rows = [each for turn in (0, 1) for each in me.measure_communicator(turn, int(samples))]
    told = {"rows": rows, "problems": me.device.read_reports()}
    Path(where, f"{me.rank}.json").write_text(json.dumps(told), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
