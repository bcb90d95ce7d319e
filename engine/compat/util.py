"""Names of `horovod.common.util`: support of frameworks, their GPUs, and transports."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ..collectives.bindings import BOUND
from ..frameworks import builds

__all__ = [
    "ccl_built",
    "check_extension",
    "ddl_built",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
]

# How Horovod's extensions ask their framework. It has no others.
_SEES_GPU: dict[str, Callable[[Any], bool]] = {
    "mxnet": lambda mxnet: mxnet.context.num_gpus() > 0,
    "tensorflow": lambda tensorflow: len(tensorflow.config.list_physical_devices("GPU")) > 0,
    "torch": lambda torch: torch.cuda.is_available(),
}


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework, such as `torch`, has a binding and is installed."""
    return ext_base_name in BOUND and find_spec(ext_base_name) is not None


@cache
def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework, such as `torch`, has a binding, is installed and sees a GPU in this process.

    Imports the framework, and asks it itself; Horovod asks it in a child process.
    """
    if ext_base_name not in _SEES_GPU or not extension_available(ext_base_name):
        return False
    return bool(_SEES_GPU[ext_base_name](import_module(ext_base_name)))


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether a version such as `2.21.0` is at least another one, by their first three numbers."""
    return _parse_version(ver) >= _parse_version(target)


def _parse_version(version: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", version)[:3]]


def check_extension(ext_name: str, *args: object) -> None:
    """Raise ImportError unless there is a binding, such as `horovod.torch`."""
    if not extension_available(ext_name.rpartition(".")[2]):
        raise ImportError(f"{ext_name} is not available: there is no binding for it, or the framework is not installed")


def gloo_built(verbose: bool = False) -> bool:
    """Return whether there is a Gloo transport: always False."""
    return builds.gloo_built()


def mpi_built(verbose: bool = False) -> bool:
    """Return whether large tensors can travel between hosts over MPI, which needs mpi4py."""
    return builds.mpi_built()


def nccl_built(verbose: bool = False) -> int:
    """Return the version of NCCL that the engine would use here; 0 if there is none."""
    return builds.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    """Return whether there is a DDL transport: always False."""
    return builds.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """Return whether there is a oneCCL transport: always False."""
    return builds.ccl_built()
