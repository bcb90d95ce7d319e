"""Features of the build, for scripts that check them before they choose how to work."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from ..config.setting import variable_name
from ..errors import DeviceError
from ..gpu.nccl_file import OLDEST_NCCL, load_nccl, nccl_version


def mpi_threads_supported() -> bool:
    """Return whether MPI supports threads: always False, as the engine does not use MPI's threads."""
    return False


def mpi_enabled() -> bool:
    """Return whether ranks find each other by MPI: always False, as they have a rendezvous of their own."""
    return False


def gloo_enabled() -> bool:
    """Return whether ranks find each other by Gloo: always False, as they have a rendezvous of their own."""
    return False


def mpi_built() -> bool:
    """Return whether large tensors can travel between hosts over MPI (`lanes=mpi`), which needs mpi4py."""
    return importlib.util.find_spec("mpi4py") is not None


def gloo_built() -> bool:
    """Return whether there is a Gloo transport: always False."""
    return False


def nccl_built() -> int:
    """Return the version of NCCL that the engine would use here, such as 22807; 0 if it is missing or too old.

    Loads NCCL into the process.
    """
    chosen = os.environ.get(variable_name("nccl_library"))
    try:
        version = nccl_version(load_nccl(Path(chosen) if chosen else None))
    except DeviceError:
        return 0
    return version if version >= OLDEST_NCCL else 0


def ddl_built() -> bool:
    """Return whether there is a DDL transport: always False."""
    return False


def ccl_built() -> bool:
    """Return whether there is a oneCCL transport: always False."""
    return False


def cuda_built() -> bool:
    """Return whether tensors may be on CUDA devices: always True; PyTorch's may if a driver and NCCL are found."""
    return True


def rocm_built() -> bool:
    """Return whether tensors may be on ROCm devices: always False."""
    return False
