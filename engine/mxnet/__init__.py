"""Binding of MXNet 1.9: `import engine.mxnet as hvd` replaces `import horovod.mxnet as hvd`."""

from __future__ import annotations

from ..frameworks import basics
from ..frameworks.basics import *  # noqa: F403
from .ops import (
    allgather,
    allreduce,
    allreduce_,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_reducescatter,
    reducescatter,
)
from .state import broadcast_parameters
from .training import DistributedOptimizer, DistributedTrainer

__all__ = [
    "DistributedOptimizer",
    "DistributedTrainer",
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_parameters",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "reducescatter",
]
__all__ += basics.__all__
