"""Types of the functions that engine/frameworks/surface.py makes: written by it."""

from collections.abc import Sequence
from typing import Any

from mxnet.nd import NDArray as Tensor

from ..collectives.compression import Compression
from ..collectives.process_sets import ProcessSet, global_process_set
from ..collectives.reduce_ops import Average

def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Tensor: ...
def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Tensor: ...
def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
    compression: Any = Compression.none,
) -> list[Tensor]: ...
def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> list[Tensor]: ...
def allgather(
    tensor: Tensor, name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> Tensor: ...
def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> list[Tensor]: ...
def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Tensor: ...
def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Tensor: ...
def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any: ...
def reducescatter(
    tensor: Tensor,
    op: int | None = Average,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = Compression.none,
) -> Tensor: ...
def grouped_reducescatter(
    tensors: Sequence[Tensor],
    op: int | None = Average,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = Compression.none,
) -> list[Tensor]: ...
