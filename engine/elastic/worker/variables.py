"""A worker's place in a world, for the engine, and for all else that reads a launcher's variables.

Libraries and processes that load data are told their place by variables of the environment. Those that enginerun has
set for the planned place are set anew in each world; no others are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ...hub_address import HubAddress, host_and_port, secret
from ...launchers import ENGINERUN, TORCHRUN
from ...world import World
from .gate import Assigned

JOB = "ENGINE_JOB"
HOROVOD = ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


def world(assigned: Assigned, environ: Mapping[str, str]) -> World:
    """The place of a worker, as the engine takes it.

    Parameters
    ----------
    assigned : Assigned
    environ : mapping
        The worker's, as enginerun has set it.
    """
    place = assigned.place
    return World(
        rank=place.rank,
        size=place.size,
        local_rank=place.local_rank,
        local_size=place.local_size,
        job=environ[JOB],
        secret=secret(environ),
        source=ENGINERUN.name,
        hub=HubAddress(*host_and_port(assigned.hub), assigned.listener) if assigned.hub else None,
        host=place.slot.host,
        host_name=place.slot.host,
        number=place.world,
        workers=assigned.members,
    )


def tell(assigned: Assigned) -> bool:
    """Set the variables of this process's environment that tell a place, as far as they are there.

    Returns
    -------
    bool
        Whether rank or size differ from what they told before.
    """
    place = assigned.place
    hosts = list(dict.fromkeys(assigned.hosts))
    four = place.rank, place.local_rank, place.size, place.local_size
    six = (*four, place.cross_rank, place.cross_size)
    told = dict(zip(ENGINERUN.place, four, strict=True)) | dict(zip(TORCHRUN.place, four, strict=True))
    told |= dict(zip((f"HOROVOD_{name}" for name in HOROVOD), six, strict=True))
    told |= {"ENGINE_CROSS_RANK": hosts.index(assigned.hosts[place.rank]), "ENGINE_CROSS_SIZE": len(hosts)}
    changed = {name: str(value) for name, value in told.items() if os.environ.get(name, str(value)) != str(value)}
    os.environ.update(changed)
    return ENGINERUN.rank in changed or ENGINERUN.size in changed
