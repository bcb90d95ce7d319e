"""The CUDA driver's library and NCCL: found and loaded when a GPU is opened.

Nothing links to them, and their headers are not needed. Functions are found by name (`engine_ext/gpu/cuda.h` and
`nccl.h`); those of the driver have versioned names.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

from engine_ext.gpu.cuda_thread import functions

from ..config.setting import variable_name
from ..errors import DeviceError
from .nccl_file import OLDEST_NCCL, load_nccl, nccl_version

CUDA = "libcuda.so.1"
OLDEST_CUDA = 11040  # oldest driver version: the first with cuDeviceGetUuid_v2


@dataclass(frozen=True)
class Libraries:
    """Both libraries after loading."""

    cuda: str
    """File of the driver."""
    driver: int
    """CUDA version that the driver supports, such as 12090."""
    nccl: str
    nccl_version: int
    """Version of NCCL, such as 22807."""
    addresses: list[int]
    """Addresses of the functions, in the order of `functions`; 0: this NCCL lacks the function."""


def load(cuda: Path | None, nccl: Path | None) -> Libraries:
    """Load both libraries; the paths are the settings `cuda_library` and `nccl_library`.

    Raises DeviceError with the remedy if a library is missing, too old or lacks a function.
    """
    driver_version = ctypes.c_int()
    # Both version functions may be called at any time from any thread, and do not block.
    driver = _load_driver(cuda)
    driver_place = _find_library_file(driver, "cuDriverGetVersion")
    driver.cuDriverGetVersion(ctypes.byref(driver_version))
    mine = f"{driver_place}, the driver for CUDA {cuda_text(driver_version.value)},"
    mend = f"a driver for CUDA {cuda_text(OLDEST_CUDA)} or newer is needed"
    addresses = [_find_function(driver, name, mine, mend) for name, since in functions() if not since]
    library = load_nccl(nccl)
    place = _find_library_file(library, "ncclGetVersion")
    version = nccl_version(library)
    mine = f"{place}, NCCL {nccl_text(version)},"
    if version < OLDEST_NCCL:
        raise DeviceError(
            f"{mine} is too old: {nccl_text(OLDEST_NCCL)} or newer is needed; install nvidia-nccl-cu12 or "
            f"nvidia-nccl-cu13, or name another file with {variable_name('nccl_library')}"
        )
    mend = f"it is damaged, or no NCCL: install it again, or name another file with {variable_name('nccl_library')}"
    for name, since in functions():
        if since:
            known = since <= version
            addresses.append(_find_function(library, name, mine, mend) if known else 0)
    return Libraries(driver_place, driver_version.value, place, version, addresses)


def _load_driver(chosen: Path | None) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(chosen or CUDA), mode=os.RTLD_NOW)
    except OSError as error:
        raise DeviceError(
            f"the CUDA driver cannot be loaded ({error}): install NVIDIA's driver, give a container the GPUs (docker "
            f"run --gpus all), or name the file with {variable_name('cuda_library')}"
        ) from None


def _find_function(library: ctypes.CDLL, name: str, mine: str, mend: str) -> int:
    """Return the address of a function; an error names the library by `mine` and the remedy by `mend`."""
    try:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    except AttributeError:
        raise DeviceError(f"{mine} lacks the function {name}: {mend}") from None


def _find_library_file(library: ctypes.CDLL, name: str) -> str:
    """Return the file that contains a library's function, from the memory map, or else the name it was loaded by."""
    address = _find_function(library, name, str(library._name), "it is another library")
    with contextlib.suppress(OSError), open("/proc/self/maps", errors="surrogateescape") as file:
        for line in file:
            fields = line.split(maxsplit=5)
            low, _, high = fields[0].partition("-")
            if int(low, 16) <= address < int(high, 16) and len(fields) > 5:
                return fields[5].strip()
    return str(library._name)


def nccl_text(version: int) -> str:
    """Format a version: 22807 as `2.28.7`, and 2708, in the older scheme, as `2.7.8`."""
    unit = 10000 if version >= 10000 else 1000
    return f"{version // unit}.{version % unit // 100}.{version % 100}"


def cuda_text(version: int) -> str:
    """Format a version: 12090 as `12.9`."""
    return f"{version // 1000}.{version % 1000 // 10}"
