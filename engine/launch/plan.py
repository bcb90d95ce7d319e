"""Environment, CPUs and directory of each rank, as a pure function of the job and its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..compat import switch
from ..launchers import AGENT, PLACES, TORCHRUN_PLACE
from ..setting import variable
from .cpu_binding import Allotment

# What the launcher does itself, and ranks would do a second time; and an outer job's page.
PUBLISHING = ("metrics_port", "metrics_file_sd", "metrics_textfile")
OURS = (*map(variable, (*PUBLISHING, "metrics_address", "metrics_linger")), "ENGINE_COUNTERS")


@dataclass(frozen=True)
class Job:
    """The facts that all ranks of a job share.

    Attributes
    ----------
    size : int
        Number of ranks.
    name : str
        Unique among the jobs of the host.
    secret : str
        32 random bytes in hex. It is passed in the environment only, never in an argument or a file.
    port : int
        `MASTER_PORT`.
    directory : Path
        The job's files; rank N's are in `rank.N`.
    settings : mapping of str to str
        Engine settings that options asked for, by variable.
    horovod : bool
        Whether ranks run scripts written for Horovod.
    torchrun : bool
        Whether ranks are given torchrun's variables too.
    counters : sequence of str
        Path of each rank's page of counters; none if nothing is counted.
    memory : int or None
        Bytes of private memory that a rank may have.
    devices : sequence of str
        CUDA_VISIBLE_DEVICES of each rank; none: as it is inherited.
    """

    size: int
    name: str
    secret: str = field(repr=False)
    port: int
    directory: Path
    settings: Mapping[str, str]
    horovod: bool = False
    torchrun: bool = True
    counters: Sequence[str] = ()
    memory: int | None = None
    devices: Sequence[str] = ()


@dataclass(frozen=True)
class RankPlan:
    """The environment, CPUs and directory of one rank.

    Attributes
    ----------
    rank : int
    environment : dict of str to str
        The whole environment.
    cpus : tuple of int, or None
        CPUs to bind to.
    directory : Path
        Where its files go.
    crowded : bool
        Whether there are more ranks than CPUs.
    memory : int or None
        Bytes of private memory that it may have.
    """

    rank: int
    environment: dict[str, str] = field(repr=False)
    cpus: tuple[int, ...] | None
    directory: Path
    crowded: bool = False
    memory: int | None = None


def plan(job: Job, allotment: Allotment, environment: Mapping[str, str]) -> list[RankPlan]:
    """Lay out the ranks of a job on one host.

    Parameters
    ----------
    job : Job
        The facts that they share.
    allotment : Allotment
        Their threads and CPUs.
    environment : mapping of str to str
        The launcher's environment, which they inherit.

    Returns
    -------
    list of RankPlan
        In the order of ranks.
    """
    # What another launcher says would contradict ours, and torch would look for the store of an agent that is not
    # there. Libraries that find torchrun's variables make a process group and wrap the model in one of their own.
    hidden = {*PLACES, *TORCHRUN_PLACE, *OURS}
    shared = {name: value for name, value in environment.items() if name not in hidden and not name.startswith(AGENT)}
    shared.setdefault("PYTHONUNBUFFERED", "1")
    if allotment.threads is not None:
        shared["OMP_NUM_THREADS"] = str(allotment.threads)
    shared.update((name, value) for name, value in job.settings.items() if name not in OURS)
    if job.horovod:
        shared = switch.environment(shared)
    return [
        RankPlan(
            rank=rank,
            environment=shared | _place(job, rank),
            cpus=None if allotment.slices is None else allotment.slices[rank],
            directory=job.directory / f"rank.{rank}",
            crowded=allotment.crowded,
            memory=job.memory,
        )
        for rank in range(job.size)
    ]


def _place(job: Job, rank: int) -> dict[str, str]:
    """Give the variables that tell a process its place: ours, and torchrun's and Horovod's where they are wanted."""
    number, size = str(rank), str(job.size)
    place = {
        "ENGINE_RANK": number,
        "ENGINE_SIZE": size,
        "ENGINE_LOCAL_RANK": number,
        "ENGINE_LOCAL_SIZE": size,
        "ENGINE_JOB": job.name,
        "ENGINE_SECRET": job.secret,
        "ENGINE_OUTPUT_DIR": str(job.directory),
    }
    if job.torchrun:
        place |= dict(zip(TORCHRUN_PLACE, (number, number, size, size, "127.0.0.1", str(job.port)), strict=True))
    if job.devices:
        place["CUDA_VISIBLE_DEVICES"] = job.devices[rank]
    if job.counters:
        place["ENGINE_COUNTERS"] = job.counters[rank]
    if job.horovod:
        place |= {
            "HOROVOD_RANK": number,
            "HOROVOD_SIZE": size,
            "HOROVOD_LOCAL_RANK": number,
            "HOROVOD_LOCAL_SIZE": size,
            "HOROVOD_CROSS_RANK": "0",
            "HOROVOD_CROSS_SIZE": "1",
        }
    return place
