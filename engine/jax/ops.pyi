"""Types of the functions that engine/frameworks/surface.py makes: written by it."""

from collections.abc import Sequence
from typing import Any

from jax import Array as Tensor

from ..collectives.compression import Compression
from ..collectives.process_sets import ProcessSet, global_process_set
from ..collectives.reduce_ops import Average

def allreduce(
    tensor: Tensor,
    op: int | None = Average,
    name: str | None = None,
    compression: Any = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor: ...
def grouped_allreduce(
    tensors: Sequence[Tensor],
    op: int | None = Average,
    name: str | None = None,
    compression: Any = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]: ...
def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor: ...
def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor: ...
def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]: ...
def alltoall(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any: ...
def reducescatter(
    tensor: Tensor,
    op: int | None = Average,
    name: str | None = None,
    compression: Any = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor: ...
def grouped_reducescatter(
    tensors: Sequence[Tensor],
    op: int | None = Average,
    name: str | None = None,
    compression: Any = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]: ...
