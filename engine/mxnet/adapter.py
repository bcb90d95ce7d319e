"""The adapter of MXNet's arrays, which are computed when somebody waits for them: the engine does, and then lends them.

`NDArray` speaks neither DLPack nor the buffer protocol, but makes capsules. Making one that is for writing waits for
whatever MXNet's own engine has still to read from the array or to write to it; the pointer alone does not wait. So an
array is reduced in place, and what MXNet computes afterwards reads the result.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mxnet
import numpy as np

from ..adapters import ProtocolAdapter, register
from ..errors import UnsupportedTensorError


class MXNetAdapter(ProtocolAdapter):
    """`mxnet.nd.NDArray` and `mxnet.np.ndarray`, dense and in main memory."""

    def store(self, tensor: Any, result: Any) -> None:
        own = self._view(tensor)
        if own.ctypes.data == result.ctypes.data:
            return  # the result is there already
        tensor[:] = result.reshape(tensor.shape)

    def result(self, tensor: Any, output: Any) -> Any:
        if isinstance(tensor, mxnet.np.ndarray):
            return mxnet.np.array(output, dtype=output.dtype)
        return mxnet.nd.array(output, dtype=output.dtype)

    def counts(self, rows: Any) -> Any:
        return mxnet.nd.array(rows, dtype="int32")

    def cast(self, tensor: Any, dtype: Any) -> tuple[Any, Any]:
        check(tensor)
        if np.dtype(tensor.dtype).kind != "f":
            return tensor, None
        if dtype == "bfloat16":
            raise UnsupportedTensorError("MXNet casts no array to bfloat16; use Compression.fp16")
        return tensor.astype(dtype), tensor.dtype

    def _view(self, tensor: Any) -> Any:
        """A NumPy array in the memory of an array, when all that MXNet has queued for it is done; of bool, a copy."""
        check(tensor)
        if np.dtype(tensor.dtype) == np.bool_:  # its capsule says that an element has one bit
            return tensor.asnumpy()
        lent = np.from_dlpack(_Lender(tensor))
        memory = lent.__array_interface__  # NumPy lends no memory of DLPack for writing
        address, _ = memory["data"]
        return np.asarray(SimpleNamespace(lent=lent, __array_interface__={**memory, "data": (address, False)}))


class _Lender:
    """An array that speaks DLPack."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        return self._tensor.to_dlpack_for_write()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # main memory


def check(tensor: Any) -> None:
    """Raise UnsupportedTensorError unless the engine can work on an array. It waits for nothing."""
    if tensor.stype != "default":
        raise UnsupportedTensorError(
            f"an array is stored as {tensor.stype}; the engine takes dense ones: use tostype('default')"
        )
    if tensor.context.device_type not in ("cpu", "cpu_pinned", "cpu_shared"):
        raise UnsupportedTensorError(
            f"an array is on {tensor.context}; the engine works in main memory: use as_in_context(mxnet.cpu())"
        )
    if np.dtype(tensor.dtype).names:
        raise UnsupportedTensorError("an array is of MXNet's bfloat16, which it does not lend; use float16 or float32")


register(mxnet.nd.NDArray, MXNetAdapter())
