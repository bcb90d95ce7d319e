"""The whole engine on hosts that share nothing, started as each launcher would start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..netns import Hosts, need_hosts

need_hosts()

ROOT = Path(__file__).parents[2]
CREWS = [[0, 1], [2, 3], [4]]
SIZE = 5


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as made:
        yield made


def enginerun(job: str, rank: int, place: int, host: int) -> dict[str, str]:
    numbers = {"RANK": rank, "SIZE": SIZE, "LOCAL_RANK": place, "LOCAL_SIZE": len(CREWS[host]), "CROSS_RANK": host}
    own = {f"ENGINE_{name}": str(number) for name, number in numbers.items()}
    return own | {"ENGINE_JOB": job, "ENGINE_HUB": "node0:4711"}


def torchrun(job: str, rank: int, place: int, host: int) -> dict[str, str]:
    numbers = {"RANK": rank, "WORLD_SIZE": SIZE, "LOCAL_RANK": place, "LOCAL_WORLD_SIZE": len(CREWS[host])}
    own = {name: str(number) for name, number in (numbers | {"GROUP_RANK": host}).items()}
    return own | {"TORCHELASTIC_RUN_ID": job, "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


def srun(job: str, rank: int, place: int, host: int) -> dict[str, str]:
    numbers = {"PROCID": rank, "STEP_NUM_TASKS": SIZE, "LOCALID": place, "NODEID": host, "STEP_ID": 0}
    own = {f"SLURM_{name}": str(number) for name, number in numbers.items()}
    return own | {"SLURM_JOB_ID": job, "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_STEP_NODELIST": "node[0-2]"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("launcher", [enginerun, torchrun, srun])
def test_ranks_of_several_hosts_compute_one_world_after_the_other(hosts, launcher, tmp_path):
    """One host's processors support fewer kernels than the others': all ranks use those that it has."""
    job, processes = uuid.uuid4().hex, {}
    for host, crew in enumerate(CREWS):
        for place, rank in enumerate(crew):
            environ = {**os.environ, "ENGINE_SECRET": "a secret of tests", **launcher(job, rank, place, host)}
            environ |= {"ENGINE_KERNELS": "plain"} if host == 1 else {}
            with open(tmp_path / f"{rank}", "w") as errors:
                processes[rank] = hosts.start(
                    host,
                    [sys.executable, "-m", "tests.hosts.engine_program"],
                    cwd=ROOT,
                    env=environ,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                )
    told = {rank: process.communicate(timeout=100)[0].splitlines()[1:] for rank, process in processes.items()}
    said = {rank: (tmp_path / f"{rank}").read_text() for rank in processes}
    assert [process.returncode for process in processes.values()] == [0] * SIZE, said
    for host, crew in enumerate(CREWS):
        for place, rank in enumerate(crew):
            alike = [number for number, other in enumerate(CREWS) if len(other) > place]
            place_of_it = [rank, place, len(crew), alike.index(host), len(alike)]
            world = {"place": place_of_it, "homogeneous": False, "shown": crew if place == 0 else []}
            world["kernels"] = "plain"
            assert [json.loads(line) for line in told[rank]] == [world] * 2
