"""Training under a few random failures ends with the model of an undisturbed one; `make chaos` plays more."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ..netns import Hosts, need_hosts
from ..waiting import until
from .chaos import HERE, chaos, play


def test_a_training_on_one_host(tmp_path: Path) -> None:
    with chaos(tmp_path, seed=1) as job:
        assert play(job, count=8, minutes=2, kinds=HERE) == 8
        assert job.finish() > 0


@pytest.mark.slow
def test_a_training_on_three_hosts(tmp_path: Path) -> None:
    """All faults are played, except a cable that is cut between hosts only."""
    need_hosts()
    with Hosts(3) as hosts, chaos(tmp_path, seed=2, hosts=hosts, slots=2, lease=2.0) as job:
        assert play(job, count=6, minutes=2, kinds=("kill", "leave", "host")) == 6
        for kind in ("agent", "starter", "coordinator", "stop"):  # faults after which a lost worker might still write
            job.settle()
            job.fault(kind)
        assert play(job, count=2, minutes=1, kinds=("lost",)) == 2
        assert min(job.seconds["lost"]) < 4.7  # the lease, a second to end workers, and some for the load
        assert job.finish() > 0


@pytest.mark.slow  # 40 s; tests/elastic/model.py draws such cuts, too
def test_a_training_on_two_hosts_that_lose_each_other_and_not_the_launcher(tmp_path: Path) -> None:
    """A worker with a commit goes on; the other host is retried, and joins when the cable is back."""
    need_hosts()
    options = ("--start-timeout", "6")
    with Hosts(2) as hosts, chaos(tmp_path, seed=3, hosts=hosts, slots=1, lease=2.0, options=options) as job:
        job.settle()
        first = set(job.workers())
        hosts.cut(1)
        until(lambda: "cannot be met by the others" in job.log.read_text(), "a host that is given up")
        job.await_step(0, 20.0, time.monotonic())
        hosts.restore(1)
        job.settle()
        assert len(first & set(job.workers())) == 1, "the worker that was left alone has not gone on"
        assert job.finish() > 0
