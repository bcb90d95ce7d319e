"""Collectives for NumPy arrays, framework tensors, and objects with DLPack or the buffer protocol."""

from __future__ import annotations

from typing import Any

from ..errors import ArgumentError
from ..native import handles, memory
from .adapters import Adapter, adapter_of
from .compression import resolve
from .failures import announce_failure
from .handles import Handle
from .process_sets import ProcessSet, global_process_set
from .reduce_ops import Average, Op


def allreduce_async_(
    tensor: Any,
    op: int | None = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = None,
) -> Handle:
    """Start `allreduce_`; see there. The tensor must not be accessed until `synchronize` returns."""
    return _reduce_in_place(
        tensor, op, name, prescale_factor, postscale_factor, process_set, compression, blocking=False
    )


def allreduce_async(
    tensor: Any,
    op: int | None = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = None,
) -> Handle:
    """Start `allreduce`; see there. The tensor must not be written to until `synchronize` returns."""
    return _reduce(
        "allreduce", tensor, op, name, prescale_factor, postscale_factor, process_set, compression, blocking=False
    )


def allreduce(
    tensor: Any,
    op: int | None = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = None,
) -> Any:
    """Combine a tensor over all ranks, element by element. Collective.

    The result is not part of an autograd graph, even if a torch tensor requires a gradient. `engine.torch.allreduce` is
    differentiable.

    Parameters
    ----------
    tensor : array or tensor
        Any shape; float16, bfloat16, float32, float64, int8, uint8, int16, uint16, int32, int64 or bool. Shape and
        dtype are equal on all ranks. In main memory.
    op : Op, optional
        `Average`, `Sum`, `Min`, `Max`, `Product` or `Adasum`; `docs/reference/operations.md` says what they compute.
        Adasum takes only floats, and a number of ranks that is a power of two.
    name : str, optional
        Name of the operation, equal on all ranks. By default, the n-th unnamed operation of its kind is matched with
        the n-th of the other ranks.
    prescale_factor, postscale_factor : float, optional
        Factors for the inputs, and for the result.
    compression : optional
        `Compression.none`, `fp16`, `bf16`, `fp8`, `tuned` or `tuned8`, or a compressor of one's own
        (`engine.Compressor`). Equal on all ranks.

    Returns
    -------
    array or tensor
        Tensor of the input's framework, shape and dtype, bitwise equal on all ranks. No gradient flows through it.

    Raises
    ------
    MismatchError
        Ranks disagree on shape, dtype, op, scale or compression; all ranks raise it, and the engine keeps working.
    ValueError
        Adasum with compression, or with a number of ranks that is not a power of two; nothing has been sent.
    DuplicateNameError
        An operation of this name is in flight.
    UnsupportedTensorError
        The dtype, the device or the type of the tensor, such as a list, is not supported.
    WorldError
        A rank died, raised, left, stalled or was lost.
    """
    return _reduce(
        "allreduce", tensor, op, name, prescale_factor, postscale_factor, process_set, compression, blocking=True
    ).wait()


def allreduce_(
    tensor: Any,
    op: int | None = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = None,
) -> Any:
    """Combine a tensor over all ranks in place, like `allreduce`. Returns `tensor`."""
    if compression is not None:
        return _reduce_in_place(
            tensor, op, name, prescale_factor, postscale_factor, process_set, compression, blocking=True
        ).wait()
    # Without adapter and handle where that will do: for a small tensor, a Python call takes as long as communication.
    engine = process_set._engine
    if (
        engine is not None
        and type(op) is Op
        and engine.allreduce_directly(tensor, name, op, prescale_factor, postscale_factor)
    ):
        return tensor
    try:
        adapter = adapter_of(tensor)
        target = adapter.as_target(tensor)
        number = op if type(op) is Op else number_of(op)
        native = process_set.engine.allreduce(
            target, target, name, number, prescale_factor, postscale_factor, True, None
        )
    except Exception as error:
        announce_failure(process_set, "allreduce", name, error)
        raise
    native.wait()
    return tensor if target is tensor else _store_result(adapter, tensor, target)


def broadcast_async_(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start `broadcast_`; see `broadcast`. The tensor must not be accessed until `synchronize` returns."""
    return _spread_in_place(tensor, root_rank, name, process_set, blocking=False)


def broadcast_async(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start `broadcast`; see there. The tensor must not be written to until `synchronize` returns."""
    return _submit_broadcast(tensor, root_rank, name, process_set, blocking=False)


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Copy the values of one rank to every rank. Collective.

    Parameters
    ----------
    tensor : array or tensor
        Shape and dtype are equal on all ranks: the dtypes of `allreduce`, and uint32, uint64, complex and float8.
    root_rank : int
        Rank whose values are sent. Equal on all ranks.
    name : str, optional
        Same as for `allreduce`.

    Returns
    -------
    array or tensor
        Tensor of the input's framework, shape and dtype.

    Raises
    ------
    ValueError
        The root is not a rank.
    EngineError
        Same as for `allreduce`.
    """
    return _submit_broadcast(tensor, root_rank, name, process_set, blocking=True).wait()


def broadcast_(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Copy the values of one rank to every rank in place, like `broadcast`. Returns `tensor`."""
    return _spread_in_place(tensor, root_rank, name, process_set, blocking=True).wait()


def allgather_async(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Start `allgather`; see there. The tensor must not be written to until `synchronize` returns."""
    return _submit_allgather(tensor, name, process_set, blocking=False)


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate the tensors of all ranks along the first dimension, in rank order. Collective.

    Parameters
    ----------
    tensor : array or tensor
        Dtype and shape are equal on all ranks, except that the first dimension may differ. A 0-d tensor counts as one
        row. The dtypes of `broadcast`.
    name : str, optional
        Same as for `allreduce`.

    Returns
    -------
    array or tensor
        Tensor of the input's framework and dtype, equal on all ranks. No gradient flows through it.

    Raises
    ------
    EngineError
        Same as for `allreduce`.
    """
    return _submit_allgather(tensor, name, process_set, blocking=True).wait()


def alltoall_async(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start `alltoall`; see there. The tensor must not be written to until `synchronize` returns."""
    return _submit_alltoall(tensor, splits, name, process_set, blocking=False)


def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send some rows to each rank, and receive rows from each rank. Collective.

    Parameters
    ----------
    tensor : array or tensor
        Rows for rank 0, then those for rank 1, and so on. Dtype and shape are equal on all ranks, except that the first
        dimension may differ; the dtypes of `broadcast`.
    splits : sequence or tensor of int, optional
        Number of rows for each rank; may differ by rank, and be 0. Rows beyond their sum are not sent. By default
        the rows are divided equally.
    name : str, optional
        Same as for `allreduce`.

    Returns
    -------
    array or tensor
        Received rows in rank order, in the input's framework and dtype. With `splits`, a pair: these rows, and the
        number of rows from each rank as an int32 tensor of the input's framework. No gradient flows through it.

    Raises
    ------
    ValueError
        `splits` does not fit the tensor or the world; without `splits`, the rows cannot be divided equally.
    UnsupportedTensorError
        `splits` holds values that are not whole numbers.
    EngineError
        Same as for `allreduce`.
    """
    return _submit_alltoall(tensor, splits, name, process_set, blocking=True).wait()


def reducescatter_async(
    tensor: Any,
    op: int | None = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = None,
) -> Handle:
    """Start `reducescatter`; see there. The tensor must not be written to until `synchronize` returns."""
    return _reduce(
        "reducescatter", tensor, op, name, prescale_factor, postscale_factor, process_set, compression, blocking=False
    )


def reducescatter(
    tensor: Any,
    op: int | None = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = None,
) -> Any:
    """Combine a tensor over all ranks, and return this rank's rows of the result. Collective.

    Parameters
    ----------
    tensor : array or tensor
        Same as for `allreduce`, with at least one dimension.
    op, name, prescale_factor, postscale_factor, compression : optional
        Same as for `allreduce`, but without Adasum.

    Returns
    -------
    array or tensor
        Tensor of the input's framework and dtype. The rows are divided in rank order; if they do not divide evenly, the
        first ranks have one more. Bitwise equal to these rows of an `allreduce`. No gradient flows through it.

    Raises
    ------
    EngineError
        Same as for `allreduce`.
    """
    return _reduce(
        "reducescatter", tensor, op, name, prescale_factor, postscale_factor, process_set, compression, blocking=True
    ).wait()


def barrier(name: str | None = None, process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the process set has called `barrier`. Collective."""
    process_set.engine.meet(name)


def join(process_set: ProcessSet = global_process_set) -> int:
    """Wait until every rank has joined, while taking part in their collectives. Collective.

    For ranks with less work than others, such as fewer batches. Until all ranks have joined, a joined rank takes part
    in the collectives of the others without changing their results. It contributes the identity of a reduction (0 for
    Sum and Average, whose divisor stays the number of ranks), and no rows to an allgather or all-to-all. It cannot be
    the root of a broadcast.

    Parameters
    ----------
    process_set : ProcessSet, optional
        The process set whose ranks join.

    Returns
    -------
    int
        Rank that joined last, and so had the most work; equal on all ranks.

    Raises
    ------
    EngineError
        A rank that the others wait for has stalled, left or failed; the error names it.
    """
    return process_set.engine.join()


def number_of(op: int | None) -> int:
    """Return the native engine's number of a reduction operation; None is `Average`."""
    return Average if op is None else op if type(op) is Op else Op(op)


def share_of(source: Any, rank: int, size: int) -> Any:
    """Return the first rows of `source`, as many as `rank` receives from a reduce-scatter, as a model of its output."""
    if not source.ndim:
        return source  # The native engine raises a fitting error.
    memory.expect_memory(source)  # Otherwise the framework refuses to slice it, with a misleading error.
    rows = source.shape[0]  # `len` of a torch tensor takes seven times as long.
    return source[: rows // size + (rank < rows % size)]


# `blocking`: the caller is about to wait, so the engine submits and waits in one step without waking its thread.


def _reduce(
    kind: str,
    tensor: Any,
    op: int | None,
    name: str | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    compression: Any,
    blocking: bool,
) -> Handle:
    """Start an allreduce or a reduce-scatter, which `kind` names."""
    try:
        wire, own = resolve(compression, op)
        sent, context = (tensor, None) if own is None else own.compress(tensor)
        adapter = adapter_of(sent)
        source = adapter.as_input(sent)
        engine = process_set.engine
        if kind == "allreduce":
            output, reduce = adapter.make_empty(source), engine.allreduce
        else:
            output, reduce = adapter.make_empty(share_of(source, engine.rank, engine.size)), engine.reducescatter
        native = reduce(source, output, name, number_of(op), prescale, postscale, blocking, wire)
    except Exception as error:
        announce_failure(process_set, kind, name, error)
        raise
    handle = Handle(native, output, lambda output: adapter.as_framework_tensor(sent, output))
    return handle if own is None else handle.then(lambda result: own.decompress(result, context))


def _reduce_in_place(
    tensor: Any,
    op: int | None,
    name: str | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    compression: Any,
    blocking: bool,
) -> Handle:
    native = None
    try:
        adapter = adapter_of(tensor)
        target = adapter.as_target(tensor)
        wire, own = resolve(compression, op)
        if own is None:
            native = process_set.engine.allreduce(
                target, target, name, number_of(op), prescale, postscale, blocking, wire
            )
    except Exception as error:
        announce_failure(process_set, "allreduce", name, error)
        raise
    if native is None:
        handle = _reduce("allreduce", tensor, op, name, prescale, postscale, process_set, compression, blocking)
        return handle.then(lambda result: _store_result(adapter, tensor, result))
    return _in_place(native, adapter, tensor, target)


def _submit_broadcast(tensor: Any, root: int, name: str | None, process_set: ProcessSet, blocking: bool) -> Handle:
    try:
        adapter = adapter_of(tensor)
        source = adapter.as_input(tensor)
        output = adapter.make_empty(source)
        native = process_set.engine.broadcast(source, output, name, root, blocking)
    except Exception as error:
        announce_failure(process_set, "broadcast", name, error)
        raise
    return Handle(native, output, lambda output: adapter.as_framework_tensor(tensor, output))


def _spread_in_place(tensor: Any, root: int, name: str | None, process_set: ProcessSet, blocking: bool) -> Handle:
    try:
        adapter = adapter_of(tensor)
        target = adapter.as_target(tensor)
        native = process_set.engine.broadcast(target, target, name, root, blocking)
    except Exception as error:
        announce_failure(process_set, "broadcast", name, error)
        raise
    return _in_place(native, adapter, tensor, target)


def _submit_allgather(tensor: Any, name: str | None, process_set: ProcessSet, blocking: bool) -> Handle:
    try:
        adapter = adapter_of(tensor)
        native = process_set.engine.allgather(adapter.as_rows(tensor), name, blocking, adapter.make_allocator(tensor))
    except Exception as error:
        announce_failure(process_set, "allgather", name, error)
        raise

    def fetch_result(_: Any) -> Any:
        data, rows = native.gathered
        return adapter.make_gathered(tensor, data, sum(rows))

    return Handle(native, None, fetch_result)


def _submit_alltoall(tensor: Any, splits: Any, name: str | None, process_set: ProcessSet, blocking: bool) -> Handle:
    try:
        adapter = adapter_of(tensor)
        source = adapter.as_rows(tensor)
        engine = process_set.engine
        if splits is None:
            rows, rest = divmod(len(source), engine.size)
            if rest:
                raise ArgumentError(
                    f"{len(source)} rows cannot be divided equally among {engine.size} ranks; give splits"
                )
            native = engine.alltoall(source, [rows] * engine.size, name, blocking, adapter.make_allocator(tensor))
        else:
            native = engine.alltoall(source, splits, name, blocking, adapter.make_allocator(tensor))
    except Exception as error:
        announce_failure(process_set, "alltoall", name, error)
        raise

    def fetch_result(_: Any) -> Any:
        data, rows = native.gathered
        received = adapter.make_gathered(tensor, data, sum(rows))
        return received if splits is None else (received, adapter.make_counts(rows))

    return Handle(native, None, fetch_result)


def _in_place(native: handles.Handle, adapter: Adapter, tensor: Any, target: Any) -> Handle:
    if target is tensor:
        return Handle(native, tensor, None)
    return Handle(native, target, lambda target: _store_result(adapter, tensor, target))


def _store_result(adapter: Adapter, tensor: Any, result: Any) -> Any:
    adapter.store(tensor, result)
    return tensor
