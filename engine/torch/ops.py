"""Collectives on torch tensors, with the names, argument order and defaults that Horovod's users know.

Gradients flow through the blocking ones that return a new tensor: Horovod's, or the mathematical ones. See
`engine.torch.autograd`, and docs/operations.md for a table of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .. import collectives, groups, runtime
from ..collectives import Handle
from ..compression import MARKERS, Compression, resolve
from ..errors import EngineError
from ..failures import announce
from ..process_sets import ProcessSet, global_process_set
from ..types import Average, Op, Sum
from . import adapter as _adapter  # noqa: F401  (registers torch.Tensor)
from . import autograd


def choose_op(average: bool | None, op: int | None) -> Op:
    """The operation, from the old argument `average` or the new `op`.

    Raises
    ------
    ValueError
        Both are given.
    """
    if average is not None and op is not None:
        raise ValueError("give either average or op, not both; op=Average is the same as average=True, op=Sum as False")
    if average is not None:
        return Average if average else Sum
    return Average if op is None else Op(op)


def _chosen(
    average: bool | None, op: int | None, kind: str, name: str | None, process_set: ProcessSet = global_process_set
) -> Op:
    """As `choose_op`, for a call of that kind and name; if it fails the other ranks are told."""
    try:
        return choose_op(average, op)
    except ValueError as error:
        announce(process_set, kind, name, error)
        raise


def _check(tensor: Any, kind: str, name: str | None, process_set: ProcessSet) -> None:
    """Raise, and tell the other ranks, unless a call of that kind and name was given a tensor of torch."""
    if not isinstance(tensor, torch.Tensor):
        error = TypeError(f"expected a torch.Tensor, not {type(tensor).__qualname__}")
        announce(process_set, kind, name, error)
        raise error


def _check_all(tensors: Any, kind: str, name: str | None, process_set: ProcessSet) -> list[torch.Tensor]:
    """As `_check`, for several tensors."""
    if not isinstance(tensors, Iterable):
        error = TypeError(f"expected a sequence of torch.Tensor, not {type(tensors).__qualname__}")
        announce(process_set, kind, name, error)
        raise error
    chosen = list(tensors)
    for tensor in chosen:
        _check(tensor, kind, name, process_set)
    return chosen


def _compressed(
    compression: Any,
    settings: Any,
    kind: str,
    tensors: list[torch.Tensor],
    reduce: Callable[[list[torch.Tensor], Any], list[torch.Tensor]],
) -> list[torch.Tensor]:
    """What `reduce(sent, marker)` gives, between the compressor's own methods: gradients flow through these too.

    `settings` are operation, name, factors and process set, `kind` that of the operation.
    """
    op, name, *_, process_set = settings
    try:
        wire, own = resolve(compression, op)
        pairs = [(tensor, None) if own is None else own.compress(tensor) for tensor in tensors]
    except Exception as error:
        announce(process_set, kind, name, error)
        raise
    if own is None:
        return reduce(tensors, MARKERS[wire])
    results = reduce(_check_all([sent for sent, _ in pairs], kind, name, process_set), MARKERS[wire])
    return [own.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)]


def _tensor(result: Any) -> torch.Tensor:
    assert isinstance(result, torch.Tensor)
    return result


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an allreduce. `synchronize` gives its result, a new tensor. See `engine.allreduce`."""
    _check(tensor, "allreduce", name, process_set)
    return collectives.allreduce_async(
        tensor,
        _chosen(average, op, "allreduce", name, process_set),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an allreduce in place; the tensor must be left alone until `synchronize` returns."""
    _check(tensor, "allreduce", name, process_set)
    return collectives.allreduce_async_(
        tensor,
        _chosen(average, op, "allreduce", name, process_set),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
    )


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combine a tensor over all ranks. Collective.

    Parameters
    ----------
    tensor : torch.Tensor
        In main memory; of any shape and strides; the dtypes of `engine.allreduce`.
    average : bool, optional
        The old way to say `op`: True is `Average`, False is `Sum`.
    name : str, optional
        Equal on all ranks.
    compression : optional
        `Compression.none`, `fp16`, `bf16` or `tuned`, or a compressor of one's own. See `engine.compression`.
    op : Op, optional
        `Average` by default.
    prescale_factor, postscale_factor : float, optional
        Multiply the inputs, and the result.

    Returns
    -------
    torch.Tensor
        Contiguous; of the input's dtype and shape. Gradients flow through it with `Sum`, `Average` and `Adasum`: the
        same reduction of the ranks' gradients (of Adasum, which is not linear, by definition).

    Raises
    ------
    EngineError
        As for `engine.allreduce`.
    """
    _check(tensor, "allreduce", name, process_set)
    settings = (
        _chosen(average, op, "allreduce", name, process_set),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
    )
    (result,) = _compressed(
        compression,
        settings,
        "allreduce",
        [tensor],
        lambda sent, marker: [autograd.call(autograd.Allreduce, collectives.allreduce, sent[0], *settings, marker)],
    )
    return _tensor(result)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """As `allreduce`, in place. Returns `tensor`."""
    _check(tensor, "allreduce", name, process_set)
    collectives.allreduce_(
        tensor,
        _chosen(average, op, "allreduce", name, process_set),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
    )
    return tensor


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a grouped allreduce. `synchronize` gives a list of new tensors. See `engine.grouped_allreduce`."""
    return groups.grouped_allreduce_async(
        _check_all(tensors, "allreduce", name, process_set),
        _chosen(average, op, "allreduce", name, process_set),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
    )


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a grouped allreduce in place; the tensors must be left alone until `synchronize` returns."""
    return groups.grouped_allreduce_async_(
        _check_all(tensors, "allreduce", name, process_set),
        _chosen(average, op, "allreduce", name, process_set),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
    )


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Combine several tensors over all ranks in one request. Collective. See `engine.grouped_allreduce`.

    Gradients flow through it as through `allreduce`.
    """
    settings = (
        _chosen(average, op, "allreduce", name, process_set),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
    )
    return _compressed(
        compression,
        settings,
        "allreduce",
        _check_all(tensors, "allreduce", name, process_set),
        lambda sent, marker: autograd.call_grouped(
            autograd.GroupedAllreduce, groups.grouped_allreduce, sent, *settings, marker
        ),
    )


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """As `grouped_allreduce`, in place. Returns the tensors."""
    return groups.grouped_allreduce_(
        _check_all(tensors, "allreduce", name, process_set),
        _chosen(average, op, "allreduce", name, process_set),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
    )


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a broadcast. `synchronize` gives its result, a new tensor."""
    _check(tensor, "broadcast", name, process_set)
    return collectives.broadcast_async(tensor, root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a broadcast in place; the tensor must be left alone until `synchronize` returns."""
    _check(tensor, "broadcast", name, process_set)
    return collectives.broadcast_async_(tensor, root_rank, name, process_set)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """A new tensor with the values of the root's. Collective. See `engine.broadcast`.

    Gradients flow back to the root: their average over ranks; their sum with `mathematical_gradients`.
    """
    _check(tensor, "broadcast", name, process_set)
    return _tensor(autograd.call(autograd.Broadcast, collectives.broadcast, tensor, root_rank, name, process_set))


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """As `broadcast`, in place. Returns `tensor`."""
    _check(tensor, "broadcast", name, process_set)
    collectives.broadcast_(tensor, root_rank, name, process_set)
    return tensor


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start an allgather. `synchronize` gives its result."""
    _check(tensor, "allgather", name, process_set)
    return collectives.allgather_async(tensor, name, process_set)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate over all ranks along the first dimension, which may differ by rank. See `engine.allgather`.

    Gradients flow through it: those of this rank's rows, averaged over ranks; summed with `mathematical_gradients`.
    """
    _check(tensor, "allgather", name, process_set)
    return _tensor(autograd.call(autograd.Allgather, collectives.allgather, tensor, name, process_set))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a grouped allgather. `synchronize` gives a list of new tensors. See `engine.grouped_allgather`."""
    return groups.grouped_allgather_async(_check_all(tensors, "allgather", name, process_set), name, process_set)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Concatenate several tensors over all ranks in one request. Collective. See `engine.grouped_allgather`.

    Gradients flow through it as through `allgather`.
    """
    return autograd.call_grouped(
        autograd.GroupedAllgather,
        groups.grouped_allgather,
        _check_all(tensors, "allgather", name, process_set),
        name,
        process_set,
    )


def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start an all-to-all. `synchronize` gives its result."""
    _check(tensor, "alltoall", name, process_set)
    return collectives.alltoall_async(tensor, splits, name, process_set)


def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send some rows to each rank, and receive what each has for this one. See `engine.alltoall`.

    Returns the rows; with `splits` also how many came from each rank. Gradients flow back the way the rows came.
    """
    _check(tensor, "alltoall", name, process_set)
    return autograd.call(autograd.Alltoall, collectives.alltoall, tensor, splits, name, process_set)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a reduce-scatter. `synchronize` gives its result."""
    _check(tensor, "reducescatter", name, process_set)
    return collectives.reducescatter_async(tensor, op, name, prescale_factor, postscale_factor, process_set)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Combine a tensor over all ranks, and keep this rank's share of the rows. See `engine.reducescatter`.

    Gradients flow through it with `Sum` and `Average`: each row's from the rank that it went to, with `Sum` multiplied
    by the number of ranks. With `mathematical_gradients` both are divided by that.
    """
    _check(tensor, "reducescatter", name, process_set)
    settings = (
        _chosen(None, op, "reducescatter", name, process_set),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
    )
    (result,) = _compressed(
        compression,
        settings,
        "reducescatter",
        [tensor],
        lambda sent, marker: [
            autograd.call(autograd.Reducescatter, collectives.reducescatter, sent[0], *settings, marker)
        ],
    )
    return _tensor(result)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a grouped reduce-scatter. `synchronize` gives a list of new tensors. See `engine.grouped_reducescatter`."""
    return groups.grouped_reducescatter_async(
        _check_all(tensors, "reducescatter", name, process_set),
        _chosen(None, op, "reducescatter", name, process_set),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
    )


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Combine several tensors over all ranks in one request, and keep this rank's rows of each. Collective.

    See `engine.grouped_reducescatter`. Gradients flow through it as through `reducescatter`.
    """
    settings = (
        _chosen(None, op, "reducescatter", name, process_set),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
    )
    return _compressed(
        compression,
        settings,
        "reducescatter",
        _check_all(tensors, "reducescatter", name, process_set),
        lambda sent, marker: autograd.call_grouped(
            autograd.GroupedReducescatter, groups.grouped_reducescatter, sent, *settings, marker
        ),
    )


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the process set has called it. Collective."""
    collectives.barrier(process_set=process_set)


def join(device: int = -1, process_set: ProcessSet = global_process_set) -> int:
    """Bring nothing more until every rank has called this; the last that did. `device` has no meaning here.

    Collective. See `engine.join`.
    """
    return collectives.join(process_set)


def init(comm: Any = None, process_sets: Any = None, **settings: Any) -> None:
    """Start the engine, as `engine.init`.

    Parameters
    ----------
    comm : None, mpi4py communicator, or list of ranks or of communicators
        The launcher says who the ranks are, so that it has to be all of them: `MPI.COMM_WORLD` or `range(size)`. Of a
        list of communicators each makes a process set, as in `process_sets`.
    process_sets : iterable of ProcessSet, `"dynamic"`, optional
        Sets to add at once.
    **settings
        Of `engine.init`.

    Raises
    ------
    EngineError
        `comm` has other ranks than the world.
    """
    sets = [] if process_sets is None or process_sets == "dynamic" else list(process_sets)
    runtime.init(**settings)
    if comm is not None:
        parts = list(comm) if isinstance(comm, list | tuple) else [comm]
        if parts and all(isinstance(part, int) for part in parts):
            _expect_world(parts)
        elif len(parts) == 1:
            _expect_world(parts[0].allgather(runtime.rank()))
        else:
            sets = [ProcessSet(part) for part in parts] + sets
    for each in sets:
        runtime.add_process_set(each)


def _expect_world(ranks: Sequence[int]) -> None:
    if sorted(ranks) != list(range(runtime.size())):
        raise EngineError(
            f"init(comm=...) has ranks {sorted(ranks)}, but this job has {runtime.size()}: start as many processes as "
            "the world has ranks, and give a part of them to process_sets"
        )
