"""Table of all launchers' variables, which tell a process its rank and the size of its job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Launcher:
    """Variables of one launcher."""

    name: str  # name of the launcher in messages
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...]  # variables that are equal for all ranks of a job, and differ between jobs
    others: tuple[str, ...] = ()  # more variables about a process's place in its job, which the engine does not read
    host: str = ""  # variable that numbers the hosts, or the agents if a host has several; empty if there is none
    strict: bool = False  # whether an incomplete set is an error; generic names, such as `RANK`, may be set by chance

    @property
    def place(self) -> tuple[str, str, str, str]:
        """Names of the four variables that the engine reads."""
        return self.rank, self.local_rank, self.size, self.local_size


ENGINERUN = Launcher(
    "enginerun",
    "ENGINE_RANK",
    "ENGINE_SIZE",
    "ENGINE_LOCAL_RANK",
    "ENGINE_LOCAL_SIZE",
    ("ENGINE_JOB",),
    host="ENGINE_CROSS_RANK",
    strict=True,
)
TORCHRUN = Launcher(
    "torchrun",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
    ("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    host="GROUP_RANK",
)
OPEN_MPI = Launcher(
    "mpirun (Open MPI)",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"),
    ("OMPI_COMM_WORLD_NODE_RANK", "PMIX_RANK", "PMIX_NAMESPACE"),
)
PMI = Launcher("mpiexec (PMI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("PMI_ID", "PMI_JOBID"))
LAUNCHERS = (ENGINERUN, TORCHRUN, OPEN_MPI, PMI)
"""Launchers that set four numbers, in the order of precedence. Slurm's variables have another form."""

SLURM = "srun"
SLURM_PLACE = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
SLURM_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")

JOBS = (*(name for each in LAUNCHERS if each is not ENGINERUN for name in each.job), *SLURM_JOB)
"""Variables of other launchers that are equal for all ranks of a job."""
PLACES = (*(name for each in (OPEN_MPI, PMI) for name in each.place + each.others), *SLURM_PLACE, *TORCHRUN.others)
"""Variables of other launchers about a process's place in its job, except torchrun's four and its address."""
AGENT = "TORCHELASTIC_"
"""Prefix of the variables of torchrun's agent."""
TORCHRUN_PLACE = (*TORCHRUN.place, "MASTER_ADDR", "MASTER_PORT")
"""Torchrun's variables: `RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT`."""
