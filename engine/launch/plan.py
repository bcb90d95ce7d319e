"""What each rank is started with: a pure function of the job and its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..compat import switch
from .cpu_binding import Allotment

# How other launchers tell a process its place. Started under one of them, ours would be contradicted by its variables,
# and torch would look for an agent's store that is not there.
FOREIGN = (
    *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "NODE_RANK")),
    *("PMIX_RANK", "PMIX_NAMESPACE", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
)
FOREIGN_PREFIX = "TORCHELASTIC_"
# Torchrun's. Libraries that find them make a process group and wrap the model in DistributedDataParallel by themselves.
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# What the launcher does itself, and ranks would do a second time; and an outer job's page.
OURS = (
    *(f"ENGINE_METRICS_{name}" for name in ("PORT", "ADDRESS", "FILE_SD", "TEXTFILE")),
    "ENGINE_COUNTERS",
)


@dataclass(frozen=True)
class Job:
    """What all ranks of a job share.

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
        Ranks run scripts written for Horovod.
    torchrun : bool
        Ranks are given torchrun's variables too.
    counters : sequence of str
        Path of each rank's page of counters; none if nothing is counted.
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


@dataclass(frozen=True)
class RankPlan:
    """What one rank is started with.

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
        There are more ranks than CPUs.
    """

    rank: int
    environment: dict[str, str] = field(repr=False)
    cpus: tuple[int, ...] | None
    directory: Path
    crowded: bool = False


def plan(job: Job, allotment: Allotment, environment: Mapping[str, str]) -> list[RankPlan]:
    """Lay out the ranks of a job on one host.

    Parameters
    ----------
    job : Job
        What they share.
    allotment : Allotment
        Their threads and CPUs.
    environment : mapping of str to str
        The launcher's environment, which they inherit.

    Returns
    -------
    list of RankPlan
        In the order of ranks.
    """
    shared = {
        name: value
        for name, value in environment.items()
        if name not in FOREIGN + OURS + TORCHRUN and not name.startswith(FOREIGN_PREFIX)
    }
    shared.setdefault("PYTHONUNBUFFERED", "1")
    if allotment.threads is not None:
        shared["OMP_NUM_THREADS"] = str(allotment.threads)
    shared.update(job.settings)
    if job.horovod:
        shared = switch.environment(shared)
    return [
        RankPlan(
            rank=rank,
            environment=shared | _place(job, rank),
            cpus=None if allotment.slices is None else allotment.slices[rank],
            directory=job.directory / f"rank.{rank}",
            crowded=allotment.crowded,
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
        place |= dict(zip(TORCHRUN, (number, number, size, size, "127.0.0.1", str(job.port)), strict=True))
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
