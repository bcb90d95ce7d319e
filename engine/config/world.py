"""Detection of this process's rank and size, from the variables of the launcher that started it.

Launchers are checked in a fixed order, and the first with a complete set of variables is used: enginerun, torchrun,
Open MPI, PMI (MPICH, Intel MPI), Slurm. If a later one names several processes and differs, that is an error. Slurm is
an exception: it often starts one launcher per machine, and its variables also exist in a plain shell of an allocation.
So it never contradicts another launcher, and counts only inside a step that `srun` started. A launcher without local
rank and size is skipped if another one is complete (Slurm, Flux and others set PMI's rank and size besides their own
variables); otherwise it is an error. Without a launcher there is one rank.

A job is on several hosts if a launcher says that only some of the ranks are on this host. Such a job needs a secret and
a meeting address (`engine.config.hub_address`), or MPI, over which ranks agree on both
(`engine.net.rendezvous.mpi_bootstrap`).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..errors import ConfigError
from ..host import processes
from .forms import MOST, Whole
from .hub_address import BY_MPI, HubAddress, find_hub_address, is_given, lacking_secret, read_secret
from .launchers import LAUNCHERS, PMI, SLURM, SLURM_JOB, TORCHRUN, Launcher
from .setting import read_variable

NO_LAUNCHER = "no launcher"
COUNTED = Whole(0, MOST)  # a rank, or a number of ranks or hosts


@dataclass(frozen=True)
class World:
    """Place of one process in its job."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    job: str
    """Text that is equal on all ranks of this job, and differs from that of other jobs."""
    secret: str | None
    """Secret of the job's processes; None if the launcher gave none."""
    source: str
    """Name of the launcher whose variables were used."""
    hub: HubAddress | None = None
    """Address at which the hosts meet; None on one host."""
    host: str = ""
    """Text that distinguishes the ranks of different hosts, even if two "hosts" are on one machine."""
    host_name: str = ""
    """Name of this host in messages, as the user chose it; empty if unknown."""
    number: int | None = None
    """Number of the world, set by the driver of an elastic job; None: each process counts its own worlds."""
    workers: tuple[int, ...] = ()
    """Numbers of an elastic job's workers, by rank; empty in other jobs."""

    reason: str = ""
    """Reason why an elastic job has formed this world."""

    @property
    def several_hosts(self) -> bool:
        """Return whether some of the ranks are on other hosts."""
        return self.local_size != self.size

    @property
    def leads(self) -> bool:
        """Return whether this rank gathers those of its host: rank 0, or on several hosts each local rank 0."""
        return self.local_rank == 0 if self.several_hosts else self.rank == 0

    @property
    def elastic(self) -> dict[str, int | str]:
        """Fields about the elastic job in this rank's files: world, worker, and the reason for the world."""
        if self.number is None or not self.workers:
            return {}
        return {"world": self.number, "worker": self.workers[self.rank], "reason": self.reason}

    @property
    def key(self) -> str:
        """Key by which the ranks of a world find each other: the job, and the number from an elastic job's driver.

        The process's own count of worlds is not part of it, since it may differ between ranks after a failed `init`.
        """
        return self.job if self.number is None else f"{self.job}#{self.number}"

    def make_file_id(self, generation: int) -> str:
        """Return a text that identifies files of the same world, number `generation`; empty on one host."""
        key = f"{self.job}#{generation}".encode()
        return f"world {hashlib.sha256(key).hexdigest()[:16]}" if self.several_hosts else ""

    @property
    def proof(self) -> bytes:
        """Key of the HMAC by which ranks authenticate themselves. Without a secret it only distinguishes jobs."""
        secret = self.secret if self.secret is not None else "engine"
        return hashlib.sha256(f"{secret}\0{self.key}".encode()).digest()


class _Incomplete(ConfigError):
    """A launcher sets rank and size, but not the local rank or size."""


def detect_world(environ: Mapping[str, str], agree: Callable[[World], World | None] | None = None) -> World:
    """Find this process's place in its job, and the meeting address if there are several hosts.

    `environ` is a result of `config.read_environment()`. `agree` is called on several hosts if an MPI launcher has set
    no secret or no meeting address. It is collective, and returns the world on which the ranks have agreed over MPI, or
    None if they cannot. A ConfigError says that variables are incomplete, invalid, or contradict each other, or that a
    secret or a meeting address is missing on several hosts.
    """
    world = replace(find_place(environ), host_name=environ.get("ENGINE_HOST_NAME", ""))
    return _add_hub_address(world, environ, agree) if world.several_hosts else world


def find_place(environ: Mapping[str, str]) -> World:
    """Find this process's place like `detect_world`, but without the meeting address and checks of several hosts."""
    found: list[World] = []
    incomplete: list[_Incomplete] = []
    for launcher in LAUNCHERS:
        try:
            world = _read_launcher(launcher, environ)
        except _Incomplete as error:
            incomplete.append(error)
        else:
            found += [] if world is None else [world]
    slurm = _ask_slurm(environ)
    if not found and slurm is not None:
        found.append(slurm)
    if not found and incomplete:
        raise ConfigError(str(incomplete[0]))
    if not found:
        job = environ.get("ENGINE_JOB") or f"alone-{os.getpid()}"
        return World(0, 1, 0, 1, job, read_secret(environ), NO_LAUNCHER)
    chosen = found[0]
    for other in found[1:]:
        # A world of one inside a larger one is a launcher that a launcher has started; two larger worlds are an error.
        if other.size > 1 and (other.rank, other.size) != (chosen.rank, chosen.size):
            raise ConfigError(
                f"{chosen.source} says rank {chosen.rank} of {chosen.size}, {other.source} says rank {other.rank} of "
                f"{other.size}. Start with one launcher, or unset the variables of the other one."
            )
    return chosen


def _read_number(environ: Mapping[str, str], name: str) -> int | None:
    number: int | None = read_variable(environ, name, COUNTED)
    return number


def _read_launcher(launcher: Launcher, environ: Mapping[str, str]) -> World | None:
    """Read one launcher's variables; None if it did not start this process."""
    rank, size = _read_number(environ, launcher.rank), _read_number(environ, launcher.size)
    if rank is None and size is None:
        return None
    if rank is None or size is None:
        there, missing = (launcher.rank, launcher.size) if size is None else (launcher.size, launcher.rank)
        if launcher.strict or (size is not None and size > 1):
            raise ConfigError(f"{there} is {environ[there]!r}, but {missing} is not set; {launcher.name} sets both")
        return None
    local_rank, local_size = _read_number(environ, launcher.local_rank), _read_number(environ, launcher.local_size)
    loopback = launcher is TORCHRUN and _is_local(environ.get("MASTER_ADDR", ""))  # then all ranks are on this host
    if local_rank is None and local_size is None and (size == 1 or loopback):
        local_rank, local_size = rank, size
    if local_rank is None or local_size is None:
        missing = launcher.local_rank if local_rank is None else launcher.local_size
        kind = ConfigError if launcher.strict else _Incomplete
        raise kind(
            f"{launcher.size} is {size}, but {missing} is not set; {launcher.name} sets it. With all ranks on this "
            f"host, set {launcher.local_rank}=${launcher.rank} and {launcher.local_size}=${launcher.size} in each."
        )
    job = _find_job_key(launcher, environ, local_size != size)
    host = environ.get(launcher.host, "")
    world = World(rank, size, local_rank, local_size, job, read_secret(environ), launcher.name, host=host)
    for value, name, bound, of in (
        (rank, launcher.rank, size, launcher.size),
        (local_rank, launcher.local_rank, local_size, launcher.local_size),
    ):
        if value >= bound:
            raise ConfigError(f"{name} is {value}, but {of} is {bound}; ranks count from 0")
    if local_size > size:
        raise ConfigError(f"{launcher.local_size} is {local_size}, more than {launcher.size}, which is {size}")
    return world


def _ask_slurm(environ: Mapping[str, str]) -> World | None:
    """Read Slurm's variables; None outside of a step of `srun`, where SLURM_NTASKS describes the allocation."""
    rank, size = _read_number(environ, "SLURM_PROCID"), _read_number(environ, "SLURM_STEP_NUM_TASKS")
    local_rank = _read_number(environ, "SLURM_LOCALID")
    if rank is None or size is None or local_rank is None or rank >= size:
        return None
    # "2" or "2(x3),1": tasks on each of the step's machines, in order.
    node = _read_number(environ, "SLURM_NODEID") or 0
    local_size = size
    if environ.get("SLURM_STEP_TASKS_PER_NODE", "").strip():
        local_size = read_variable(environ, "SLURM_STEP_TASKS_PER_NODE", lambda text: _tasks_of(node, text)) or size
    job = _build_job_key(SLURM_JOB, environ, local_size != size)
    return World(rank, size, local_rank, local_size, job, read_secret(environ), SLURM, host=str(node))


def _tasks_of(node: int, text: str) -> int:
    """Return the number of tasks of a node from a list such as `2(x3),1`, in the order of nodes; 0: it is too short."""
    tasks = 0
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part.strip())
        if found is None:
            raise ValueError(f"tasks of each node from 1 to {MOST}, such as 2(x3),1")
        nodes = int(found[2] or 1)
        if 0 <= node < nodes:
            tasks = COUNTED(found[1])
        node -= nodes
    return tasks


def _add_hub_address(world: World, environ: Mapping[str, str], agree: Callable[[World], World | None] | None) -> World:
    """Complete a world on several hosts by its meeting address."""
    hub_given = is_given(environ)
    if agree is not None and world.source in BY_MPI and (world.secret is None or not hub_given):
        agreed = agree(replace(world, hub=find_hub_address(world.source, world.job, environ)) if hub_given else world)
        if agreed is not None:
            return agreed
    if world.secret is None:
        raise ConfigError(
            f"{world.source} started {world.size} processes, {world.local_size} of them on this host, and there is no "
            f"ENGINE_SECRET. {lacking_secret(world.source)}"
        )
    return replace(world, hub=find_hub_address(world.source, world.job, environ))


def _is_local(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")


def _find_job_key(launcher: Launcher, environ: Mapping[str, str], several_hosts: bool) -> str:
    """Return the job key of a launcher's processes, like `_build_job_key`.

    MPICH's launcher names no job, and gives each process a session of its own. Such processes belong to one job if the
    same process has started them.
    """
    if launcher is PMI and not several_hosts and not any(map(environ.get, ("ENGINE_JOB", *PMI.job))):
        starter = processes.find_starter(PMI.rank)
        if starter is not None:
            return f"starter={starter.pid}@{starter.born}"
    return _build_job_key(launcher.job, environ, several_hosts)


def _build_job_key(names: tuple[str, ...], environ: Mapping[str, str], several_hosts: bool) -> str:
    """Return the job key: ENGINE_JOB if it is set, else the launcher's variables that are equal for the whole job."""
    if several_hosts:  # Each host may use another name for rank 0's host.
        names = tuple(name for name in names if name != "MASTER_ADDR")
    if environ.get("ENGINE_JOB"):
        names = ("ENGINE_JOB", "TORCHELASTIC_RESTART_COUNT")
    known = [f"{name}={environ[name]}" for name in names if environ.get(name)]
    if several_hosts and not known:
        return f"hub={environ.get('ENGINE_HUB', '')}"
    # Without a job name only the session is left: two jobs that are started in one terminal have to set ENGINE_JOB.
    return " ".join(known) if known else f"session={os.getsid(0)}"
