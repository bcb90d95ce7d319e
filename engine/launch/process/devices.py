"""GPUs of a host, and their division among the processes of RiseML workers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ...text.readable import format_count
from ..errors import LaunchError


def devices_here(visible: str | None, devices: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the GPUs of this machine, as CUDA_VISIBLE_DEVICES names them.

    Parameters
    ----------
    visible : str or None
        CUDA_VISIBLE_DEVICES of the environment, which limits the job; None: not set.
    devices : Path
        Directory of device files.
    """
    if visible is not None:
        return tuple(part.strip() for part in visible.split(",") if part.strip())
    numbers = (re.fullmatch(r"nvidia([0-9]{1,9})", path.name) for path in devices.glob("nvidia*"))
    return tuple(sorted((found[1] for found in numbers if found), key=int))


def share_devices(gpus: int, processes: int, size: int, devices: Sequence[str]) -> tuple[str, ...]:
    """Divide the GPUs of this machine among the processes of the workers that run on it.

    Parameters
    ----------
    gpus, processes : int
        Numbers of GPUs and processes of each worker.
    size : int
        Number of processes on this machine, a multiple of `processes`.
    devices : sequence of str
        The machine's GPUs.

    Returns
    -------
    tuple of str
        CUDA_VISIBLE_DEVICES of each process, by its local rank. With as many processes as GPUs, each process sees the
        GPUs of all workers here, because programs choose by `local_rank`. Otherwise it sees its share of its worker's
        GPUs, or all of the worker's if they cannot be divided evenly.

    Raises
    ------
    LaunchError
        The machine has too few GPUs.
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
