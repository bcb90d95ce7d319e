"""GPUs of a host, and their division among the processes of RiseML workers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ...text.readable import format_count
from ..errors import LaunchError


def devices_here(visible: str | None, devices: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the GPUs of this machine, as CUDA_VISIBLE_DEVICES names them.

    `visible` is the value of that variable in the environment, which limits the job; None: not set.
    """
    if visible is not None:
        return tuple(part.strip() for part in visible.split(",") if part.strip())
    numbers = (re.fullmatch(r"nvidia([0-9]{1,9})", path.name) for path in devices.glob("nvidia*"))
    return tuple(sorted((found[1] for found in numbers if found), key=int))


def share_devices(gpus: int, processes: int, size: int, devices: Sequence[str]) -> tuple[str, ...]:
    """Divide the GPUs of this machine, and return CUDA_VISIBLE_DEVICES of each process here, by its local rank.

    Each worker has `gpus` GPUs and `processes` processes; `size`, a multiple of the latter, is the number of processes
    here. With as many processes as GPUs, each process sees the GPUs of all workers here, because programs choose by
    `local_rank`. Otherwise it sees its share of its worker's GPUs, or all of them if they cannot be divided evenly. A
    `LaunchError` is raised if the machine has too few GPUs.
    """
    workers = size // processes
    needed = gpus * workers
    if needed > len(devices):
        raise LaunchError(
            f"{format_count(workers, 'worker')} need {needed} GPUs, and this machine has {len(devices)}: write "
            "'gpus: 0', and 'workers: {count: .., processes: ..}'"
        )
    if gpus == processes:
        return (",".join(devices[:needed]),) * size
    shares = processes if gpus % processes == 0 else 1
    share = gpus // shares
    first = [rank // processes * gpus + (rank % processes * share if shares > 1 else 0) for rank in range(size)]
    return tuple(",".join(devices[at : at + share]) for at in first)
