"""Binding of TensorFlow: `import engine.tensorflow as hvd` replaces `import horovod.tensorflow as hvd`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tensorflow import executing_eagerly as _executing_eagerly  # noqa: F401  (of horovod.tensorflow.util)

from ..frameworks import basics
from ..frameworks.backward import mathematical_gradients
from ..frameworks.basics import *  # noqa: F403
from . import op as _op
from .ops import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)
from .optimizer import DistributedOptimizer
from .tape import DistributedGradientTape, PartialDistributedGradientTape
from .variables import (  # type: ignore[assignment]  # Horovod has `session` before the name
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)

__all__ = [
    "BroadcastGlobalVariablesHook",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",  # noqa: F405 (below)
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "mathematical_gradients",
    "native",  # noqa: F405 (below)
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]
__all__ += basics.__all__


def __getattr__(name: str) -> Any:
    if name == "native":
        return _op.native
    # Keras is imported for the one thing that needs it.
    if name == "SyncBatchNormalization":
        from .sync_batch_norm import SyncBatchNormalization

        return SyncBatchNormalization
    if name == "elastic":
        return import_module(".elastic", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
