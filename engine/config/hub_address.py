"""Address of the rendezvous between hosts, and the secret of a job, from the variables of launchers.

Rank 0's host is the *hub*: it listens on a TCP port during the rendezvous, and each other host connects to it. Its
address is `ENGINE_HUB=HOST:PORT` if that is set. torchrun and srun name rank 0's host themselves, and the port then
follows from the job's key. mpirun does not; there the ranks exchange the address over MPI
(`engine.net.rendezvous.mpi_bootstrap`).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ConfigError
from ..host.network import Address
from ..text import readable
from ..text.bounded_reader import ReadError, read_text
from ..text.logs import logger
from .forms import Whole
from .launchers import OPEN_MPI, PMI, SLURM, TORCHRUN
from .setting import read_variable

_FIRST_PORT, _PORTS = 10_240, 20_000  # ports below the kernels' default ephemeral range that few services use
_DESCRIPTOR = "ENGINE_HUB_FD"
_VARIABLE = "ENGINE_SECRET"
_FILE = "ENGINE_SECRET_FILE"
_LEAST_SECRET, _LONGEST_SECRET = 16, 4096  # characters; a short secret could be guessed from a proof on the network
_HUB = "ENGINE_HUB"
BY_MPI = (OPEN_MPI.name, PMI.name)
"""Launchers of MPI, whose processes can exchange over MPI what the launcher does not tell them."""


@dataclass(frozen=True)
class HubAddress:
    """Address at which other hosts reach rank 0."""

    host: str  # host name or numeric address
    port: int
    descriptor: int | None = None  # descriptor of rank 0's TCP socket, if one listens there already
    others: tuple[str, ...] = ()  # more addresses of rank 0's host, to be tried after `host`

    def __str__(self) -> str:
        return " or ".join(str(Address(host, self.port)) for host in (self.host, *self.others))


def find_hub_address(source: str, job: str, environ: Mapping[str, str]) -> HubAddress:
    """Find the address at which the hosts of this job meet.

    `source` is the launcher's name. `job` is equal on all ranks of this job, and differs from that of other jobs.
    `environ` is a result of `config.read_environment()`. If ENGINE_HUB is invalid, or is not set although the launcher
    does not name rank 0's host, a ConfigError is raised.
    """
    descriptor = read_variable(environ, _DESCRIPTOR, Whole(0))
    if is_given(environ):
        return HubAddress(*host_and_port(environ[_HUB].strip()), descriptor)
    host = None
    if source == TORCHRUN.name:
        host = environ.get("MASTER_ADDR", "").strip()
    elif source == SLURM:
        host = _first_node(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or "")
    if not host:
        raise ConfigError(
            f"{source} started processes on several hosts, and does not say where rank 0 is reached.{_by_mpi(source)} "
            "Set ENGINE_HUB=HOST:PORT in every process, to the name or address of rank 0's host and a free port of it."
        )
    return HubAddress(host, _derive_port(job, environ))


def is_given(environ: Mapping[str, str]) -> bool:
    """Return whether the environment sets the address itself, in `ENGINE_HUB`."""
    return bool(environ.get(_HUB, "").strip())


def read_secret(environ: Mapping[str, str]) -> str | None:
    """Return the job's secret: ENGINE_SECRET, or the content of the file ENGINE_SECRET_FILE; None if neither is set.

    A file that other users can read causes a warning, not an error: Kubernetes mounts secrets this way. A ConfigError
    says that the file cannot be read or is empty, or that the secret could be guessed from network traffic, being so
    short.
    """
    if environ.get(_VARIABLE):
        return _long_enough(environ[_VARIABLE], _VARIABLE)
    path = environ.get(_FILE)
    if not path:
        return None
    try:
        text = read_text(path, _LONGEST_SECRET).strip()
        mode = os.stat(path).st_mode
    except (OSError, ReadError) as error:
        raise ConfigError(f"{_FILE} is {path!r}, which cannot be read: {error}") from None
    if not text:
        raise ConfigError(f"{_FILE} is {path!r}, which is empty; expected the job's secret")
    if mode & 0o044:
        logger.warning("%s is %r, which other users can read: chmod 600 it", _FILE, path)
    return _long_enough(text, f"what {_FILE} names, {path!r},")


def _long_enough(text: str, what: str) -> str:
    if len(text) < _LEAST_SECRET:
        raise ConfigError(
            f"{what} has {len(text)} characters, which can be guessed; expected a secret of at least {_LEAST_SECRET}, "
            "such as `openssl rand -hex 32` prints"
        )
    return text


def lacking_secret(source: str) -> str:
    """Return advice for an error on several hosts without a secret."""
    if source == TORCHRUN.name:  # It is started on every host separately, so it passes no variable on.
        make = "Run `openssl rand -hex 32` once, and on every host `export ENGINE_SECRET=` with what it printed"
    else:
        how = {
            OPEN_MPI.name: " and pass it on by `mpirun -x ENGINE_SECRET`",
            PMI.name: " and pass it on by `mpiexec -genvlist ENGINE_SECRET`",
        }
        make = (
            "Write `export ENGINE_SECRET=$(openssl rand -hex 32)` into the batch script, before the line that starts "
            f"the processes{how.get(source, '')}"
        )
    return (
        f"On several hosts ranks know each other by a secret.{_by_mpi(source)} {make}; or set {_FILE} to the path of a "
        "file that holds one, and that only you can read."
    )


def _by_mpi(source: str) -> str:
    """Return the advice to install mpi4py, if an MPI launcher has started the processes; else an empty text."""
    return " With mpi4py (`pip install mpi4py`) they agree on it themselves." if source in BY_MPI else ""


def host_and_port(text: str) -> tuple[str, int]:
    """Parse `HOST:PORT`, with an IPv6 address in brackets."""
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+(?:%\w+)?)\]|([^:\[\]\s/]+)):([0-9]{1,5})", text)
    if found is None or not 0 < int(found[3]) < 1 << 16:
        raise ConfigError(
            f"ENGINE_HUB is {readable.quote_value(text)}; expected HOST:PORT, such as node1:4711, 10.0.0.1:4711 or "
            "[fd00::1]:4711"
        )
    return found[1] or found[2], int(found[3])


def _first_node(text: str) -> str:
    """Return the first node of a list in Slurm's notation, such as `gpu01` of `gpu[01-03,7],cpu5`."""
    return re.sub(r"\[([^],-]*)[^]]*\]?", r"\1", text).partition(",")[0]


def _derive_port(job: str, environ: Mapping[str, str]) -> int:
    """Derive a port from a job's key; it is never that of torch's own store (`MASTER_PORT`)."""
    digest = int.from_bytes(hashlib.sha256(job.encode()).digest()[:8], "big")
    port = _FIRST_PORT + digest % _PORTS
    return port + 1 if str(port) == environ.get("MASTER_PORT", "").strip() else port
