"""Binding of PyTorch: `import engine.torch as hvd` replaces `import horovod.torch as hvd`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..collectives.compression import Scheme
from ..collectives.handles import Handle, poll, synchronize
from ..frameworks import basics
from ..frameworks.backward import mathematical_gradients
from ..frameworks.basics import *  # noqa: F403
from .compile import compile_backend
from .host_sets import host_process_set
from .learning_rate import gradual_warmup
from .ops import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from .optimizer import DistributedOptimizer
from .outer_optimizer import OuterOptimizer
from .powersgd import PowerSGD
from .sparse import sparse_allreduce, sparse_allreduce_async
from .state import broadcast_optimizer_state, broadcast_parameters
from .sync_batch_norm import SyncBatchNorm

__all__ = [
    "DistributedOptimizer",
    "Handle",
    "OuterOptimizer",
    "PowerSGD",
    "Scheme",
    "SyncBatchNorm",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "compile_backend",
    "gradual_warmup",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "host_process_set",
    "mathematical_gradients",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce",
    "sparse_allreduce_async",
    "synchronize",
]
__all__ += basics.__all__


def __getattr__(name: str) -> Any:
    """Import `elastic` and `libraries` at their first use."""
    if name in ("elastic", "libraries"):
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
