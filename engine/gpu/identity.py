"""Identity of a rank's GPU, and the check that the GPUs of all ranks can work together.

GPUs are identified by UUID. Numbers depend on CUDA_VISIBLE_DEVICES, and slices of one GPU (MIG) share its bus address
but not the UUID. NCCL supports one slice of a GPU, and one rank on it, unless it is configured otherwise (`SHARING`).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from ..config.setting import variable_name
from ..errors import DeviceError
from ..host.machine import read_boot_id
from ..text.readable import format_ranks
from .libraries import Libraries, nccl_text

FAILED = "failed"  # key of the reason, in the message of a rank that failed
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"  # environment variable; 1: ranks may share a GPU, slowly, for tests
OLDEST_SHARING = 23000  # first NCCL version that supports it


def describe_gpu(found: Mapping[str, int | str], ordinal: int, libraries: Libraries, sums: str) -> dict[str, Any]:
    """Describe a rank's GPU for the other ranks.

    `found` is the rank's `CudaThread.identity`. `ordinal` is the number of the GPU among those that the process sees,
    and `sums` the setting `device_sums`.
    """
    return {
        **found,
        "uuid": str(uuid.UUID(hex=str(found["uuid"]))),
        "machine": read_boot_id(),
        "ordinal": ordinal,
        "nccl": nccl_text(libraries.nccl_version),
        "nccl_library": libraries.nccl,
        "shares": can_share_gpu(libraries.nccl_version),
        "device_sums": sums,
    }


def can_share_gpu(nccl_version: int) -> bool:
    """Return whether NCCL lets ranks share a GPU: its version supports it, and the environment enables it."""
    return nccl_version >= OLDEST_SHARING and os.environ.get(SHARING) == "1"


def refuse_failed(told: Sequence[Mapping[str, Any]], numbers: Sequence[int]) -> None:
    """Raise DeviceError if ranks report failures, with all of them in one text.

    `numbers` has the world ranks of the messages, which may be those of a process set.
    """
    lines = [f"rank {rank}: {each[FAILED]}" for rank, each in zip(numbers, told, strict=True) if FAILED in each]
    if lines:
        raise DeviceError("the GPUs cannot be used\n  " + "\n  ".join(lines))


def check_gpus(told: Sequence[Mapping[str, Any]]) -> None:
    """Raise DeviceError if the GPUs that the ranks describe cannot work together, with all reasons in one text."""
    lines = []
    by_uuid: dict[str, list[int]] = {}
    for rank, each in enumerate(told):
        by_uuid.setdefault(each["uuid"], []).append(rank)
    for number, ranks in by_uuid.items():
        if len(ranks) > 1 and not all(told[rank]["shares"] for rank in ranks):
            known = told[ranks[0]]
            each_as = ", ".join(f"rank {rank} as {_format_device_number(told[rank])}" for rank in ranks)
            lines.append(
                f"{format_ranks(ranks)} have the same GPU {number} ({known['name']}, {known['pci']}), {each_as}: "
                "give each rank one of its own, as with torch.cuda.set_device(engine.local_rank()), or by "
                "CUDA_VISIBLE_DEVICES"
            )
    lines += [
        f"ranks {other} and {rank} have slices (MIG) of one GPU ({each['name']}, {each['pci']}), of which NCCL takes "
        "one: give each rank a GPU of its own, or run one rank there"
        for rank, each in enumerate(told)
        for other in range(rank)
        if each["machine"] and each["uuid"] != told[other]["uuid"] and _get_location(each) == _get_location(told[other])
    ]
    first = told[0]
    for rank, each in enumerate(told):
        if each["nccl"] != first["nccl"]:
            lines.append(
                f"rank {rank} has NCCL {each['nccl']} ({each['nccl_library']}), rank 0 has NCCL {first['nccl']} "
                f"({first['nccl_library']}): install the same version"
            )
        if each["device_sums"] != first["device_sums"]:
            lines.append(
                f"rank {rank} has the setting device_sums={each['device_sums']}, rank 0 has "
                f"device_sums={first['device_sums']}: give all ranks the same, by {variable_name('device_sums')} or "
                "enginerun --device-sums"
            )
    if lines:
        raise DeviceError("the ranks' GPUs cannot work together\n  " + "\n  ".join(lines))


def _get_location(each: Mapping[str, Any]) -> tuple[str, str]:
    """Return the location of a GPU: its machine and its bus address."""
    return each["machine"], each["pci"]


def _format_device_number(each: Mapping[str, Any]) -> str:
    return f"its device {each['ordinal']} of {each['devices']}"
