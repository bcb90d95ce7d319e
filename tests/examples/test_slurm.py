"""The batch scripts of the examples on a real Slurm, whose nodes are namespaces of this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..netns import Hosts, need_hosts
from ..waiting import until
from .slurm_cluster import SlurmCluster, find_lacking
from .sums import PROGRAM, expect_sums

need_hosts()
if reason := find_lacking():
    pytest.skip(reason, allow_module_level=True)
pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).resolve().parents[2] / "examples" / "deploy" / "slurm"
ENDLESS = """
import numpy as np
import engine.elastic
engine.init()
state = engine.elastic.ObjectState(step=0)

@engine.elastic.run
def train(state):
    while True:
        total = engine.allreduce(np.ones(1), op=engine.Sum)
        state.step += 1
        if state.step % 500 == 1:
            print("ranks", int(total[0]), flush=True)
        state.commit()

train(state)
"""
"""Elastic program that trains until it is ended."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    directory = tmp_path_factory.mktemp("slurm")
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with SlurmCluster(Hosts(2), directory) as made:
        yield made


def test_batch_script_trains_on_two_nodes(cluster: SlurmCluster) -> None:
    (cluster.directory / "sums.py").write_text(PROGRAM)
    script = [str(SCRIPTS / "train.sbatch"), "sums.py"]
    job = cluster.submit("--ntasks-per-node=2", "--cpus-per-task=2", *script, NETWORK="eth0")
    fields = cluster.wait_for(job)
    assert (fields["JobState"], fields["NodeList"]) == ("COMPLETED", "node[0-1]"), cluster.read_output(job)
    expect_sums(cluster.read_output(job), 2, 2, threads=2)


def test_rank_that_dies_fails_the_job_and_is_named(cluster: SlurmCluster) -> None:
    program = "import os, numpy, engine\nengine.init()\nengine.rank() or os._exit(7)\n"
    (cluster.directory / "dies.py").write_text(program + "engine.allreduce(numpy.ones(1), name='a')\n")
    job = cluster.submit("--ntasks-per-node=1", str(SCRIPTS / "train.sbatch"), "dies.py")
    fields = cluster.wait_for(job)
    assert fields["JobState"] == "FAILED", fields
    assert "rank 0" in cluster.read_output(job), cluster.read_output(job)


def test_elastic_batch_script_goes_on_without_a_drained_node_and_is_requeued(cluster: SlurmCluster) -> None:
    (cluster.directory / "endless.py").write_text(ENDLESS)
    script = [str(SCRIPTS / "elastic.sbatch"), "endless.py"]
    job = cluster.submit("--nodes=2", "--ntasks-per-node=1", *script, NETWORK="eth0")
    until(lambda: "ranks 2" in cluster.read_output(job), "two ranks train", 60.0, 0.2)
    cluster.run("scontrol", "update", "nodename=node1", "state=drain", "reason=test")
    try:
        until(lambda: "ranks 1" in cluster.read_output(job), "one rank goes on", 60.0, 0.2)
    finally:
        cluster.run("scontrol", "update", "nodename=node1", "state=resume")
    assert "because host node1 is not among the hosts any more" in cluster.read_output(job)
    cluster.run("scancel", "--batch", "--signal=TERM", job)
    until(lambda: cluster.describe_job(job)["Restarts"] == "1", "the job is in the queue again", 60.0, 0.2)
    cluster.run("scancel", job)
