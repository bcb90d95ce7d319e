"""Features of the build, for scripts that ask before they choose how to work."""

from __future__ import annotations


def mpi_threads_supported() -> bool:
    """Whether MPI supports threads: there is no MPI here."""
    return False


def mpi_enabled() -> bool:
    """Whether operations go through MPI: they go through shared memory."""
    return False


def gloo_enabled() -> bool:
    """Whether operations go through Gloo: they go through shared memory."""
    return False


def mpi_built() -> bool:
    """Whether there is an MPI transport."""
    return False


def gloo_built() -> bool:
    """Whether there is a Gloo transport."""
    return False


def nccl_built() -> int:
    """The version of NCCL that the engine uses, as a number; 0 for none."""
    return 0


def ddl_built() -> bool:
    """Whether there is a DDL transport."""
    return False


def ccl_built() -> bool:
    """Whether there is a oneCCL transport."""
    return False


def cuda_built() -> bool:
    """Whether tensors may live on CUDA devices."""
    return False


def rocm_built() -> bool:
    """Whether tensors may live on ROCm devices."""
    return False
