"""First import of ranks that shall take themselves for ranks of several hosts: `PRETENDED_HOSTS=2 pytest ..`.

Ranks are dealt round the hosts. Each "host" has a control segment of its own, and TCP connections to the others.
"""

from __future__ import annotations

import hashlib
import os

HOSTS = "PRETENDED_HOSTS"


def pretend() -> None:
    """Give this process the identity of another host than its launcher's."""
    rank, size = int(os.environ["ENGINE_RANK"]), int(os.environ["ENGINE_SIZE"])
    hosts = min(int(os.environ[HOSTS]), size)
    if hosts < 2:
        return
    crew = range(rank % hosts, size, hosts)
    job = hashlib.sha256(os.environ["ENGINE_JOB"].encode()).digest()
    local_rank, local_size, host = str(rank // hosts), str(len(crew)), str(rank % hosts)
    ours = {"ENGINE_LOCAL_RANK": local_rank, "ENGINE_LOCAL_SIZE": local_size, "ENGINE_CROSS_RANK": host}
    torchruns = {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size, "GROUP_RANK": host}
    os.environ |= ours | torchruns
    os.environ["ENGINE_HUB"] = f"127.0.0.1:{10_240 + int.from_bytes(job[:4], 'big') % 20_000}"


pretend()
