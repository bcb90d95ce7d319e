"""Adapter of MXNet's arrays, which MXNet computes asynchronously, and which are used once they are complete.

`NDArray` has neither DLPack methods nor the buffer protocol, but creates DLPack capsules. Creating a capsule for
writing waits for all queued reads and writes of the array in MXNet; reading the pointer alone does not. So an array is
reduced in place, and later computations of MXNet read the result.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mxnet
import numpy as np

from ..collectives.adapters import ProtocolAdapter, register
from ..errors import UnsupportedTensorError


class MXNetAdapter(ProtocolAdapter):
    """Adapter for `mxnet.nd.NDArray` and `mxnet.np.ndarray`, dense and in main memory."""

    def store(self, tensor: Any, result: Any) -> None:
        own = self._view(tensor)
        if own.ctypes.data == result.ctypes.data:
            return  # The result is in place already.
        tensor[:] = result.reshape(tensor.shape)

    def as_framework_tensor(self, tensor: Any, output: Any) -> Any:
        """Copy `output` to an array of MXNet, of the same interface as `tensor`."""
        if isinstance(tensor, mxnet.np.ndarray):
            return mxnet.np.array(output, dtype=output.dtype)
        return mxnet.nd.array(output, dtype=output.dtype)

    def make_counts(self, rows: Any) -> Any:
        return mxnet.nd.array(rows, dtype="int32")

    def cast(self, tensor: Any, dtype: Any) -> tuple[Any, Any]:
        check(tensor)
        if np.dtype(tensor.dtype).kind != "f":
            return tensor, None
        if dtype == "bfloat16":
            raise UnsupportedTensorError("MXNet casts no array to bfloat16; use Compression.fp16")
        return tensor.astype(dtype), tensor.dtype

    def _view(self, tensor: Any) -> Any:
        """Wait for MXNet's queued work on an array, and return a NumPy view of it; of bool, a copy."""
        check(tensor)
        if np.dtype(tensor.dtype) == np.bool_:  # Its capsule wrongly declares elements of one bit.
            return tensor.asnumpy()
        lent = np.from_dlpack(_Lender(tensor))
        memory = lent.__array_interface__  # NumPy makes arrays from DLPack read-only.
        address, _ = memory["data"]
        return np.asarray(SimpleNamespace(lent=lent, __array_interface__={**memory, "data": (address, False)}))


class _Lender:
    """Wrapper of an array with the methods of DLPack."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        return self._tensor.to_dlpack_for_write()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # main memory


def check(tensor: Any) -> None:
    """Raise UnsupportedTensorError unless the engine supports an array. It does not wait for MXNet."""
    if tensor.stype != "default":
        raise UnsupportedTensorError(
            f"an array is stored as {tensor.stype}; the engine takes dense ones: use tostype('default')"
        )
    if tensor.context.device_type not in ("cpu", "cpu_pinned", "cpu_shared"):
        raise UnsupportedTensorError(
            f"an array is on {tensor.context}; the engine works in main memory: use as_in_context(mxnet.cpu())"
        )
    if np.dtype(tensor.dtype).names:
        raise UnsupportedTensorError(
            "an array is of MXNet's bfloat16, whose memory it does not export; use float16 or float32"
        )


register(mxnet.nd.NDArray, MXNetAdapter())
