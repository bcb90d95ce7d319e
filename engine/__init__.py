"""Gradient communication for distributed training: `init`, collectives, `DistributedOptimizer`.

Names are loaded when they are first used, so that `import engine.launch` needs no compiled extension, and that no
framework is imported before its user does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .collectives.collectives import (
        allgather,
        allgather_async,
        allreduce,
        allreduce_,
        allreduce_async,
        allreduce_async_,
        alltoall,
        alltoall_async,
        barrier,
        broadcast,
        broadcast_,
        broadcast_async,
        broadcast_async_,
        join,
        reducescatter,
        reducescatter_async,
    )
    from .collectives.compression import Compression, Compressor, Scheme
    from .collectives.groups import (
        grouped_allgather,
        grouped_allgather_async,
        grouped_allreduce,
        grouped_allreduce_,
        grouped_allreduce_async,
        grouped_allreduce_async_,
        grouped_reducescatter,
        grouped_reducescatter_async,
    )
    from .collectives.handles import Handle, poll, synchronize
    from .collectives.objects import allgather_object, broadcast_object, check_consistency
    from .collectives.prepared import prepare_allreduce
    from .collectives.process_sets import ProcessSet, global_process_set
    from .collectives.reduce_ops import Adasum, Average, Max, Min, Op, Product, Sum
    from .frameworks.builds import (
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
    from .runner.function import run
    from .session.commands import abort, counters, knobs, set_knobs, start_timeline, stop_timeline
    from .session.runtime import add_process_set, init, is_initialized, remove_process_set, shutdown
    from .session.topology import cross_rank, cross_size, is_homogeneous, local_rank, local_size, rank, size

_MODULES = {
    "frameworks.builds": (
        "ccl_built cuda_built ddl_built gloo_built gloo_enabled mpi_built mpi_enabled mpi_threads_supported nccl_built "
        "rocm_built"
    ),
    "collectives.collectives": (
        "allgather allgather_async allreduce allreduce_ allreduce_async allreduce_async_ alltoall alltoall_async "
        "barrier broadcast broadcast_ broadcast_async broadcast_async_ join reducescatter reducescatter_async"
    ),
    "session.commands": "abort counters knobs set_knobs start_timeline stop_timeline",
    "collectives.compression": "Compression Compressor Scheme",
    "collectives.groups": (
        "grouped_allgather grouped_allgather_async grouped_allreduce grouped_allreduce_ grouped_allreduce_async "
        "grouped_allreduce_async_ grouped_reducescatter grouped_reducescatter_async"
    ),
    "collectives.handles": "Handle poll synchronize",
    "runner.function": "run",
    "collectives.objects": "allgather_object broadcast_object check_consistency",
    "collectives.prepared": "prepare_allreduce",
    "collectives.process_sets": "ProcessSet global_process_set",
    "session.topology": "cross_rank cross_size is_homogeneous local_rank local_size rank size",
    "session.runtime": "add_process_set init is_initialized remove_process_set shutdown",
    "collectives.reduce_ops": "Adasum Average Max Min Op Product Sum",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "Handle",
    "Max",
    "Min",
    "Op",
    "OuterOptimizer",
    "ProcessSet",
    "Product",
    "Scheme",
    "Sum",
    "abort",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "ccl_built",
    "check_consistency",
    "counters",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "knobs",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "prepare_allreduce",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "run",
    "set_knobs",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]


def DistributedOptimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Make an optimizer reduce its gradients over all ranks, with the binding of the optimizer's framework.

    Parameters
    ----------
    optimizer : object
        Optimizer of PyTorch, Keras, TensorFlow, optax or MXNet. Its class and base classes select the binding.
    *args, **kwargs
        Arguments of the framework's own `DistributedOptimizer`, such as `engine.torch.DistributedOptimizer`.

    Returns
    -------
    object
        Result of the framework's own `DistributedOptimizer`.

    Raises
    ------
    TypeError
        `optimizer` is not an optimizer of a framework that the engine has a binding for.
    """
    from .collectives import bindings

    framework = bindings.framework_of(optimizer)
    if framework is not None:
        return bindings.binding_of(framework).DistributedOptimizer(optimizer, *args, **kwargs)
    known = ", ".join(each.optimizers for each in bindings.BOUND.values())
    given = _describe_given(optimizer)
    raise TypeError(f"DistributedOptimizer knows optimizers of these classes: {known}. It was given {given}")


def OuterOptimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Let ranks make steps by themselves, and average what these change now and then; for PyTorch.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Inner optimizer.
    *args, **kwargs
        Arguments of `engine.torch.OuterOptimizer`.

    Returns
    -------
    engine.torch.OuterOptimizer

    Raises
    ------
    TypeError
        `optimizer` is not an optimizer of PyTorch.
    """
    from .collectives import bindings

    framework = bindings.framework_of(optimizer)
    if framework is not None and framework.package == "torch":
        return bindings.binding_of(framework).OuterOptimizer(optimizer, *args, **kwargs)
    known = bindings.BOUND["torch"].optimizers
    raise TypeError(f"OuterOptimizer is for {known} alone. It was given {_describe_given(optimizer)}")


def _describe_given(optimizer: Any) -> str:
    """Describe what was given in place of an optimizer."""
    if isinstance(optimizer, type):
        return f"the class {optimizer.__module__}.{optimizer.__qualname__}: call it to make an optimizer"
    return f"an object of {type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _find_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("enginerun")
    except PackageNotFoundError:
        return "0+unknown"  # A source tree that was never installed.


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _find_version()
    elif name in _HOME:
        value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    elif name == "errors":
        value = import_module(".errors", __name__)
    else:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
