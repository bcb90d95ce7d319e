"""Binding of Keras 3: `import engine.keras as hvd` replaces `import horovod.keras as hvd`.

It supports Keras' backends TensorFlow, torch and JAX, and imports the one that Keras uses.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..frameworks import basics
from ..frameworks.basics import *  # noqa: F403
from . import callbacks
from .models import load_model
from .optimizer import DistributedOptimizer, PartialDistributedOptimizer
from .values import allgather, allreduce, broadcast, broadcast_global_variables, reducescatter

__all__ = [
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "load_model",
    "reducescatter",
]
__all__ += basics.__all__


def __getattr__(name: str) -> Any:
    """Import `elastic` at its first use."""
    if name == "elastic":
        return import_module(".elastic", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
