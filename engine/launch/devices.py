"""GPUs of a host, and which of them each process of a RiseML worker sees."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from .. import readable
from .errors import LaunchError


def devices_here(visible: str | None, devices: Path = Path("/dev")) -> tuple[str, ...]:
    """The GPUs of this machine, as CUDA_VISIBLE_DEVICES names them.

    Parameters
    ----------
    visible : str or None
        CUDA_VISIBLE_DEVICES of the environment, to which the job is bound; None: not set.
    devices : Path
        `/dev`.

    Returns
    -------
    tuple of str
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
        Of each worker.
    size : int
        Processes on this machine, a multiple of `processes`.
    devices : sequence of str
        The machine's GPUs.

    Returns
    -------
    tuple of str
        CUDA_VISIBLE_DEVICES of each process, by its place on this machine. With a process for each GPU, all see those
        of all workers here, for they choose by `local_rank`. Otherwise each sees its share of its worker's, or all of
        them if they cannot be divided.

    Raises
    ------
    LaunchError
        There are fewer.
    """
    workers = size // processes
    needed = gpus * workers
    if needed > len(devices):
        raise LaunchError(
            f"{readable.count(workers, 'worker')} need {needed} GPUs, and this machine has {len(devices)}: write "
            "'gpus: 0', and 'workers: {count: .., processes: ..}'"
        )
    if gpus == processes:
        return (",".join(devices[:needed]),) * size
    shares = processes if gpus % processes == 0 else 1
    share = gpus // shares
    first = [rank // processes * gpus + (rank % processes * share if shares > 1 else 0) for rank in range(size)]
    return tuple(",".join(devices[at : at + share]) for at in first)
