"""The driver's library and NCCL: found and loaded when a GPU is opened, not before.

Nothing links to them, and no header of theirs is needed: functions are found by name (`engine_ext/gpu/cuda.h` and
`nccl.h`), those of the driver by the versioned names under which it exports them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

from engine_ext.gpu.lane import functions

from ..errors import DeviceError
from ..setting import variable
from .nccl_file import OLDEST_NCCL, load_nccl, nccl_version

CUDA = "libcuda.so.1"
OLDEST_CUDA = 11040  # of the driver: the first with cuDeviceGetUuid_v2


@dataclass(frozen=True)
class Libraries:
    """Both libraries, loaded."""

    cuda: str
    """The driver's file."""
    driver: int
    """The version of CUDA that it is for, as 12090."""
    nccl: str
    nccl_version: int
    """As 22807."""
    addresses: list[int]
    """Of the functions, in the order of `functions`; 0: too new for this NCCL."""


def load(cuda: Path | None, nccl: Path | None) -> Libraries:
    """Load both.

    Parameters
    ----------
    cuda, nccl : Path, optional
        The settings `cuda_library` and `nccl_library`.

    Raises
    ------
    DeviceError
        There is none, or one that is too old or lacks a function; with what to do about it.
    """
    driver_version = ctypes.c_int()
    # Both functions that tell versions may be called at any time, in any thread, and wait for nobody.
    driver = _driver(cuda)
    driver_place = _place(driver, "cuDriverGetVersion")
    driver.cuDriverGetVersion(ctypes.byref(driver_version))
    mine = f"{driver_place}, the driver for CUDA {cuda_text(driver_version.value)},"
    mend = f"a driver for CUDA {cuda_text(OLDEST_CUDA)} or newer is needed"
    addresses = [_address(driver, name, mine, mend) for name, since in functions() if not since]
    library = load_nccl(nccl)
    place = _place(library, "ncclGetVersion")
    version = nccl_version(library)
    mine = f"{place}, NCCL {nccl_text(version)},"
    if version < OLDEST_NCCL:
        raise DeviceError(
            f"{mine} is too old: {nccl_text(OLDEST_NCCL)} or newer is needed; install nvidia-nccl-cu12 or "
            f"nvidia-nccl-cu13, or name another file with {variable('nccl_library')}"
        )
    mend = f"it is damaged, or no NCCL: install it again, or name another file with {variable('nccl_library')}"
    for name, since in functions():
        if since:
            known = since <= version
            addresses.append(_address(library, name, mine, mend) if known else 0)
    return Libraries(driver_place, driver_version.value, place, version, addresses)


def _driver(chosen: Path | None) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(chosen or CUDA), mode=os.RTLD_NOW)
    except OSError as error:
        raise DeviceError(
            f"the CUDA driver cannot be loaded ({error}): install NVIDIA's driver, give a container the GPUs (docker "
            f"run --gpus all), or name the file with {variable('cuda_library')}"
        ) from None


def _address(library: ctypes.CDLL, name: str, mine: str, mend: str) -> int:
    """Where a function is; an error names the library, as `mine` calls it, and says how to mend it."""
    try:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    except AttributeError:
        raise DeviceError(f"{mine} lacks the function {name}: {mend}") from None


def _place(library: ctypes.CDLL, name: str) -> str:
    """The file in which a function of a library is, as the kernel knows it; else by what it was loaded."""
    address = _address(library, name, str(library._name), "it is another library")
    with contextlib.suppress(OSError), open("/proc/self/maps", errors="surrogateescape") as file:
        for line in file:
            fields = line.split(maxsplit=5)
            low, _, high = fields[0].partition("-")
            if int(low, 16) <= address < int(high, 16) and len(fields) > 5:
                return fields[5].strip()
    return str(library._name)


def nccl_text(version: int) -> str:
    """22807 as `2.28.7`, and 2708, as older ones count, as `2.7.8`."""
    unit = 10000 if version >= 10000 else 1000
    return f"{version // unit}.{version % unit // 100}.{version % 100}"


def cuda_text(version: int) -> str:
    """12090 as `12.9`."""
    return f"{version // 1000}.{version % 1000 // 10}"
