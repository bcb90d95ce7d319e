"""Python interface of calls.c: costs of calls of the driver and of NCCL, in seconds."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import native, paths
from benchmarks.common.stats import Summary
from benchmarks.gpu.driver import CudaDriver, DriverError

WHY = 512
WITHOUT_WORK = "pack_bytes"  # kernel that is launched without rows
Samples = NDArray[np.float64]


class NcclCalls(ctypes.Structure):
    """Structure `nccl_calls` of calls.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("all_reduce", "group_start", "group_end", "async_error")),
        *((name, ctypes.c_void_p) for name in ("communicator", "source", "target")),
        ("count", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("grouped", ctypes.c_int),
        ("polled", ctypes.c_int),
        ("nap_ns", ctypes.c_long),
    )


@functools.cache
def load_library() -> ctypes.CDLL:
    """Compile and load calls.c."""
    source = str(paths.ROOT / "benchmarks/gpu/calls.c")
    loaded = ctypes.CDLL(str(native.compile_source(source, shared=True, include=[paths.ROOT])))
    loaded.calls_name.restype = ctypes.c_char_p
    loaded.calls_current_stream.restype = ctypes.c_double
    return loaded


def make_row(name: str, samples: Samples) -> dict[str, Any]:
    """Return one row of a table of costs."""
    return {"name": name, **Summary.from_samples(samples.tolist()).record()}


class Calls:
    """Functions of calls.c on a device."""

    def __init__(self, device: CudaDriver) -> None:
        self.device = device
        kernel = device.find_kernel(device.load_kernels(), WITHOUT_WORK)
        self._call_checked("calls_open", ctypes.c_void_p(device.library._handle), kernel)

    def list_calls(self) -> list[str]:
        """Return the names of the calls that `time_driver_call` measures, by number."""
        return [load_library().calls_name(which).decode() for which in range(load_library().calls_count())]

    def time_driver_call(self, which: int, batch: int, samples: int) -> Samples:
        """Return the seconds of a call; each sample is the mean of a batch."""
        seconds = np.empty(samples)
        self._call_checked("calls_measure", which, batch, _get_pointer(seconds), samples)
        return seconds

    def wake(self, samples: int) -> tuple[Samples, Samples]:
        """Return the seconds until a woken thread runs, and those of the waking call."""
        woken, rung = np.empty(samples), np.empty(samples)
        if code := load_library().calls_wake(_get_pointer(woken), _get_pointer(rung), samples):
            raise OSError(code, "a thread cannot be started")
        return woken, rung

    def time_allreduce(self, calls: NcclCalls, samples: int) -> tuple[Samples, Samples]:
        """Return the seconds until an allreduce has returned, and until it is enqueued."""
        returned, enqueued = np.empty(samples), np.empty(samples)
        if code := load_library().calls_nccl(
            ctypes.byref(calls), _get_pointer(returned), _get_pointer(enqueued), samples
        ):
            raise DriverError(f"ncclAllReduce: {'the driver has failed' if code < 0 else f'code {code}'}")
        return returned, enqueued

    def _call_checked(self, name: str, *arguments: Any) -> None:
        why = ctypes.create_string_buffer(WHY)
        if getattr(load_library(), name)(*arguments, why, ctypes.c_size_t(WHY)):
            raise DriverError(why.value.decode())


def _get_pointer(values: Samples) -> ctypes.c_void_p:
    return ctypes.c_void_p(values.ctypes.data)
