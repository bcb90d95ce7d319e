"""Names that every binding exports besides those of its framework: ranks, process sets, objects, operations."""

from __future__ import annotations

from ..collectives.compression import Compression, Compressor
from ..collectives.objects import allgather_object, broadcast_object, check_consistency
from ..collectives.process_sets import ProcessSet, global_process_set
from ..collectives.reduce_ops import Adasum, Average, Max, Min, Op, Product, Sum
from ..errors import CollectiveError as HorovodInternalError
from ..session.commands import start_timeline, stop_timeline
from ..session.runtime import add_process_set, is_initialized, remove_process_set, shutdown
from ..session.topology import cross_rank, cross_size, is_homogeneous, local_rank, local_size, rank, size
from .builds import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from .learning_rate import scale_learning_rate
from .surface import barrier, init, join

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "HorovodInternalError",
    "Max",
    "Min",
    "Op",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather_object",
    "barrier",
    "broadcast_object",
    "ccl_built",
    "check_consistency",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "scale_learning_rate",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
