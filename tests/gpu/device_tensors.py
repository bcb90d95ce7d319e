"""Tensors in the memory of the stand-in's device, with a framework that uses streams.

They offer DLPack's exchange table with the current stream, like torch's. Freed memory is reused.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import numpy as np

from ..standins.libraries import Device

CODES = {"f": 2, "i": 0, "u": 1, "b": 6, "c": 5, "bfloat16": 4}


class DlTensor(ctypes.Structure):
    """`DLTensor`."""

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


class Table(ctypes.Structure):
    """`DLPackExchangeAPI`."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("managed_from", ctypes.c_void_p),
        ("managed_to", ctypes.c_void_p),
        ("borrow", BORROW),
        ("current_stream", STREAM),
    )


class Framework:
    """State of the framework on the device: its stream, and the device's ordinal."""

    device: ClassVar[Device]
    stream: ClassVar[ctypes.c_void_p | None] = None
    ordinal: ClassVar[int] = 0

    @classmethod
    def start(cls) -> None:
        """Start using the device."""
        cls.device = Device()
        cls.stream = cls.device.stream


class DeviceTensor:
    """An array on the device."""

    __dlpack_c_exchange_api__: ClassVar[Any]
    whole: DeviceTensor | None = None  # the tensor that owns the memory

    def __init__(self, values: np.ndarray, late: float = 0.0) -> None:
        """Make a tensor whose values arrive on the framework's stream after `late` milliseconds."""
        self.like = np.ascontiguousarray(values)
        self.shape = (ctypes.c_int64 * max(self.like.ndim, 1))(*self.like.shape)
        self.device = f"cuda:{Framework.ordinal}"
        self.at = Framework.device.put(self.like)
        self.stream = Framework.stream
        if late:
            self.compute(self.like, late)

    def compute(self, values: np.ndarray, late: float) -> None:
        """Write other values on the framework's stream after `late` milliseconds; until then the content is garbage."""
        self.source = Framework.device.put(np.ascontiguousarray(values))
        self.compute_again(late)

    def compute_again(self, late: float) -> None:
        """Write the values again."""
        work = (Access * 2)(Access(self.source.value, self.like.nbytes, 0), Access(self.at.value, self.like.nbytes, 1))
        code = Framework.device.cuda.stand_compute(Framework.stream, work, 2, ctypes.c_double(late), b"compute")
        assert code == 0, code

    def numpy(self) -> np.ndarray:
        """Return the values, after all work on the framework's stream."""
        target = np.empty_like(self.like)
        cuda = Framework.device.cuda
        at = ctypes.c_void_p(target.ctypes.data)
        size = ctypes.c_size_t(target.nbytes)
        assert cuda.cuMemcpyDtoHAsync_v2(at, ctypes.c_uint64(self.at.value), size, Framework.stream) == 0
        assert cuda.cuStreamSynchronize(Framework.stream) == 0
        return target

    def slice(self, first: int, last: int) -> DeviceTensor:
        """Return rows of the tensor, in its memory."""
        part = object.__new__(DeviceTensor)
        part.like, part.stream, part.device, part.whole = self.like[first:last], self.stream, self.device, self
        part.shape = (ctypes.c_int64 * part.like.ndim)(*part.like.shape)
        part.at = ctypes.c_void_p(self.at.value + first * self.like[:1].nbytes)
        return part

    def __del__(self) -> None:
        if self.whole is not None:
            return
        # Like a caching allocator: the next owner uses the memory on the stream on which it was allocated.
        work = (Access * 1)(Access(self.at.value, self.like.nbytes, 1))
        Framework.device.cuda.stand_compute(self.stream, work, 1, ctypes.c_double(0), b"whoever gets the memory next")


class Room:
    """Allocates tensors of these sizes in bytes, like a caching allocator on the stream that was current.

    The previous owner still uses the memory for `late` milliseconds.
    """

    def __init__(self, late: float = 0.5) -> None:
        self.stream = Framework.stream
        self.late = late

    def __call__(self, sizes: list[int]) -> list[DeviceTensor]:
        cuda = Framework.device.cuda
        assert cuda.cuCtxSetCurrent(Framework.device.context) == 0
        made = [DeviceTensor(np.zeros(size, np.uint8)) for size in sizes]
        for tensor in made:
            tensor.stream = self.stream
            if tensor.like.nbytes:
                work = (Access * 1)(Access(tensor.at.value, tensor.like.nbytes, 1))
                assert (
                    cuda.stand_compute(self.stream, work, 1, ctypes.c_double(self.late), b"had the memory before") == 0
                )
        return made


class Access(ctypes.Structure):
    """`stand_access`."""

    _fields_ = (("at", ctypes.c_size_t), ("size", ctypes.c_size_t), ("write", ctypes.c_int))


@BORROW
def _borrow(tensor: DeviceTensor, out: Any) -> int:
    told, kind = out[0], tensor.like.dtype
    told.data = tensor.at.value
    told.device_type, told.device_id, told.ndim = 2, Framework.ordinal, tensor.like.ndim
    told.code, told.bits, told.lanes = CODES[kind.name if kind.name in CODES else kind.kind], 8 * kind.itemsize, 1
    told.shape, told.strides, told.byte_offset = tensor.shape, None, 0
    return 0


@STREAM
def _current_stream(_type: int, _ordinal: int, out: Any) -> int:
    out[0] = Framework.stream
    return 0


def capsule(table: Table) -> Any:
    """Return a capsule with a type's exchange table, which must not move."""
    return _capsule(ctypes.addressof(table), _NAME, None)


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_NAME = b"dlpack_exchange_api"
_table = Table(1, 3, None, None, None, None, _borrow, _current_stream)
DeviceTensor.__dlpack_c_exchange_api__ = capsule(_table)
