"""NCCL's library: which file it is, and its version. Needs neither a GPU nor the native engine."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

from ..errors import DeviceError
from ..setting import variable

NCCL = "libnccl.so.2"
OLDEST_NCCL = 21800  # where communicators that do not block can be aborted at any time


def load_nccl(chosen: Path | None) -> ctypes.CDLL:
    """Load NCCL: one process should have one, so the first choice is what a framework has loaded.

    Parameters
    ----------
    chosen : Path, optional
        The setting `nccl_library`.

    Raises
    ------
    DeviceError
        There is none.
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
        f"or name the file with {variable('nccl_library')}"
    )


def nccl_version(library: ctypes.CDLL) -> int:
    """The version, as 22807; 0 of another library."""
    version = ctypes.c_int()
    if hasattr(library, "ncclGetVersion"):
        library.ncclGetVersion(ctypes.byref(version))
    return version.value


def _of_package() -> Iterable[tuple[str, int]]:
    """The library of nvidia-nccl-cu12 or -cu13, which lies in the same place, and how to load it."""
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return
    for directory in (found.submodule_search_locations or ()) if found is not None else ():
        path = Path(directory) / "lib" / NCCL
        if path.exists():
            yield str(path), os.RTLD_NOW
