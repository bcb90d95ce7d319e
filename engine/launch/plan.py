"""Environment, CPUs and directory of each rank, as a pure function of the job and its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..compat import switch
from ..launchers import AGENT, PLACES, TORCHRUN_PLACE
from ..setting import variable
from .cpu_binding import Allotment

MOST_RANKS = 256  # ranks of a job: a control segment has room for so many (engine_ext/shared/layout.h)
# What the launcher does itself, and ranks would do a second time; and an outer job's page.
PUBLISHING = ("metrics_port", "metrics_file_sd", "metrics_textfile")
OURS = (*map(variable, (*PUBLISHING, "metrics_address", "metrics_linger")), "ENGINE_COUNTERS")
# What only a job on several hosts is told.
BETWEEN_HOSTS = (
    *("ENGINE_CROSS_RANK", "ENGINE_CROSS_SIZE", "ENGINE_HOST_NAME"),
    *("ENGINE_HUB", "ENGINE_HUB_FD", "ENGINE_INTERFACE"),
)
# What only a worker of an elastic job is told.
OF_WORKERS = ("ENGINE_GATE", "ENGINE_WORKER", "ENGINE_SLOT")


@dataclass(frozen=True)
class Crew:
    """The ranks of one host among several.

    Attributes
    ----------
    host : int
        Number of the host; hosts are numbered by their lowest ranks.
    sizes : tuple of int
        By host, how many ranks it has.
    ranks : tuple of int
        In ascending order.
    name : str
        What the user calls the host.
    """

    host: int
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    name: str = ""

    def cross(self, local_rank: int) -> tuple[int, int]:
        """The number of this host among those that have a rank of this local rank, and how many these are."""
        having = [host for host, size in enumerate(self.sizes) if size > local_rank]
        return having.index(self.host), len(having)


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
        Path of the page of counters of each rank on this host; none if nothing is counted.
    memory : int or None
        Bytes of private memory that a rank may have.
    gpus : tuple of int, or None
        GPUs of each worker of a RiseML job, and its processes; None: GPUs are as they are.
    devices : sequence of str
        CUDA_VISIBLE_DEVICES of each rank on this host; none: as it is inherited.
    address : str
        `MASTER_ADDR`.
    hub : str
        `ADDRESS:PORT` on which rank 0 listens for the leaders of other hosts; empty: there are no other hosts.
    interface : str
        The network interface by which ranks of different hosts reach each other; empty: whichever leads there.
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
    gpus: tuple[int, int] | None = None
    devices: Sequence[str] = ()
    address: str = "127.0.0.1"
    hub: str = ""
    interface: str = ""


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


def plan(job: Job, allotment: Allotment, environment: Mapping[str, str], crew: Crew | None = None) -> list[RankPlan]:
    """Lay out the ranks of a job on one host.

    Parameters
    ----------
    job : Job
        The facts that they share.
    allotment : Allotment
        Their threads and CPUs.
    environment : mapping of str to str
        The launcher's environment, which they inherit.
    crew : Crew or None
        Which ranks are on this host; None: all of them, and there is no other host.

    Returns
    -------
    list of RankPlan
        In the order of ranks.
    """
    ranks = range(job.size) if crew is None else crew.ranks
    return [plan_one(job, allotment, environment, crew, rank, local_rank) for local_rank, rank in enumerate(ranks)]


def plan_one(
    job: Job, allotment: Allotment, environment: Mapping[str, str], crew: Crew | None, rank: int, local_rank: int
) -> RankPlan:
    """Lay out one rank. Parameters as of `plan`; a local rank beyond those for which CPUs were allotted has any CPU."""
    shared = without_places(environment)
    shared.setdefault("PYTHONUNBUFFERED", "1")
    if allotment.threads is not None:
        shared["OMP_NUM_THREADS"] = str(allotment.threads)
    shared.update((name, value) for name, value in job.settings.items() if name not in OURS)
    if job.horovod:
        shared = switch.environment(shared)
    slices = allotment.slices or ()
    return RankPlan(
        rank=rank,
        environment=shared | _place(job, rank, local_rank, crew),
        cpus=slices[local_rank] if local_rank < len(slices) else None,
        directory=job.directory / f"rank.{rank}",
        crowded=allotment.crowded,
        memory=job.memory,
    )


def without_places(environment: Mapping[str, str]) -> dict[str, str]:
    """Leave out what another launcher says, which would contradict ours, and what the launcher does itself.

    Parameters
    ----------
    environment : mapping of str to str

    Returns
    -------
    dict of str to str
    """
    # Torch would look for the store of an agent that is not there. Libraries that find torchrun's variables make a
    # process group and wrap the model in one of their own.
    hidden = {*PLACES, *TORCHRUN_PLACE, *OURS, *BETWEEN_HOSTS, *OF_WORKERS}
    return {name: value for name, value in environment.items() if name not in hidden and not name.startswith(AGENT)}


def _place(job: Job, rank: int, local_rank: int, crew: Crew | None) -> dict[str, str]:
    """Give the variables that tell a process its place: ours, and torchrun's and Horovod's where they are wanted."""
    number, size = str(rank), str(job.size)
    local, crew_size = str(local_rank), str(job.size if crew is None else len(crew.ranks))
    place = {
        "ENGINE_RANK": number,
        "ENGINE_SIZE": size,
        "ENGINE_LOCAL_RANK": local,
        "ENGINE_LOCAL_SIZE": crew_size,
        "ENGINE_JOB": job.name,
        "ENGINE_SECRET": job.secret,
        "ENGINE_OUTPUT_DIR": str(job.directory),
    }
    if crew is not None:
        place |= {"ENGINE_CROSS_RANK": str(crew.host), "ENGINE_CROSS_SIZE": str(len(crew.sizes))}
        place |= {"ENGINE_HOST_NAME": crew.name} if crew.name else {}
    if job.hub:
        place["ENGINE_HUB"] = job.hub
    if job.interface:
        place["ENGINE_INTERFACE"] = job.interface
    if job.torchrun:
        torchrun = (number, local, size, crew_size, job.address, str(job.port))
        place |= dict(zip(TORCHRUN_PLACE, torchrun, strict=True))
    if job.devices:
        place["CUDA_VISIBLE_DEVICES"] = job.devices[local_rank]
    if job.counters:
        place["ENGINE_COUNTERS"] = job.counters[local_rank]
    if job.horovod:
        cross_rank, cross_size = (0, 1) if crew is None else crew.cross(local_rank)
        place |= {
            "HOROVOD_RANK": number,
            "HOROVOD_SIZE": size,
            "HOROVOD_LOCAL_RANK": local,
            "HOROVOD_LOCAL_SIZE": crew_size,
            "HOROVOD_CROSS_RANK": str(cross_rank),
            "HOROVOD_CROSS_SIZE": str(cross_size),
        }
    return place
