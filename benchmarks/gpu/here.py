"""Description of this machine: a GPU or its stand-in, driver, NCCL, PyTorch. Determined in a process of its own.

`python -m benchmarks.gpu.here FILE` writes it to a file, so that a hanging or crashing driver does no harm.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu import driver
from engine.config import config
from engine.errors import DeviceError

SM = (75, 76, 16)  # device attributes: compute capability, major and minor; number of multiprocessors


def describe_machine() -> dict[str, Any]:
    """Describe the machine; if no GPU can be used, `none` is the reason.

    Otherwise the result has `stand_in`, `cards`, `driver`, `cuda`, `nccl`, `nccl_version`, `why_no_nccl` and `torch`.
    `why_no_torch` is the reason why PyTorch has no CUDA here.
    """
    try:
        library = driver.load_library()
    except OSError as error:
        return {"none": f"no GPU: {error}; install NVIDIA's driver, or name its library with ENGINE_CUDA_LIBRARY"}
    if code := library.cuInit(0):
        return {"none": f"no GPU: cuInit returned {driver.get_code_name(library, code)}"}
    found: dict[str, Any] = {"stand_in": driver.is_stand_in(library), "cards": [_describe_card(0)], "nccl_version": 0}
    count = ctypes.c_int()
    library.cuDeviceGetCount(ctypes.byref(count))
    found["cards"] += [_describe_card(ordinal) for ordinal in range(1, count.value)]
    found["driver"] = _read_module_version()
    torch, found["torch"], found["why_no_torch"] = _import_torch(found["stand_in"])
    from engine.gpu.libraries import cuda_text, load, nccl_text  # loads the extension, which the tables do without

    try:
        settings = config.load(config.read_environment())
        libraries = load(settings.cuda_library, settings.nccl_library)
    except DeviceError as error:
        return found | {"why_no_nccl": str(error), "cuda": "?", "nccl": None}
    found |= {"cuda": cuda_text(libraries.driver), "cuda_library": libraries.cuda, "why_no_nccl": None}
    found |= {"nccl_version": libraries.nccl_version, "nccl": nccl_text(libraries.nccl_version)}
    found["nccl_library"] = libraries.nccl
    if torch is not None:
        found["torch"] += f" for CUDA {torch.version.cuda}"
    return found


def _describe_card(ordinal: int) -> dict[str, Any]:
    device = driver.CudaDriver(ordinal)
    name = ctypes.create_string_buffer(128)
    device.call_driver("cuDeviceGetName", name, len(name), device.read_number("cuDeviceGet", ordinal))
    major, minor, processors = (
        device.read_number("cuDeviceGetAttribute", attribute, device.read_number("cuDeviceGet", ordinal))
        for attribute in SM
    )
    return {
        "name": name.value.decode(errors="replace"),
        "capability": f"{major}.{minor}",
        "multiprocessors": processors,
        "memory_gib": round(device.read_memory()[1] / 2**30, 1),
    }


def _read_module_version() -> str | None:
    """Return the version of the driver's kernel module, such as 570.86.15."""
    with contextlib.suppress(OSError):
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").partition("Kernel Module")[2].split()
        return next((word for word in words if word[0].isdigit()), None)
    return None


def _import_torch(stand_in: bool) -> tuple[Any, str | None, str | None]:
    """Return PyTorch if it has CUDA, its version, and why it has none. PyTorch also loads NCCL, which is used then."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None, None, "torch is not installed"
    if stand_in:
        return None, version, "torch has no CUDA here: the stand-in takes none of its work"
    import torch

    if not torch.cuda.is_available():
        return None, version, "torch has no CUDA here"
    return torch, version, None


def describe(found: dict[str, Any]) -> str:
    """Return one line with the GPU and the software."""
    cards = found["cards"]
    first = cards[0]
    card = f"{first['name']}, {first['memory_gib']} GiB, capability {first['capability']}"
    card += f", {first['multiprocessors']} multiprocessors" + (f", of {len(cards)} GPUs" if len(cards) > 1 else "")
    parts = [card, f"driver {found['driver']}" if found.get("driver") else "", f"CUDA {found['cuda']}"]
    parts += [f"NCCL {found['nccl']}" if found["nccl"] else "no NCCL"]
    parts += [f"torch {found['torch']}" if found["torch"] else "no torch"]
    return ("STAND-IN, no GPU: " if found["stand_in"] else "") + "; ".join(filter(None, parts))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(describe_machine()), encoding="utf-8")
