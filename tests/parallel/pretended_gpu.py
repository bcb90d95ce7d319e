"""Pretended GPUs for ranks that are threads: tensors claim to be on one, and no data moves.

pretended_gpu.c is the device. Tests see with it which gradients travel together, and when, without a driver, NCCL or
stand-ins for them.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from engine.native import core, gradients

from ..gpu.device_tensors import BORROW, CODES, STREAM, Table, capsule
from ..standins import LIBRARY, compiled

ROOM = 1 << 20  # size of a log in words


@cache
def library() -> Any:
    """C library of this process."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(__file__).with_suffix(".c")
        found = ctypes.CDLL(str(compiled(Path(directory) / "pretended_gpu.so", [source], *LIBRARY)))
    found.pretended_begin.restype = ctypes.c_void_p
    found.pretended_words.restype = ctypes.c_uint64
    return found


class PretendedTensor:
    """Array that claims to be on cuda:0."""

    __dlpack_c_exchange_api__: ClassVar[Any]
    device = "cuda:0"

    def __init__(self, count: int, dtype: Any = np.float32) -> None:
        self.like = np.zeros(count, dtype)
        self.shape = (ctypes.c_int64 * 1)(count)


class PretendedGpu:
    """Device of an engine from now on; call `end` when the engine is closed."""

    def __init__(self, engine: core.Engine) -> None:
        self.log = (ctypes.c_uint64 * ROOM)()
        self.at = ctypes.c_void_p(library().pretended_begin(self.log, ctypes.c_uint64(ROOM)))
        self.device = self.at.value  # the address that a CUDA thread uses; `device` is its first member
        engine.opener = lambda _ordinal: None
        engine.use(self)  # type: ignore[arg-type]

    def count(self) -> int:
        """Length of the log in words, once all work that was handed over has ended."""
        return int(library().pretended_words(self.at))

    def travelled(self, begin: int, end: int) -> list[tuple[int, ...]]:
        """Element counts of the float32 tensors that travelled together, for each entry."""
        found = []
        while begin < end:
            rows = self.log[begin]
            found.append(tuple(self.log[begin + 1 + k] // 4 for k in range(rows)))
            begin += 1 + rows
        return found

    def end(self) -> None:
        """Stop the device's thread."""
        library().pretended_end(self.at)


class Parameter:
    """Parameter on the GPU, with or without a gradient; its number of elements is its name."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.memory = PretendedTensor(count)
        self.grad: Any = None


class Optimizer:
    """Parameters with these numbers of elements, whose gradients are reduced by hooks, except those in `without`."""

    def __init__(
        self, engine: core.Engine, counts: list[int], number: int = 0, without: Collection[int] = frozenset()
    ) -> None:
        self.parameters = [Parameter(count) for count in counts]
        self.group = gradients.GradientGroup(engine, self, 0, number=number)
        self.hooks = {
            k: self.group.add(each, f"gradient{number}.{each.count}", None)
            for k, each in enumerate(self.parameters)
            if k not in without
        }

    def bring(self, k: int, dtype: Any = np.float32) -> None:
        """Submit a gradient, as the backward pass does."""
        self.parameters[k].grad = PretendedTensor(self.parameters[k].count, dtype)
        self.hooks[k](self.parameters[k])

    def finish(self) -> None:
        """End the backward pass."""
        self.group.finish()
        for parameter in self.parameters:
            parameter.grad = None

    def memory_of(self, parameter: Parameter) -> Any:
        return parameter.memory

    def replace(self, _index: int, _parameter: Parameter, gradient: Any) -> Any:
        return gradient

    def begin_pass(self) -> None:
        pass

    def shares_memory(self, _gradient: Any) -> bool:
        return False

    def rooms_for(self, _index: int) -> Any:
        return pytest.fail  # never called: no gradient is sparse

    def room_for(self, index: int) -> PretendedTensor:
        return PretendedTensor(self.parameters[[*self.hooks][index]].count)


@BORROW
def _borrow(tensor: PretendedTensor, out: Any) -> int:
    told, kind = out[0], tensor.like.dtype
    told.data = tensor.like.ctypes.data
    told.device_type, told.device_id, told.ndim = 2, 0, 1
    told.code, told.bits, told.lanes = CODES[kind.kind], 8 * kind.itemsize, 1
    told.shape, told.strides, told.byte_offset = tensor.shape, None, 0
    return 0


@STREAM
def _current_stream(_type: int, _ordinal: int, out: Any) -> int:
    out[0] = None
    return 0


_table = Table(1, 3, None, None, None, None, _borrow, _current_stream)
PretendedTensor.__dlpack_c_exchange_api__ = capsule(_table)
