"""`engine.ray.RayExecutor` on hosts without shared memory: namespaces of this machine, joined by a cable."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs ray: pip install 'ray[train]'")

from ..netns import Hosts, need_hosts, rest
from ..waiting import until

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "hosts_program.py"
START = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=2")
MEMORY = "--object-store-memory=83886080"
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
ENVIRONMENT |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": 16 * "word"}  # the same whether or not the user has a token


@pytest.fixture
def short() -> Iterator[Path]:
    """Directory with a short path: Ray creates sockets deep below it, whose paths are limited to 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as name:
        yield Path(name)


def start_node(hosts: Hosts, host: int, directory: Path) -> subprocess.Popen[str]:
    """Start a node of the cluster whose head is host 0; return once it runs."""
    head = f"{hosts.address(0)}:6379"
    joins = [f"--address={head}"] if host else ["--head", "--port=6379", "--include-dashboard=false"]
    log = directory / f"node{host}"
    with log.open("w") as output:
        command = [*START, MEMORY, *joins, f"--node-ip-address={hosts.address(host)}", f"--temp-dir={directory}/{host}"]
        node = hosts.start(host, command, stdout=output, stderr=output, env=os.environ | ENVIRONMENT)

    def runs() -> bool:
        assert node.poll() is None, log.read_text()
        return "Ray runtime started" in log.read_text()

    until(runs, f"node {host} runs", 90, pause=0.1)
    return node


@pytest.mark.slow  # three processes start with Ray, before any rank does
@pytest.mark.timeout(240)
def test_ranks_on_two_hosts_meet_by_the_socket_of_rank_0_and_who_is_lost_is_named(short: Path) -> None:
    need_hosts()
    with Hosts(2) as hosts:
        nodes = [start_node(hosts, host, short) for host in range(2)]
        command = [sys.executable, str(PROGRAM), f"{hosts.address(0)}:6379", str(short / "at-work")]
        with (short / "errors").open("w") as errors:
            caller = hosts.start(0, command, stdout=subprocess.PIPE, stderr=errors, env=os.environ | ENVIRONMENT)
        at_work = short / "at-work"
        until(lambda: at_work.exists() or caller.poll() is not None, "the last call is under way", 120, pause=0.1)
        hosts.cut(1)
        said = [line for line in rest(caller, 60).splitlines() if "(raylet)" not in line]  # Ray's own reports of deaths
    for node in nodes:
        node.wait(20)
    places = "[(0, 4, 0, 2), (1, 4, 1, 2), (2, 4, 0, 2), (3, 4, 1, 2)] True"
    expected = [places, places, "1 ['10.77.0.1', '10.77.0.2']", "killed: 3 True"]
    expected.append(f"cut off: {hosts.address(1)} True")
    assert said == expected, "\n".join([*said, (short / "errors").read_text()])
