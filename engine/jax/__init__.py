"""Binding of JAX: collectives that support `jit`, `grad` and `vmap`, and a transformation for optax.

>>> import engine.jax as hvd
>>> hvd.init()
>>> optimizer = hvd.distributed(optax.adam(1e-3))
>>> parameters = hvd.broadcast_pytree(parameters)
"""

from __future__ import annotations

import atexit
from importlib import import_module
from typing import TYPE_CHECKING, Any

import jax

from ..collectives.compression import Compression, Compressor
from ..collectives.objects import allgather_object, broadcast_object
from ..collectives.process_sets import ProcessSet, global_process_set
from ..collectives.reduce_ops import Adasum, Average, Max, Min, Op, Product, Sum
from ..errors import CollectiveError as HorovodInternalError
from ..frameworks.backward import mathematical_gradients
from ..frameworks.learning_rate import scale_learning_rate
from ..frameworks.surface import barrier, init, join
from ..session import runtime
from ..session.commands import start_timeline, stop_timeline
from ..session.runtime import add_process_set, is_initialized, remove_process_set, shutdown
from ..session.session import before_shutdown
from ..session.topology import cross_rank, cross_size, is_homogeneous, local_rank, local_size, rank, size
from .ops import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from .primitive import register_handler
from .state import broadcast_parameters, broadcast_pytree, check_consistency, forget_programs, wait_for_programs

if TYPE_CHECKING:
    from .optax import DistributedOptimizer, distributed

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
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
    "broadcast_pytree",
    "check_consistency",
    "cross_rank",
    "cross_size",
    "distributed",
    "global_process_set",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mathematical_gradients",
    "rank",
    "reducescatter",
    "remove_process_set",
    "scale_learning_rate",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

# Older versions have no futures for handlers, so collectives of one program would wait for each other.
if jax.__version_info__ < (0, 6):
    raise ImportError(f"engine.jax needs JAX 0.6 or newer, and this is {jax.__version__}: pip install -U jax jaxlib")

register_handler()

# The engine waits for programs of JAX before it stops. When the interpreter exits, it stops before JAX does: exit
# handlers run in reverse order, and JAX has been imported above.
before_shutdown(wait_for_programs)
runtime.on_enter(forget_programs)
atexit.register(shutdown)


def __getattr__(name: str) -> Any:
    """Import `elastic`, and the names that need optax, at their first use."""
    if name in ("DistributedOptimizer", "distributed"):
        from . import optax

        return getattr(optax, name)
    if name == "elastic":
        return import_module(".elastic", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
