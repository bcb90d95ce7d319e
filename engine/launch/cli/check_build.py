"""`--check-build`: the features of this installation."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, version

from ...collectives.bindings import BOUND
from ...frameworks import builds

# `OTHERS` has the other launchers under which ranks find each other, each with a remark.
MPI_SECONDS = 20.0  # longest time that the search for an MPI library may take
OTHERS = {"torchrun": "", "mpirun": " (Open MPI, MPICH)", "srun": " (by its variables)"}


def format_table() -> str:
    """Return a table of features: those found now are marked `[X]`, the others `[ ]`."""
    kernels, problem = find_kernels()
    memory = f"shared memory, with kernels {', '.join(kernels)}" if kernels else f"shared memory: {problem}"
    sections: dict[str, list[tuple[bool, str]]] = {
        "Frameworks": list(_list_frameworks()),
        "Launchers": list(_list_launchers()),
        "Controllers": [
            (bool(kernels), "shared memory"),
            (bool(kernels), "TCP between hosts"),
            (builds.mpi_enabled(), "MPI"),
            (builds.gloo_built(), "Gloo"),
        ],
        "Operations": [
            (bool(kernels), memory),
            (bool(kernels), "TCP between hosts"),
            (bool(builds.nccl_built()), "NCCL"),
            (builds.ddl_built(), "DDL"),
            (builds.ccl_built(), "CCL"),
            (_has_mpi(), "MPI between hosts"),
            (builds.gloo_built(), "Gloo"),
        ],
        "Devices": [
            (bool(kernels), "CPU"),
            (bool(kernels) and builds.cuda_built() and _has_cuda_driver(), "CUDA"),
            (builds.rocm_built(), "ROCm"),
        ],
    }
    lines = [format_version()]
    for title, rows in sections.items():
        lines += ["", f"{title}:", *(f"    [{'X' if there else ' '}] {name}" for there, name in rows)]
    return "\n".join(lines)


def _has_mpi() -> bool:
    """Return whether mpi4py is installed and finds an MPI library."""
    if not builds.mpi_built():
        return False
    found = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"
    try:  # in a child process, because some MPIs abort a process that they cannot serve
        run = subprocess.run([sys.executable, "-c", found], capture_output=True, timeout=MPI_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return run.returncode == 0


def _has_cuda_driver() -> bool:
    """Return whether NVIDIA's driver is installed and finds a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def _list_launchers() -> Iterator[tuple[bool, str]]:
    """Yield each launcher of ranks, and whether it is on the PATH or in the directory of this Python."""
    places = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    yield True, "enginerun"
    for command, about in OTHERS.items():
        found = shutil.which(command, path=places)
        yield found is not None, f"{command}{about}: {found or 'not found here'}"


def _list_frameworks() -> Iterator[tuple[bool, str]]:
    bound = [(each.package, each.title, f"engine.{each.package}") for each in BOUND.values()]
    distributions = packages_distributions()
    for package, name, binding in [*bound, ("numpy", "NumPy, DLPack, buffers", "engine")]:
        found = find_distribution(package, distributions)
        state = f", {found[0]} {found[1]}" if found else ": not installed here"
        yield found is not None, f"{name} ({binding}){state}"


def found_frameworks() -> dict[str, str]:
    """Return the versions of the installed frameworks that have a binding, by their titles."""
    distributions = packages_distributions()
    found = {each.title: find_distribution(each.package, distributions) for each in BOUND.values()}
    return {title: there[1] for title, there in found.items() if there is not None}


def find_distribution(package: str, distributions: Mapping[str, Sequence[str]] | None = None) -> tuple[str, str] | None:
    """Return the distribution of a package and its version; None if the package is not installed.

    TensorFlow's package, for one, has several distributions. `distributions` is the result of
    `packages_distributions()`, which is slow, if the caller has it already.
    """
    if distributions is None:
        distributions = packages_distributions()
    distribution = distributions.get(package, [package])[0]
    number = version_of(distribution)
    return None if number is None else (distribution, number)


def find_kernels() -> tuple[list[str], str]:
    """Return the kernels of the native engine, widest last, and why it cannot be loaded (empty if it can)."""
    try:
        from ...native import setup
    except ImportError as error:
        return [], str(error).partition("\n")[0]
    return setup.kernel_levels(), ""


def format_version() -> str:
    """Return the name and version of this installation."""
    return f"enginerun {version_of('enginerun') or '(a source tree that was never installed)'}"


def version_of(package: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
