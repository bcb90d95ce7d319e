"""Where the hosts of a job meet, and by which secret they know each other: from what launchers tell.

Rank 0's host is the *hub*: it listens on a TCP port while the ranks gather, and each other host connects there. Its
address is `ENGINE_HUB=HOST:PORT` if that is set. torchrun and srun name rank 0's host themselves, and the port then
follows from the job's key. mpirun does not: there ranks tell each other over MPI (`engine.rendezvous.by_mpi`).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from . import readable
from .bounded_reader import ReadError, read_text
from .errors import ConfigError
from .forms import Whole
from .host.network import Address
from .launchers import OPEN_MPI, PMI, SLURM, TORCHRUN
from .logs import logger
from .setting import read_variable

_FIRST_PORT, _PORTS = 10_240, 20_000  # ports that no kernel gives away by default, and few services ask for
_DESCRIPTOR = "ENGINE_HUB_FD"
_VARIABLE = "ENGINE_SECRET"
_FILE = "ENGINE_SECRET_FILE"
_LEAST_SECRET, _LONGEST_SECRET = 16, 4096  # characters; a proof that passes on the network lets short ones be guessed
_HUB = "ENGINE_HUB"
BY_MPI = (OPEN_MPI.name, PMI.name)
"""Launchers of MPI, whose processes can tell each other what the launcher does not."""


@dataclass(frozen=True)
class HubAddress:
    """Where rank 0 is reached by the other hosts.

    Attributes
    ----------
    host : str
        A name, or an address in numbers.
    port : int
    descriptor : int or None
        A TCP socket of rank 0's that listens there already.
    others : tuple of str
        More addresses of rank 0's host, to be tried after `host`.
    """

    host: str
    port: int
    descriptor: int | None = None
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " or ".join(str(Address(host, self.port)) for host in (self.host, *self.others))


def find(source: str, job: str, environ: Mapping[str, str]) -> HubAddress:
    """Find where the hosts of this job meet.

    Parameters
    ----------
    source : str
        The launcher's name.
    job : str
        Text that is equal on all ranks of this job, and differs from that of other jobs.
    environ : mapping
        As from `engine.config.environment()`.

    Raises
    ------
    ConfigError
        ENGINE_HUB cannot be, or is not set where the launcher does not name rank 0's host.
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
    return HubAddress(host, _port(job, environ))


def is_given(environ: Mapping[str, str]) -> bool:
    """Whether the environment itself says where the hosts meet."""
    return bool(environ.get(_HUB, "").strip())


def secret(environ: Mapping[str, str]) -> str | None:
    """The job's secret: ENGINE_SECRET, or what is in the file that ENGINE_SECRET_FILE names; None if neither is set.

    A file that other users can read is warned of, not refused: Kubernetes mounts secrets so.

    Raises
    ------
    ConfigError
        It is so short that it could be guessed from what passes on the network; the file cannot be read, or is empty.
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
    """What to do on several hosts without a secret."""
    if source == TORCHRUN.name:  # which is started on every host by itself: nothing passes a variable on
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
    """What mends all at once where MPI starts the processes."""
    return " With mpi4py (`pip install mpi4py`) they agree on it themselves." if source in BY_MPI else ""


def host_and_port(text: str) -> tuple[str, int]:
    """Read `HOST:PORT`, with an IPv6 address in brackets."""
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+(?:%\w+)?)\]|([^:\[\]\s/]+)):([0-9]{1,5})", text)
    if found is None or not 0 < int(found[3]) < 1 << 16:
        raise ConfigError(
            f"ENGINE_HUB is {readable.quoted(text)}; expected HOST:PORT, such as node1:4711, 10.0.0.1:4711 or "
            "[fd00::1]:4711"
        )
    return found[1] or found[2], int(found[3])


def _first_node(text: str) -> str:
    """The first node of a list as Slurm writes it: `gpu[01-03,7],cpu5` begins with `gpu01`."""
    name, place = "", 0
    while place < len(text) and text[place] != ",":
        if text[place] == "[":
            end = text.index("]", place) if "]" in text[place:] else len(text)
            name += re.split("[-,]", text[place + 1 : end])[0]
            place = end
        else:
            name += text[place]
        place += 1
    return name


def _port(job: str, environ: Mapping[str, str]) -> int:
    """The port that follows from a job's key; never that of torch's own store."""
    digest = int.from_bytes(hashlib.sha256(job.encode()).digest()[:8], "big")
    port = _FIRST_PORT + digest % _PORTS
    return port + 1 if str(port) == environ.get("MASTER_PORT", "").strip() else port
