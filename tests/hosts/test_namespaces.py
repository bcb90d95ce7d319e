"""Rendezvous on hosts that share nothing: misleading names and addresses, deaths, cut cables, strangers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ..netns import Hosts, need_hosts
from ..waiting import until

need_hosts()

ROOT = Path(__file__).parents[2]
PORT = 4711


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as made:
        yield made


class Job:
    """Ranks on hosts, as a launcher would start them."""

    def __init__(self, hosts: Hosts, crews: Sequence[Sequence[int]], **environ: str) -> None:
        self.hosts, self.crews = hosts, crews
        self.environ = {
            "ENGINE_HUB": f"node0:{PORT}",
            "ENGINE_SECRET": "a secret of tests",
            "ENGINE_JOB": uuid.uuid4().hex,
            **environ,
        }
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self.pids: dict[int, int] = {}

    def start(self, *ranks: int, environ: Mapping[str, str] | None = None, **trial: Any) -> Job:
        """Start ranks, by default all, and let them meet; `trial` holds options of the program."""
        return self.prepare(*ranks, environ=environ, **trial).go(*ranks)

    def go(self, *ranks: int) -> Job:
        """Let started ranks meet."""
        for rank in ranks or sorted(self.processes):
            program = self.processes[rank].stdin
            assert program is not None
            program.write("\n")
            program.flush()
        return self

    def prepare(self, *ranks: int, environ: Mapping[str, str] | None = None, **trial: Any) -> Job:
        """Start ranks; return when they are up."""
        for host, crew in enumerate(self.crews):
            for place, rank in enumerate(crew):
                if not ranks or rank in ranks:
                    self.processes[rank] = self.hosts.start(
                        host,
                        [sys.executable, "-m", "tests.hosts.rank_program"],
                        cwd=ROOT,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        env={**os.environ, **self.environ, **self.place(rank, place, crew), **(environ or {})}
                        | {"TRIAL": json.dumps(trial)},
                    )
        for rank in ranks or sorted(self.processes):
            output = self.processes[rank].stdout
            assert output is not None
            self.pids[rank] = int(output.readline())
        return self

    def place(self, rank: int, place: int, crew: Sequence[int]) -> dict[str, str]:
        """Variables that tell a rank its place."""
        size = sum(map(len, self.crews))
        numbers = {"RANK": rank, "SIZE": size, "LOCAL_RANK": place, "LOCAL_SIZE": len(crew)}
        return {f"ENGINE_{name}": str(number) for name, number in numbers.items()}

    def kill(self, rank: int) -> None:
        """Kill a rank."""
        host = next(host for host, crew in enumerate(self.crews) if rank in crew)
        self.hosts.kill(host, self.pids[rank])
        self.processes.pop(rank).communicate(timeout=60)

    def until_gathered(self, *ranks: int) -> None:
        """Wait until these ranks have reached the first rank of their host, and that one the hub."""
        for host, crew in enumerate(self.crews):
            here = [rank for rank in crew if rank in ranks]
            if here:
                pidfds = f"ls -l /proc/{self.pids[here[0]]}/fd | grep -c pidfd; true"
                until(lambda: int(self.hosts.run(host, "sh", "-c", pidfds)) == len(here), "a host has gathered", 60.0)  # noqa: B023
                until(lambda: listening(self.hosts, host), "a leader has come to the hub", 60.0)  # noqa: B023

    def told(self) -> dict[int, list[dict[str, Any]]]:
        """Output of each rank, as JSON lines, once it has ended."""
        outputs = {rank: process.communicate(timeout=120)[0] for rank, process in self.processes.items()}
        return {rank: [json.loads(line) for line in text.splitlines()] for rank, text in outputs.items()}

    def errors(self) -> dict[int, str]:
        """Error with which each rank ended."""
        return {rank: lines[-1].get("error", f"none: {lines}") for rank, lines in self.told().items()}


def listening(hosts: Hosts, host: int) -> int:
    """Number of open TCP ports on a host. A leader opens one when the hub has answered."""
    return hosts.run(host, "cat", "/proc/net/tcp", "/proc/net/tcp6").count(" 0A ")


def check_met(job: Job, told: dict[int, list[dict[str, Any]]], addresses: Sequence[str], worlds: int = 1) -> None:
    of_rank = {rank: host for host, crew in enumerate(job.crews) for rank in crew}
    for rank, lines in told.items():
        assert len(lines) == worlds
        for line in lines:
            assert "error" not in line, line
            assert line["hosts"] == [of_rank[other] for other in sorted(of_rank)]
            for there, (answered, address) in line["lanes"].items():
                assert answered == int(there)
                assert address.removeprefix("::ffff:") == addresses[of_rank[answered]]
            assert {of_rank[int(there)] for there in line["lanes"]} == {*of_rank.values()} - {of_rank[rank]}


@pytest.mark.sample(1)
@pytest.mark.parametrize("crews", [[[0, 1], [2, 3]], [[0], [1, 2, 3]], [[0, 3], [1, 4], [2]]], ids=str)
def test_hosts_whose_names_and_bridges_mislead_meet(hosts: Hosts, crews: list[list[int]]) -> None:
    """Each host resolves its own name to 127.0.1.1, and all have a docker0 with the same address."""
    assert "127.0.1.1 node0" in hosts.run(0, "cat", "/etc/hosts")
    assert "172.17.0.1/16" in hosts.run(1, "ip", "address", "show", "docker0")
    job = Job(hosts, crews).start()
    check_met(job, job.told(), [hosts.address(host) for host in range(3)])


def test_hosts_meet_over_ipv6_again_and_again(hosts: Hosts) -> None:
    job = Job(hosts, [[0, 1], [2], [3]], ENGINE_HUB=f"[{hosts.address6(0)}]:{PORT}").start(worlds=3)
    check_met(job, job.told(), [hosts.address6(host) for host in range(3)], worlds=3)


def test_an_interface_is_chosen_by_name(hosts: Hosts) -> None:
    job = Job(hosts, [[0], [1], [2]], ENGINE_INTERFACE="eth0").start()
    check_met(job, job.told(), [hosts.address(host) for host in range(3)])


def test_an_interface_that_leads_nowhere_is_named_by_all(hosts: Hosts) -> None:
    told = Job(hosts, [[0], [1]], ENGINE_INTERFACE="docker0").start(timeout=10.0).errors()
    assert len({*told.values()}) == 1, told
    assert "rank 1 on node1 cannot reach rank 0 on node0" in told[0]
    assert "at 172.17.0.1:" in told[0] and "ENGINE_INTERFACE" in told[0]


def test_a_hub_on_the_loopback_is_named_with_what_was_tried(hosts: Hosts) -> None:
    """The error lists the addresses that were tried, and says that the loopback leads to no other host."""
    told = Job(hosts, [[0], [1, 2]], ENGINE_HUB=f"localhost:{PORT}").start(timeout=2.0).errors()
    assert "ranks 1, 2 did not come within 2 s" in told[0]
    assert told[1] == told[2]
    assert f"127.0.0.1:{PORT}, on the loopback of this host: Connection refused" in told[1]
    assert "never leads to another host" in told[1]


def test_a_leader_that_dies_is_named_with_its_host(hosts: Hosts) -> None:
    job = Job(hosts, [[0, 1], [2, 3], [4]]).start(0, 1, 2, 3)
    job.until_gathered(0, 1, 2, 3)
    job.kill(2)
    told = job.errors()
    pid = job.pids[2]
    named = f"rank 2 (pid {pid}), which leads the ranks on node1 ({hosts.address(1)}), ended or was cut off"
    assert told[0] == told[1] and named in told[0]
    assert told[3].startswith(f"rank 2 (pid {pid}) died before all ranks had come")


def test_a_rank_that_dies_is_named_by_all(hosts: Hosts) -> None:
    job = Job(hosts, [[0, 1], [2, 3], [4]]).start(0, 1, 2, 3)
    job.until_gathered(0, 1, 2, 3)
    job.kill(3)
    assert {*job.errors().values()} == {f"rank 3 (pid {job.pids[3]} on node1) ended while the ranks were gathering"}


def test_rank_0_that_dies_is_named_by_all(hosts: Hosts) -> None:
    job = Job(hosts, [[0, 1], [2, 3], [4]]).start(0, 1, 2, 3)
    job.until_gathered(0, 1, 2, 3)
    job.kill(0)
    told = job.errors()
    assert told[1].startswith(f"rank 0 (pid {job.pids[0]}) died before all ranks had come")
    assert told[2] == told[3] and told[2].startswith(f"rank 0 on node0 ({hosts.address(0)}) ended or was cut off")


@pytest.mark.slow
def test_a_cable_that_is_cut_is_named_by_those_who_have_one(hosts: Hosts) -> None:
    """The cable is cut while ranks meet."""
    job = Job(hosts, [[0], [1], [2]]).prepare(timeout=5.0).go(0, 1)
    job.until_gathered(0, 1)
    hosts.cut(1)
    try:
        told = job.go(2).errors()
    finally:
        hosts.restore(1)
    assert told[0] == told[2]
    assert f"rank 2 on node2 cannot reach rank 1 on node1 ({hosts.address(1)})" in told[0]
    assert told[1].startswith(f"rank 0 on node0 ({hosts.address(0)}) fell silent")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("environ", "trial"),
    [({"ENGINE_SECRET": "another secret of tests"}, {}), ({}, {"number": 2})],
    ids=["secret", "number"],
)
def test_who_is_of_another_job_is_refused(hosts: Hosts, environ: dict[str, str], trial: dict[str, Any]) -> None:
    job = Job(hosts, [[0], [1]]).prepare(0, timeout=3.0).prepare(1, environ=environ, **trial)
    told = job.go().errors()
    assert f"whoever listens at {hosts.address(0)}:{PORT} for rank 0 does not know this job's secret" in told[1]
    assert "rank 1 did not come within 3 s" in told[0]
    assert f"somebody at {hosts.address(1)} does not know this job's secret, or is of another job" in told[0]


def test_a_build_that_differs_on_one_host_is_refused_by_all(hosts: Hosts) -> None:
    """All ranks get one error that names the ranks of that host."""
    job = Job(hosts, [[0, 1], [2, 3], [4]]).prepare(0, 1, 4).prepare(2, 3, build={"layout": "xyz"})
    told = job.go().errors()
    assert len({*told.values()}) == 1, told
    for rank in (2, 3):
        assert f"rank {rank} on node1 ({hosts.address(1)}) has layout xyz, rank 0 has layout abc" in told[0]
    assert "rank 4" not in told[0]


FLOOD = """
import itertools, select, socket, sys
held = []
for number in itertools.count():
    stranger = socket.socket()
    stranger.settimeout(1.0)
    try:
        stranger.connect((sys.argv[1], int(sys.argv[2])))
        stranger.sendall((b"", b"GET / HTTP/1.1\\r\\n\\r\\n", bytes(3), b"\\xff" * 8192)[number % 4])
        held.append(stranger)
    except OSError:
        stranger.close()
    if len(held) > 500:
        held.pop(0).close()
    if number == 2000:
        print("many", flush=True)
    if select.select([sys.stdin], [], [], 0)[0]:
        break
"""


@pytest.mark.slow
def test_thousands_of_strangers_do_not_keep_hosts_apart(hosts: Hosts) -> None:
    job = Job(hosts, [[0, 1], [2], [3]]).start(0, 1)
    command = [sys.executable, "-c", FLOOD, hosts.address(0), str(PORT)]
    flood = hosts.start(2, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert flood.stdout is not None
        assert flood.stdout.readline() == "many\n"
        job.start(2, 3)
        check_met(job, job.told(), [hosts.address(host) for host in range(3)])
    finally:
        flood.communicate(timeout=60)


def test_no_port_is_open_when_all_have_come(hosts: Hosts) -> None:
    job = Job(hosts, [[0, 1], [2]]).start(stay=True)
    for rank in job.pids:
        output = job.processes[rank].stdout
        assert output is not None
        assert "error" not in json.loads(output.readline())
    assert [listening(hosts, host) for host in range(2)] == [0, 0]
    job.told()
