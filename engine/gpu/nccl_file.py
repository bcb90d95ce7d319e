"""NCCL's library: its file and version. Needs neither a GPU nor the native engine."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

from ..config.setting import variable_name
from ..errors import DeviceError

NCCL = "libnccl.so.2"
OLDEST_NCCL = 21800  # first version in which non-blocking communicators can be aborted at any time


def load_nccl(chosen: Path | None) -> ctypes.CDLL:
    """Load NCCL, preferably the one that a framework has loaded: a process should have only one.

    `chosen` is the setting `nccl_library`. Raises DeviceError if NCCL cannot be loaded.
    """
    attempts = [(str(chosen), os.RTLD_NOW)]
    if chosen is None:
        attempts = [(NCCL, os.RTLD_NOW | os.RTLD_NOLOAD), *_of_package(), (NCCL, os.RTLD_NOW)]
    for name, mode in attempts:
        try:
            return ctypes.CDLL(name, mode=mode)
        except OSError as error:
            refused = error
    raise DeviceError(
        f"NCCL cannot be loaded ({refused}): install nvidia-nccl-cu12 or nvidia-nccl-cu13, as PyTorch for GPUs does, "
        f"or name the file with {variable_name('nccl_library')}"
    )


def nccl_version(library: ctypes.CDLL) -> int:
    """Return the version of NCCL, such as 22807; 0 for another library."""
    version = ctypes.c_int()
    if hasattr(library, "ncclGetVersion"):
        library.ncclGetVersion(ctypes.byref(version))
    return version.value


def _of_package() -> Iterable[tuple[str, int]]:
    """Yield the library of nvidia-nccl-cu12 or -cu13, which use the same directory, and the mode to load it with."""
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return
    for directory in (found.submodule_search_locations or ()) if found is not None else ():
        path = Path(directory) / "lib" / NCCL
        if path.exists():
            yield str(path), os.RTLD_NOW
