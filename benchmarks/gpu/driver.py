"""CUDA driver through ctypes, and arrays in device memory that the engine accepts like those of a framework.

No framework is needed: an array provides DLPack's exchange table, from which the engine gets its address and its
stream. So the measurements also run where PyTorch has no CUDA, and on the stand-ins of the tests.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import paths
from engine.config import config

PTX = paths.ROOT / "engine_ext/gpu/kernels.ptx"
KERNELS = "BENCHMARK_GPU_KERNELS"
"""Variable that names a library with the engine's kernels for the stand-in, which cannot run PTX."""
CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
BFLOAT16 = "bfloat16"
"""Dtype that NumPy lacks: values are uint16 with its bits."""


class DriverError(RuntimeError):
    """Error of a failed call of the driver."""


@functools.cache
def load_library() -> ctypes.CDLL:
    """Load the driver's library, which the setting `cuda_library` names, as the engine does."""
    chosen = config.load(config.read_environment()).cuda_library
    loaded = ctypes.CDLL(str(chosen or "libcuda.so.1"), mode=os.RTLD_NOW)
    if is_stand_in(loaded) and KERNELS in os.environ:
        ctypes.CDLL(os.environ[KERNELS])
    return loaded


def is_stand_in(loaded: ctypes.CDLL) -> bool:
    """Return whether a library is the tests' stand-in, by a function that no driver has."""
    return hasattr(loaded, "stand_report")


class CudaDriver:
    """Device whose primary context is current in this thread, and a stream that does not wait for stream 0."""

    def __init__(self, ordinal: int = 0) -> None:
        self.ordinal = ordinal
        self.library = load_library()
        self.context, self.stream = ctypes.c_void_p(), ctypes.c_void_p()
        device = ctypes.c_int()
        self.call_driver("cuInit", 0)
        self.call_driver("cuDeviceGet", ctypes.byref(device), ordinal)
        self.call_driver("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        self.call_driver("cuCtxSetCurrent", self.context)
        self.call_driver("cuStreamCreateWithPriority", ctypes.byref(self.stream), 1, 0)

    def call_driver(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver; raise `DriverError` with its name and its error code if it fails."""
        if code := getattr(self.library, name)(*arguments):
            raise DriverError(f"{name} returned {get_code_name(self.library, code)}")

    def read_number(self, name: str, *arguments: Any) -> int:
        """Call a function that writes an int, and return the int."""
        found = ctypes.c_int()
        self.call_driver(name, ctypes.byref(found), *arguments)
        return found.value

    def allocate_memory(self, nbytes: int) -> int:
        """Allocate device memory."""
        at = ctypes.c_uint64()
        self.call_driver("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(max(nbytes, 1)))
        return at.value

    def free_memory(self, at: int) -> None:
        """Free device memory, which must not be in use."""
        self.call_driver("cuMemFree_v2", ctypes.c_uint64(at))

    def put(self, at: int, values: NDArray[Any]) -> None:
        """Copy values to the device, and wait for the copy."""
        source = np.ascontiguousarray(values)
        size, pointer = ctypes.c_size_t(source.nbytes), ctypes.c_void_p(source.ctypes.data)
        if source.nbytes:
            self.call_driver("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(at), pointer, size, self.stream)
        self.synchronize()

    def get(self, at: int, like: NDArray[Any]) -> NDArray[Any]:
        """Copy values of that shape and dtype from the device, after all work of the stream."""
        values = np.empty_like(like)
        size, pointer = ctypes.c_size_t(values.nbytes), ctypes.c_void_p(values.ctypes.data)
        if values.nbytes:
            self.call_driver("cuMemcpyDtoHAsync_v2", pointer, ctypes.c_uint64(at), size, self.stream)
        self.synchronize()
        return values

    def synchronize(self) -> None:
        """Wait for the stream."""
        self.call_driver("cuStreamSynchronize", self.stream)

    def wait_for_device(self) -> None:
        """Wait until nothing of this process runs on the device."""
        self.call_driver("cuCtxSynchronize")

    def read_memory(self) -> tuple[int, int]:
        """Return the unused and the total bytes of the device."""
        unused, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call_driver("cuMemGetInfo_v2", ctypes.byref(unused), ctypes.byref(total))
        return unused.value, total.value

    def load_kernels(self) -> ctypes.c_void_p:
        """Load the engine's kernels, which the driver compiles."""
        made = ctypes.c_void_p()
        self.call_driver("cuModuleLoadDataEx", ctypes.byref(made), read_kernels(), 0, None, None)
        return made

    def find_kernel(self, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        """Find a kernel in a module."""
        found = ctypes.c_void_p()
        self.call_driver("cuModuleGetFunction", ctypes.byref(found), module, name.encode())
        return found

    def read_reports(self) -> list[str]:
        """Return errors that the stand-in has found; empty for a driver."""
        if not is_stand_in(self.library):
            return []
        self.library.stand_report.restype = ctypes.c_size_t
        text = ctypes.create_string_buffer(1 << 16)
        self.library.stand_report(text, ctypes.c_size_t(len(text)))
        return [f"the stand-in has found: {line}" for line in text.value.decode().splitlines()]


@functools.cache
def read_kernels() -> bytes:
    """Return the engine's kernels as shipped."""
    return Path(PTX).read_bytes()


def list_kernel_names() -> list[str]:
    """Return the names of the engine's kernels."""
    return [name.decode() for name in re.findall(rb"\.entry (\w+)", read_kernels())]


def get_code_name(loaded: ctypes.CDLL, code: int) -> str:
    """Return the name of an error code of the driver."""
    name = ctypes.c_char_p()
    if loaded.cuGetErrorName(code, ctypes.byref(name)) == 0 and name.value:
        return f"{name.value.decode()} ({code})"
    return str(code)


# ---- arrays ----------------------------------------------------------------------------------------------------------


class DlTensor(ctypes.Structure):
    """Structure `DLTensor` of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


BORROW = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DlTensor))
STREAM = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class ExchangeTable(ctypes.Structure):
    """Structure `DLPackExchangeAPI` of dlpack.h 1.3."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        *((name, ctypes.c_void_p) for name in ("previous", "allocate", "managed_from", "managed_to")),
        ("borrow", BORROW),
        ("current_stream", STREAM),
    )


class Array:
    """Array in device memory. All arrays of a process use the stream of one `CudaDriver`."""

    __dlpack_c_exchange_api__: ClassVar[Any]
    stream: ClassVar[int | None] = None

    def __init__(self, driver: CudaDriver, values: NDArray[Any], dtype: str = "") -> None:
        """Copy values to the device. `dtype` is that of `values` if it is not "bfloat16"."""
        self.driver = driver
        self.like = np.ascontiguousarray(values)
        self.code = 4 if dtype == BFLOAT16 else CODES[self.like.dtype.kind]
        self.shape = (ctypes.c_int64 * 1)(self.like.size)
        self.at = driver.allocate_memory(self.like.nbytes)
        self.device = f"cuda:{driver.ordinal}"
        Array.stream = driver.stream.value
        driver.put(self.at, self.like)

    def to_numpy(self) -> NDArray[Any]:
        """Return the values, after all work of the stream."""
        return self.driver.get(self.at, self.like)

    def free_memory(self) -> None:
        """Free the memory after all work of the stream."""
        self.driver.synchronize()
        self.driver.free_memory(self.at)


@BORROW
def _fill_tensor(array: Array, out: Any) -> int:
    told, kind = out[0], array.like.dtype
    told.data, told.device_type, told.device_id = array.at, 2, array.driver.ordinal
    told.ndim, told.shape, told.strides, told.byte_offset = 1, array.shape, None, 0
    told.code, told.bits, told.lanes = array.code, 8 * kind.itemsize, 1
    return 0


@STREAM
def _current_stream(_type: int, _ordinal: int, out: Any) -> int:
    out[0] = Array.stream
    return 0


_table = ExchangeTable(1, 3, None, None, None, None, _fill_tensor, _current_stream)
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_NAME = b"dlpack_exchange_api"  # a capsule keeps the pointer
Array.__dlpack_c_exchange_api__ = _capsule(ctypes.addressof(_table), _NAME, None)
