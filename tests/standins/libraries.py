"""The stand-ins in this process, through ctypes: a device with one stream, arrays on it, and communicators."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

DTYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
}
OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
IN_PROGRESS = 7


class Failed(Exception):
    """A call did not succeed."""

    def __init__(self, name: str, code: int, text: str = "") -> None:
        super().__init__(f"{name} returned {code} {text}")
        self.code = code


class Config(ctypes.Structure):
    """`ncclConfig_t` of 2.17."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        *((name, ctypes.c_uint) for name in ("magic", "version")),
        *((name, ctypes.c_int) for name in ("blocking", "cgaClusterSize", "minCTAs", "maxCTAs")),
        ("netName", ctypes.c_char_p),
        ("splitShare", ctypes.c_int),
    )


class Id(ctypes.Structure):
    """`ncclUniqueId`."""

    _fields_ = (("bytes", ctypes.c_char * 128),)


class Device:
    """Device 0 of this process, with a non-blocking stream."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        self.cuda.stand_report.restype = ctypes.c_size_t
        self.cuda.stand_deadline.argtypes = [ctypes.c_double]
        context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)
        self.context = context
        self.stream = self.new_stream()

    def call(self, name: str, *arguments: Any) -> None:
        """Call the driver."""
        if code := getattr(self.cuda, name)(*arguments):
            raise Failed(name, code)

    def new_stream(self) -> ctypes.c_void_p:
        """Make a non-blocking stream."""
        stream = ctypes.c_void_p()
        self.call("cuStreamCreateWithPriority", ctypes.byref(stream), 1, 0)
        return stream

    def put(self, values: np.ndarray) -> ctypes.c_void_p:
        """Make device memory with these values, which are stored when this returns."""
        at = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(max(values.nbytes, 1)))
        source = np.ascontiguousarray(values)
        pointer = ctypes.c_void_p(source.ctypes.data)
        self.call("cuMemcpyHtoDAsync_v2", at, pointer, ctypes.c_size_t(values.nbytes), self.stream)
        self.synchronize()
        return ctypes.c_void_p(at.value)

    def get(self, at: ctypes.c_void_p, like: np.ndarray) -> np.ndarray:
        """Wait for the stream, and copy values of that shape and type to the host."""
        values = np.empty_like(like)
        target = ctypes.c_void_p(values.ctypes.data)
        self.call(
            "cuMemcpyDtoHAsync_v2", target, ctypes.c_uint64(at.value), ctypes.c_size_t(values.nbytes), self.stream
        )
        self.synchronize()
        return values

    def synchronize(self) -> None:
        """Wait for the stream."""
        self.call("cuStreamSynchronize", self.stream)

    def reports(self) -> list[str]:
        """Problems that the stand-ins have found."""
        text = ctypes.create_string_buffer(1 << 16)
        self.cuda.stand_report(text, ctypes.c_size_t(len(text)))
        return text.value.decode().splitlines()


class Communicators:
    """NCCL, and communicators of this rank."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.nccl = ctypes.CDLL("libnccl.so.2")
        self.nccl.ncclGetLastError.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: Any, comm: ctypes.c_void_p | None = None) -> None:
        """Call NCCL; with a non-blocking communicator, wait until it is no longer in progress."""
        code = getattr(self.nccl, name)(*arguments)
        if comm is not None:
            self.wait(comm)
        if code not in (0, IN_PROGRESS):
            raise Failed(name, code, self.nccl.ncclGetLastError(None).decode())

    def state(self, comm: ctypes.c_void_p) -> int:
        """State that ncclCommGetAsyncError gives."""
        state = ctypes.c_int(-1)
        self.call("ncclCommGetAsyncError", comm, ctypes.byref(state))
        return state.value

    def wait(self, comm: ctypes.c_void_p) -> None:
        """Poll until a communicator is no longer in progress."""
        while (state := self.state(comm)) == IN_PROGRESS:
            pass
        if state:
            raise Failed("ncclCommGetAsyncError", state, self.nccl.ncclGetLastError(comm).decode())

    def id(self) -> bytes:
        """Ask for an id."""
        made = Id()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)

    def begin(self, size: int, name: bytes, rank: int, blocking: bool = False) -> ctypes.c_void_p:
        """Begin to open a communicator."""
        undefined = -(2**31)
        config = Config(
            ctypes.sizeof(Config), 0xCAFEBEEF, 21700, blocking, undefined, undefined, undefined, None, undefined
        )
        comm = ctypes.c_void_p()
        self.call(
            "ncclCommInitRankConfig", ctypes.byref(comm), size, Id.from_buffer_copy(name), rank, ctypes.byref(config)
        )
        return comm

    def open(self, size: int, name: bytes, rank: int, blocking: bool = False) -> ctypes.c_void_p:
        """Open a communicator."""
        comm = self.begin(size, name, rank, blocking)
        self.wait(comm)
        return comm

    def group(self, comm: ctypes.c_void_p, calls: Callable[[], None]) -> None:
        """Make calls as one group, and wait until it is on the stream."""
        self.call("ncclGroupStart")
        calls()
        self.call("ncclGroupEnd", comm=comm)
