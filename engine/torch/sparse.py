"""Reduction of sparse tensors: their entries are gathered, and added up on every rank.

Only stored entries are sent. Each rank first adds up its duplicates, so that a row of an embedding that a batch looks
up a thousand times is sent once.

torch checks the indices of a sparse tensor only on request. So each rank checks its own tensor before it is sent, and
submits a description of the fault instead. Then every rank raises an error, and none waits or reads invalid memory.

All ranks add up the same entries in the order of the ranks, so they have the same bits. Half precision is added in
float32 and rounded once, integers are added exactly, as in an allreduce of dense tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..collectives.failures import announce_failure
from ..collectives.handles import Handle
from ..collectives.process_sets import ProcessSet, global_process_set
from ..collectives.reduce_ops import Average, Op, Sum
from ..errors import EngineError, UnsupportedTensorError
from ..native import core
from .adapter import DeviceAllocator, check_device, flat_over

Parts = Sequence[tuple[Any, tuple[int, ...], int]]
Fault = tuple[int, int, int]
Brought = tuple[torch.Tensor, torch.Tensor, list[int], Fault | None]

# Faults of a sparse tensor: the values of `FAULT_*` in engine_ext/shared/layout.h.
INDEX, ORDER = 1, 2


class SparseHandle(Handle):
    """Handle that can also be called, like the function that Horovod returns instead."""

    __slots__ = ()

    def __call__(self) -> Any:
        """Wait for the operation and return its result, like `wait`."""
        return self.wait()


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None = None, op: int | None = None, process_set: ProcessSet = global_process_set
) -> SparseHandle:
    """Start `sparse_allreduce`; see there. `synchronize(handle)` gives its result, and so does `handle()`."""
    return start(process_set.engine, tensor, name, Average if op is None else Op(op), blocking=False)


def sparse_allreduce(
    tensor: torch.Tensor, name: str | None = None, op: int | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Add up a sparse tensor over all ranks. Collective.

    Parameters
    ----------
    tensor : torch.Tensor
        Tensor of layout `torch.sparse_coo`, in main memory or on a CUDA device, with at most 10 dimensions; coalesced
        or not. The dtypes of `engine.allreduce`. Entries may differ by rank; dtype, shape and the number of sparse
        dimensions may not.
    name : str, optional
        Name of the operation, equal on all ranks.
    op : Op, optional
        `Average` (by default) or `Sum`. The divisor of `Average` is the number of ranks, for every entry.
    process_set : ProcessSet, optional
        Process set whose ranks take part.

    Returns
    -------
    torch.Tensor
        Coalesced tensor of the input's dtype and shape, bitwise equal on all ranks, with an entry for each index that
        any rank has. No gradient flows through it.

    Raises
    ------
    UnsupportedTensorError
        The tensor or the operation is not supported; or it is `Average` of bool.
    MismatchError
        The tensors differ in dtype, shape or sparse dimensions; or one of them has indices outside of its shape, or is
        marked as coalesced and is not. Every rank raises it, and it names the fault.
    EngineError
        Same as for `engine.allreduce`.
    """
    result = start(process_set.engine, tensor, name, Average if op is None else Op(op), blocking=True).wait()
    assert isinstance(result, torch.Tensor)
    return result


def start(
    engine: core.Engine,
    tensor: torch.Tensor,
    name: str | None,
    op: Op,
    prescale: float = 1.0,
    postscale: float = 1.0,
    blocking: bool = False,
) -> SparseHandle:
    """Start to add up a sparse tensor. Parameters and errors are those of `sparse_allreduce` and `add_up`."""
    try:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"expected a torch.Tensor, not {type(tensor).__qualname__}")
        indices, values, shape, fault = extract_parts(tensor, op, "a tensor")
        room = DeviceAllocator(tensor.device) if tensor.is_cuda else None
        asked = shape, int(op), prescale, postscale, fault
        native = engine.allgather_group([indices, values], name, blocking, asked, room)
    except Exception as error:
        announce_failure(engine, "allgather", name, error)
        raise
    return SparseHandle(
        native, None, lambda _: add_up(native.gathered_group, values.dtype, shape, op, prescale, postscale)
    )


def extract_parts(tensor: torch.Tensor, op: Op, what: str) -> Brought:
    """Return the parts of a sparse tensor to send: indices (int64, a row for each value), values, shape, fault.

    With a fault, indices and values are empty. Raises UnsupportedTensorError like `sparse_allreduce`.
    """
    if tensor.layout is not torch.sparse_coo:
        raise UnsupportedTensorError(
            f"{what} has layout {tensor.layout}, not torch.sparse_coo; dense tensors have allreduce"
        )
    check_device(tensor, what)
    if op not in (Sum, Average):
        raise UnsupportedTensorError(
            f"{what} is sparse, and sparse tensors support only Sum and Average, not {op.name.title()}; make it dense"
        )
    if tensor.dtype not in _WIDE:
        raise UnsupportedTensorError(f"{what} is {tensor.dtype}, which the engine does not reduce; convert it first")
    if tensor.dtype is torch.bool and op is Average:
        raise UnsupportedTensorError(f"{what} is bool, which has no Average; use Sum (any rank), or convert it")
    tensor, shape, sparse = tensor.detach(), list(tensor.shape), tensor.sparse_dim()
    fault = fault_of(tensor)
    if fault is not None:  # Not even torch may read such entries.
        return (
            torch.empty(0, sparse, dtype=torch.int64, device=tensor.device),
            torch.empty([0, *shape[sparse:]], dtype=tensor.dtype, device=tensor.device),
            shape,
            fault,
        )
    if not tensor.is_coalesced():
        wide = _WIDE[tensor.dtype]
        tensor = tensor.coalesce() if wide is tensor.dtype else tensor.to(wide).coalesce().to(tensor.dtype)
    return tensor.indices().t().contiguous(), tensor.values().contiguous(), shape, None


def fault_of(tensor: torch.Tensor) -> Fault | None:
    """Return the kind, dimension and number of the first bad dimension or entry of a `sparse_coo` tensor, if any.

    torch itself makes sure that the numbers of indices, values and dimensions match.
    """
    indices = tensor.detach()._indices()
    if not indices.numel():
        return None
    least, most = (each.tolist() for each in torch.aminmax(indices, dim=1))
    for dimension, (low, high, length) in enumerate(zip(least, most, tensor.shape, strict=False)):
        if low < 0 or high >= length:
            return INDEX, dimension, low if low < 0 else high
    if tensor.is_coalesced():
        keys = _keys(indices, tensor.shape)
        after = keys[1:] > keys[:-1]
        if not after.all():
            return ORDER, 0, int(after.int().argmin()) + 1
    return None


def add_up(
    parts: Parts, dtype: torch.dtype, shape: Sequence[int], op: Op, prescale: float = 1.0, postscale: float = 1.0
) -> torch.Tensor:
    """Add up or average the entries of all ranks, which `bring` has gathered.

    Indices and values in `parts` are (memory, rows of each rank, bytes of a row), sorted and without duplicates within
    each rank. The factors apply to each rank's values and to the result.
    """
    (index_memory, counts, index_bytes), (value_memory, _, _) = parts
    total, sparse = sum(counts), index_bytes // 8
    rest = list(shape[sparse:])
    places = flat_over(index_memory, torch.int64).view([total, sparse])
    values = flat_over(value_memory, dtype).view([total, *rest])
    keys, slots = torch.unique(_keys(places.t(), shape), sorted=True, return_inverse=True)
    if total and not 0 <= int(keys[0]) <= int(keys[-1]) < math.prod(shape[:sparse]):
        # Every rank checks its own entries, so this one was changed after the check.
        raise EngineError(
            f"a rank has changed a sparse tensor of shape {list(shape)} before it was sent: check its indices"
        )
    wide = _WIDE[dtype]
    result = torch.zeros([len(keys), *rest], dtype=wide, device=values.device)
    # No rank has an index twice, so each addition changes an entry at most once, in the order of ranks.
    for slot, value in zip(torch.split(slots, list(counts)), torch.split(values, list(counts)), strict=True):
        if prescale != 1.0:
            value = (value.to(wide) * prescale).to(dtype)
        result[slot] = result[slot] + value.to(wide)
    if op is Average:
        result = _divide_total(result, len(counts))
    if postscale != 1.0:
        result = result * postscale
    indices = torch.empty(sparse, len(keys), dtype=torch.int64, device=values.device)
    for column in reversed(range(sparse)):
        indices[column] = keys % max(shape[column], 1)
        keys = keys // max(shape[column], 1)
    return torch.sparse_coo_tensor(indices, result.to(dtype), list(shape), is_coalesced=True, check_invariants=False)


def _keys(columns: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return the row-major position of each index. `columns`: a row of indices for each sparse dimension."""
    if not len(columns):
        return torch.zeros(columns.shape[1], dtype=torch.int64, device=columns.device)
    keys = columns[0]
    for column, length in zip(columns[1:], shape[1:], strict=False):
        keys = (keys * length).add_(column)
    return keys


def _divide_total(total: torch.Tensor, size: int) -> torch.Tensor:
    if total.is_floating_point():
        return total / size
    return torch.div(total, size, rounding_mode="trunc")


# Dtypes in which entries are added up.
_WIDE: dict[torch.dtype, Any] = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.int8: torch.int64,
    torch.uint8: torch.int64,
    torch.int16: torch.int64,
    torch.int32: torch.int64,
    torch.int64: torch.int64,
    torch.bool: torch.int64,
}
