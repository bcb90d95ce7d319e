"""Features of the build, for scripts that ask before they choose how to work."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from ..errors import DeviceError
from ..gpu.nccl_file import OLDEST_NCCL, load_nccl, nccl_version
from ..setting import variable


def mpi_threads_supported() -> bool:
    """Whether MPI supports threads: nothing here asks it to."""
    return False


def mpi_enabled() -> bool:
    """Whether ranks find each other by MPI: they have a rendezvous of their own."""
    return False


def gloo_enabled() -> bool:
    """Whether ranks find each other by Gloo: they have a rendezvous of their own."""
    return False


def mpi_built() -> bool:
    """Whether large tensors can travel between hosts over MPI (`lanes=mpi`), which takes mpi4py."""
    return importlib.util.find_spec("mpi4py") is not None


def gloo_built() -> bool:
    """Whether there is a Gloo transport."""
    return False


def nccl_built() -> int:
    """The version of NCCL that the engine would use here, as 22807; 0: there is none, or one that is too old.

    Loads it into the process.
    """
    chosen = os.environ.get(variable("nccl_library"))
    try:
        version = nccl_version(load_nccl(Path(chosen) if chosen else None))
    except DeviceError:
        return 0
    return version if version >= OLDEST_NCCL else 0


def ddl_built() -> bool:
    """Whether there is a DDL transport."""
    return False


def ccl_built() -> bool:
    """Whether there is a oneCCL transport."""
    return False


def cuda_built() -> bool:
    """Whether tensors may live on CUDA devices: PyTorch's may, where a driver and NCCL are found."""
    return True


def rocm_built() -> bool:
    """Whether tensors may live on ROCm devices."""
    return False
