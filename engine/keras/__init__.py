"""The binding of Keras 3: `import engine.keras as hvd` in place of `import horovod.keras as hvd`.

It works on Keras' backends TensorFlow, torch and JAX, and imports the one that Keras has chosen.
"""

from __future__ import annotations

from ..compat.builds import (
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
from ..compression import Compression, Compressor
from ..errors import CollectiveError as HorovodInternalError
from ..frameworks.learning_rate import scale_learning_rate
from ..frameworks.surface import barrier, init, join
from ..objects import allgather_object, broadcast_object, check_consistency
from ..process_sets import ProcessSet, global_process_set
from ..runtime import (
    add_process_set,
    cross_rank,
    cross_size,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from ..types import Adasum, Average, Max, Min, Op, Product, Sum
from . import callbacks
from .models import load_model
from .optimizer import DistributedOptimizer, PartialDistributedOptimizer
from .values import allgather, allreduce, broadcast, broadcast_global_variables, reducescatter

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "Op",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "callbacks",
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
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "scale_learning_rate",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
