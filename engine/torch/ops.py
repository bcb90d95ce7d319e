"""Collectives on torch tensors, with the names, argument order and defaults that Horovod's users know.

Gradients flow through the blocking ones that return a new tensor; see `engine.torch.functions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import engine.torch.adapter  # noqa: F401  (registers torch.Tensor)
from engine import collectives, groups
from engine.collectives import Handle
from engine.compression import MARKERS, Compression, resolve
from engine.errors import EngineError
from engine.groups import Group
from engine.torch import functions
from engine.types import Average, Op, Sum


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


def _check(tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected a torch.Tensor, not {type(tensor).__qualname__}")


def _check_all(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    tensors = list(tensors)
    for tensor in tensors:
        _check(tensor)
    return tensors


def _compressed(
    compression: Any, tensors: list[torch.Tensor], reduce: Callable[[list[torch.Tensor], Any], list[torch.Tensor]]
) -> list[torch.Tensor]:
    """What `reduce(sent, marker)` gives, between the compressor's own methods: gradients flow through these too."""
    wire, own = resolve(compression)
    if own is None:
        return reduce(tensors, MARKERS[wire])
    pairs = [own.compress(tensor) for tensor in tensors]
    results = reduce(_check_all([sent for sent, _ in pairs]), MARKERS[wire])
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
) -> Handle:
    """Start an allreduce. `synchronize` gives its result, a new tensor. See `engine.allreduce`."""
    _check(tensor)
    return collectives.allreduce_async(tensor, choose_op(average, op), name, prescale_factor, postscale_factor)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start an allreduce in place; the tensor must be left alone until `synchronize` returns."""
    _check(tensor)
    return collectives.allreduce_async_(tensor, choose_op(average, op), name, prescale_factor, postscale_factor)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
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
        `Compression.none`, `fp16` or `bf16`, or a compressor of one's own. See `engine.compression`.
    op : Op, optional
        `Average` by default.
    prescale_factor, postscale_factor : float, optional
        Multiply the inputs, and the result.

    Returns
    -------
    torch.Tensor
        Contiguous; of the input's dtype and shape. Gradients flow through it with `Sum` and `Average`: the same
        reduction of the ranks' gradients.

    Raises
    ------
    EngineError
        As for `engine.allreduce`.
    """
    _check(tensor)
    settings = choose_op(average, op), name, prescale_factor, postscale_factor
    (result,) = _compressed(
        compression,
        [tensor],
        lambda sent, marker: [functions.call(functions.Allreduce, collectives.allreduce, sent[0], *settings, marker)],
    )
    return _tensor(result)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """As `allreduce`, in place. Returns `tensor`."""
    _check(tensor)
    collectives.allreduce_(tensor, choose_op(average, op), name, prescale_factor, postscale_factor)
    return tensor


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Group:
    """Start a grouped allreduce. `synchronize` gives a list of new tensors. See `engine.grouped_allreduce`."""
    return groups.grouped_allreduce_async(
        _check_all(tensors), choose_op(average, op), name, prescale_factor, postscale_factor
    )


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Group:
    """Start a grouped allreduce in place; the tensors must be left alone until `synchronize` returns."""
    return groups.grouped_allreduce_async_(
        _check_all(tensors), choose_op(average, op), name, prescale_factor, postscale_factor
    )


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Combine several tensors over all ranks in one request. Collective. See `engine.grouped_allreduce`.

    Gradients flow through it as through `allreduce`.
    """
    settings = choose_op(average, op), name, prescale_factor, postscale_factor
    return _compressed(
        compression, _check_all(tensors), lambda sent, marker: functions.grouped(sent, *settings, marker)
    )


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """As `grouped_allreduce`, in place. Returns the tensors."""
    return groups.grouped_allreduce_(
        _check_all(tensors), choose_op(average, op), name, prescale_factor, postscale_factor
    )


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle:
    """Start a broadcast. `synchronize` gives its result, a new tensor."""
    _check(tensor)
    return collectives.broadcast_async(tensor, root_rank, name)


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle:
    """Start a broadcast in place; the tensor must be left alone until `synchronize` returns."""
    _check(tensor)
    return collectives.broadcast_async_(tensor, root_rank, name)


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """A new tensor with the values of the root's, to which gradients flow back. Collective. See `engine.broadcast`."""
    _check(tensor)
    return _tensor(functions.call(functions.Broadcast, collectives.broadcast, tensor, root_rank, name))


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """As `broadcast`, in place. Returns `tensor`."""
    _check(tensor)
    collectives.broadcast_(tensor, root_rank, name)
    return tensor


def allgather_async(tensor: torch.Tensor, name: str | None = None) -> Handle:
    """Start an allgather. `synchronize` gives its result."""
    _check(tensor)
    return collectives.allgather_async(tensor, name)


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Concatenate over all ranks along the first dimension, which may differ by rank. See `engine.allgather`.

    Gradients flow through it: those of this rank's rows, summed over ranks.
    """
    _check(tensor)
    return _tensor(functions.call(functions.Allgather, collectives.allgather, tensor, name))


def alltoall_async(tensor: torch.Tensor, splits: Any = None, name: str | None = None) -> Handle:
    """Start an all-to-all. `synchronize` gives its result."""
    _check(tensor)
    return collectives.alltoall_async(tensor, splits, name)


def alltoall(tensor: torch.Tensor, splits: Any = None, name: str | None = None) -> Any:
    """Send some rows to each rank, and receive what each has for this one. See `engine.alltoall`.

    Returns the rows; with `splits` also how many came from each rank. Gradients flow back the way the rows came.
    """
    _check(tensor)
    return functions.call(functions.Alltoall, collectives.alltoall, tensor, splits, name)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int | None = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a reduce-scatter. `synchronize` gives its result."""
    _check(tensor)
    return collectives.reducescatter_async(tensor, op, name, prescale_factor, postscale_factor)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Combine a tensor over all ranks, and keep this rank's share of the rows. See `engine.reducescatter`.

    Gradients flow through it with `Sum` and `Average`: each row's from the rank that it went to.
    """
    _check(tensor)
    settings = choose_op(None, op), name, prescale_factor, postscale_factor
    (result,) = _compressed(
        compression,
        [tensor],
        lambda sent, marker: [
            functions.call(functions.Reducescatter, collectives.reducescatter, sent[0], *settings, marker)
        ],
    )
    return _tensor(result)


def init(comm: Any = None, process_sets: Any = None, **settings: Any) -> None:
    """Start the engine, as `engine.init`. Communicators and process sets do not exist in this version."""
    from engine import runtime

    if comm is not None or process_sets is not None:
        raise EngineError("engine.torch.init takes no comm and no process_sets in this version; leave them out")
    runtime.init(**settings)


def mpi_threads_supported() -> bool:
    """Whether MPI supports threads: there is no MPI here."""
    return False


def mpi_enabled() -> bool:
    """Whether operations go through MPI: they go through shared memory."""
    return False


def gloo_enabled() -> bool:
    """Whether operations go through Gloo: they go through shared memory."""
    return False


def mpi_built() -> bool:
    """Whether there is an MPI transport."""
    return False


def gloo_built() -> bool:
    """Whether there is a Gloo transport."""
    return False


def nccl_built() -> int:
    """The version of NCCL that the engine uses, as a number; 0 for none."""
    return 0


def ddl_built() -> bool:
    """Whether there is a DDL transport."""
    return False


def ccl_built() -> bool:
    """Whether there is a oneCCL transport."""
    return False


def cuda_built() -> bool:
    """Whether tensors may live on CUDA devices."""
    return False


def rocm_built() -> bool:
    """Whether tensors may live on ROCm devices."""
    return False
