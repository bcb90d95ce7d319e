"""Environment, CPUs and directory of each rank, as a pure function of the job and its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...config.launchers import AGENT, PLACES, TORCHRUN_PLACE
from ...config.setting import variable_name
from ...host.python_startup import HOROVOD, add_startup
from .cpu_binding import Allotment

MOST_RANKS = 256  # largest number of ranks, for which a control segment has room (engine_ext/shared/layout.h)
# Settings that the launcher acts on, so that ranks must not, and the page of an outer job.
PUBLISHING = ("metrics_port", "metrics_file_sd", "metrics_textfile", "metrics_otlp")
OURS = (*map(variable_name, (*PUBLISHING, "metrics_address", "metrics_linger")), "ENGINE_COUNTERS")
# Variables of jobs on several hosts.
BETWEEN_HOSTS = (
    *("ENGINE_CROSS_RANK", "ENGINE_CROSS_SIZE", "ENGINE_HOST_NAME"),
    *("ENGINE_HUB", "ENGINE_HUB_FD", "ENGINE_INTERFACE"),
)
# Variables of workers of elastic jobs.
OF_WORKERS = ("ENGINE_GATE", "ENGINE_WORKER", "ENGINE_SLOT")


@dataclass(frozen=True)
class Crew:
    """The ranks of one host among several."""

    host: int  # number of the host; hosts are numbered in the order of their lowest ranks
    sizes: tuple[int, ...]  # number of ranks of each host
    ranks: tuple[int, ...]  # ranks of this host, in ascending order
    name: str = ""  # name of the host, as the user gave it

    def cross_rank(self, local_rank: int) -> tuple[int, int]:
        """Return this host's index among the hosts that have a local rank, and their number (cross rank and size)."""
        having = [host for host, size in enumerate(self.sizes) if size > local_rank]
        return having.index(self.host), len(having)


@dataclass(frozen=True)
class Job:
    """The facts that all ranks of a job share."""

    size: int  # number of ranks
    name: str  # unique among the jobs of the host
    # 32 random bytes in hex, passed in the environment only, never in an argument or a file
    secret: str = field(repr=False)
    port: int  # `MASTER_PORT`
    directory: Path  # directory of the job's files; rank N's are in `rank.N`
    settings: Mapping[str, str]  # engine settings given by options, by variable
    horovod: bool = False  # whether ranks run scripts written for Horovod
    torchrun: bool = True  # whether ranks get torchrun's variables too
    counters: Sequence[str] = ()  # path of the page of counters of each rank on this host; empty if nothing is counted
    memory: int | None = None  # limit of a rank's private memory in bytes; None: no limit
    # GPUs and processes of each worker of a RiseML job; None: CUDA_VISIBLE_DEVICES is left as it is
    gpus: tuple[int, int] | None = None
    devices: Sequence[str] = ()  # CUDA_VISIBLE_DEVICES of each rank on this host; empty: the inherited value is kept
    address: str = "127.0.0.1"  # `MASTER_ADDR`
    hub: str = ""  # `ADDRESS:PORT` on which rank 0 listens for the leaders of other hosts; empty: there are none
    interface: str = ""  # network interface between ranks of different hosts; empty: whichever leads there


@dataclass(frozen=True)
class RankPlan:
    """The environment, CPUs and directory of one rank."""

    rank: int
    environment: dict[str, str] = field(repr=False)  # complete environment of the process
    cpus: tuple[int, ...] | None  # CPUs to which it is bound; None: any CPU
    directory: Path  # directory of its files
    crowded: bool = False  # whether there are more ranks than CPUs
    memory: int | None = None  # limit of its private memory in bytes; None: no limit


def plan(job: Job, allotment: Allotment, environment: Mapping[str, str], crew: Crew | None = None) -> list[RankPlan]:
    """Plan the ranks of a job on one host, in the order of ranks; they inherit the launcher's environment.

    `crew` are the ranks of this host; None: all ranks, and there is no other host.
    """
    ranks = range(job.size) if crew is None else crew.ranks
    return [plan_one(job, allotment, environment, crew, rank, local_rank) for local_rank, rank in enumerate(ranks)]


def plan_one(
    job: Job, allotment: Allotment, environment: Mapping[str, str], crew: Crew | None, rank: int, local_rank: int
) -> RankPlan:
    """Plan one rank; it has the parameters of `plan`. A local rank for which no CPUs were allotted may use any CPU."""
    shared = without_places(environment)
    shared.setdefault("PYTHONUNBUFFERED", "1")
    if allotment.threads is not None:
        shared["OMP_NUM_THREADS"] = str(allotment.threads)
    shared.update((name, value) for name, value in job.settings.items() if name not in OURS)
    if job.horovod:
        shared = add_startup(shared, HOROVOD)
    slices = allotment.slices or ()
    return RankPlan(
        rank=rank,
        environment=shared | _place_variables(job, rank, local_rank, crew),
        cpus=slices[local_rank] if local_rank < len(slices) else None,
        directory=job.directory / f"rank.{rank}",
        crowded=allotment.crowded,
        memory=job.memory,
    )


def without_places(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without other launchers' variables of places, and without what the launcher does itself."""
    # With these variables torch would look for the store of an agent that does not exist, and libraries would make a
    # process group and wrap the model in DDP.
    hidden = {*PLACES, *TORCHRUN_PLACE, *OURS, *BETWEEN_HOSTS, *OF_WORKERS}
    return {name: value for name, value in environment.items() if name not in hidden and not name.startswith(AGENT)}


def _place_variables(job: Job, rank: int, local_rank: int, crew: Crew | None) -> dict[str, str]:
    """Return the variables of a rank's place: the engine's own, and torchrun's and Horovod's if they are wanted."""
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
        cross_rank, cross_size = (0, 1) if crew is None else crew.cross_rank(local_rank)
        place |= {
            "HOROVOD_RANK": number,
            "HOROVOD_SIZE": size,
            "HOROVOD_LOCAL_RANK": local,
            "HOROVOD_LOCAL_SIZE": crew_size,
            "HOROVOD_CROSS_RANK": str(cross_rank),
            "HOROVOD_CROSS_SIZE": str(cross_size),
        }
    return place
