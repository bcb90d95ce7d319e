"""Agents of an elastic job: hosts that leave, are lost or stand still, and what agents may not do."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import time
from pathlib import Path

import pytest

from engine.host import processes
from engine.launch.driver import prepare_order
from engine.launch.hosts.channel import pack_message
from engine.launch.hosts.host_list import HostRanks
from engine.launch.hosts.remote import RemoteHost

from ..launch.conftest import launcher as launcher
from ..launch.host_jobs import agent_of
from ..launch.test_launch_metrics import scrape
from ..waiting import let_pass, until
from .elastic_jobs import job as job
from .elastic_jobs import worlds
from .fake_agents import job_of

TWO_HOSTS = ("-H", "a:1,b:1", "--launch-agent", "env STAND_IN={host}")


def test_workers_of_two_hosts_are_told_where_rank_0_listens(job):
    done = job.run(
        *("-np", 2, "--min-np", 1, *TWO_HOSTS),
        body="def body(t): print('hub', t.told.hub, t.told.hosts, t.told.listener is not None, flush=True)\n",
    )
    assert done.code == 0, done.err
    (first,), (second,) = ([line for line in done.lines(rank) if line.startswith("hub")] for rank in (0, 1))
    assert first.startswith("hub a:") and first.endswith("('a', 'b') True")
    assert second == first.removesuffix("True") + "False"


def test_a_host_that_is_told_to_go_loses_nothing(job):
    """SIGTERM to an agent makes its workers leave at a commit, and the others go on."""
    process = job.start("-np", 2, "--min-np", 1, *TWO_HOSTS)
    job.world(1, 2)
    os.kill(agent_of(job.launcher, "b"), signal.SIGTERM)
    job.world(2, 1)
    done = job.finish(process)
    assert done.code == 0, done.err
    assert "enginerun: b is about to go (SIGTERM): its workers leave" in done.err
    assert worlds(done) == ["1: 2 ranks", "2: 1 rank, because host b leaves"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("signum", "whom", "lease"),
    [
        (signal.SIGKILL, "agent", 40),
        (signal.SIGKILL, "guarded", 40),
        (signal.SIGKILL, "guardian", 40),
        (signal.SIGSTOP, "agent", 2),
    ],
    ids=["killed", "killed with its guardian", "without a guardian", "stopped"],
)
def test_a_host_whose_agent_is_lost_has_no_worker_when_the_others_go_on(job, signum, whom, lease):
    """A worker that the driver cannot hear dies before the next world begins."""
    process = job.start("-np", 2, "--min-np", 1, "--lease", lease, *TWO_HOSTS)
    job.world(1, 2)
    agent, worker = agent_of(job.launcher, "b"), job.pid(1)
    began = time.monotonic()
    if whom != "agent":
        os.kill(guardian_of(agent), signum)
    if whom != "guardian":  # without its guardian the agent ends by itself, before the lease is over
        os.kill(agent, signum)
    until(lambda: list(job.home.glob("met.2.*")), "world 2 trains")
    assert time.monotonic() - began < 20  # a second or two; more where the machine is loaded
    assert not runs(worker)
    job.world(2, 1)
    done = job.finish(process)
    assert done.code == 0, done.err
    assert "enginerun: b was lost: its agent" in done.err
    assert worlds(done)[1].startswith("2: 1 rank, because")  # the cause is the agent, or its worker


BEATS = """
from tests.waiting import let_pass
def body(t):
    t.step()
    while not there("stop"):
        with open(HERE / f"beats.{t.rank}", "a") as file: file.write(".")
        let_pass(0.02)
"""


@pytest.mark.slow
def test_a_job_that_is_suspended_as_a_whole_goes_on(job):
    """All hosts are suspended for longer than the lease: workers wait for the launcher, and none is killed."""
    process = job.start("-np", 2, "--min-np", 1, "--lease", 3, *TWO_HOSTS, body=BEATS)
    beats = [job.home / f"beats.{rank}" for rank in range(2)]
    until(lambda: all(path.exists() for path in beats), "both train")
    agents = [agent_of(job.launcher, host) for host in ("a", "b")]
    parts = [*agents, *map(guardian_of, agents), job.pid(0), job.pid(1), process.pid]
    for pid in parts:
        os.kill(pid, signal.SIGSTOP)
    let_pass(5.0)
    for pid in parts:
        os.kill(pid, signal.SIGCONT)
    let_pass(0.5)  # until guardians have polled
    before = [path.stat().st_size for path in beats]
    until(lambda: all(path.stat().st_size > size + 50 for path, size in zip(beats, before, strict=True)), "both go on")
    done = job.finish(process)
    assert done.code == 0, done.err
    assert worlds(done) == ["1: 2 ranks"]


@pytest.mark.slow
def test_a_launcher_that_stands_still_keeps_the_workers_of_its_own_machine(job):
    """The launcher is stopped for longer than the lease, as by Ctrl-Z."""
    process = job.start("-np", 2, "--min-np", 1, "--lease", 3)
    job.world(1, 2)
    os.kill(process.pid, signal.SIGSTOP)
    let_pass(5.0)
    os.kill(process.pid, signal.SIGCONT)
    done = job.finish(process)
    assert done.code == 0, done.err
    assert worlds(done) == ["1: 2 ranks"]


@pytest.mark.slow
def test_only_agents_start_workers_and_they_have_one_thread(job):
    """The launcher has threads that serve metrics, so only agents start workers."""
    process = job.start("-np", 2, "--min-np", 1, "--max-np", 4, "--slots-per-host", 2, "--metrics-port", 0)
    job.world(1, 2)
    where = re.search(r"http://(\S+)/metrics", job.said())
    assert where is not None
    up = {name for name, value in scrape(where[1]).items() if name.startswith("engine_rank_up{") and value == "1.0"}
    assert len(up) == 2 == sum(name.startswith("engine_rank_up{") for name in scrape(where[1]))
    agent = parent_of(job.pid(0))
    os.kill(job.pid(1), signal.SIGKILL)
    job.world(3, 2)
    assert parent_of(job.pid(2)) == agent and parent_of(agent) == process.pid
    assert len(os.listdir(f"/proc/{agent}/task")) == 1
    assert len(os.listdir(f"/proc/{process.pid}/task")) > 1
    assert job.finish(process).code == 0


@pytest.mark.slow
def test_resets_leave_no_descriptor_behind(job):
    """The launcher and its agent are checked."""
    process = job.start("-np", 2, "--min-np", 2)
    job.world(1, 2)
    watched = (process.pid, parent_of(job.pid(0)))
    counts = []
    for world in (1, 2, 3):
        job.world(world, 2)
        job.commits(world)  # so that earlier failures do not count against the slot
        counts.append([len(os.listdir(f"/proc/{pid}/fd")) for pid in watched])
        os.kill(job.pid(world), signal.SIGKILL)
    job.world(4, 2)
    counts.append([len(os.listdir(f"/proc/{pid}/fd")) for pid in watched])
    assert counts[1:] == counts[:-1]
    assert job.finish(process).code == 0


def test_a_worker_starts_though_the_word_to_start_it_has_come_with_others(tmp_path):
    """The launcher sends no more, so the agent must act on all that it read with an earlier message."""
    options, job = job_of(tmp_path, ["a"], "env")
    host = RemoteHost(0, HostRanks("a", (), False), [sys.executable, "-m", "engine.launch.agent"])
    prepare = {
        "sizes": [], "ranks": [0], "hub": False, "counted": False, "slots": 1, "most": 1, "several": False,
        "lease": None, **prepare_order(options, job, host, os.environ),
    }  # fmt: skip
    worker = {"worker": 0, "number": 0, "slot": 0, "rank": 0, "size": 1, "local_size": 1}
    host.start()
    assert host.channel is not None
    poll, heard = select.poll(), []
    poll.register(host.channel.reading, select.POLLIN)
    try:
        host.channel.out.write(
            pack_message("prepare", **prepare) + pack_message("start") + pack_message("launch", **worker)
        )

        def started() -> bool:
            if poll.poll(10):
                heard.extend(message.kind for message in host.channel.receive())
            return "started" in heard

        until(started, "a worker", 20.0)
    finally:
        host.close()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


def runs(pid: int) -> bool:
    process = processes.read_process(pid)
    return process is not None and process.state != "Z"


def guardian_of(agent: int) -> int:
    """Return the agent's child that is no worker."""
    (guardian,) = (
        each.pid for each in processes.list_processes() if each.parent == agent and each.name == "enginerun-guard"
    )
    return guardian
