"""Imported first by every rank of a job of tests that is to believe it is on several hosts: `PRETENDED_HOSTS=2 pytest ..`.

Ranks are dealt round the hosts. Each "host" has a control segment of its own, and TCP connections to the others.
"""

from __future__ import annotations

import hashlib
import os

HOSTS = "PRETENDED_HOSTS"


def pretend() -> None:
    """Tell this process of other hosts than its launcher has."""
    rank, size = int(os.environ["ENGINE_RANK"]), int(os.environ["ENGINE_SIZE"])
    hosts = min(int(os.environ[HOSTS]), size)
    if hosts < 2:
        return
    crew = range(rank % hosts, size, hosts)
    job = hashlib.sha256(os.environ["ENGINE_JOB"].encode()).digest()
    place = {"LOCAL_RANK": rank // hosts, "LOCAL_SIZE": len(crew), "HOST_INDEX": rank % hosts}
    os.environ |= {f"ENGINE_{name}": str(value) for name, value in place.items()}
    os.environ |= {"LOCAL_RANK": str(rank // hosts), "LOCAL_WORLD_SIZE": str(len(crew)), "GROUP_RANK": str(rank % hosts)}
    os.environ["ENGINE_HUB"] = f"127.0.0.1:{10_240 + int.from_bytes(job[:4], "big") % 20_000}"


pretend()
