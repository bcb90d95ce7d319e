"""A training under a few random failures ends with the model of an undisturbed one; `make chaos` plays more."""

from __future__ import annotations

from pathlib import Path

from ..netns import Hosts, need_hosts
from .chaos import ALLOWED, HERE, chaos, play


def test_a_training_on_one_host(tmp_path: Path) -> None:
    with chaos(tmp_path, seed=1) as job:
        assert play(job, count=8, minutes=2, kinds=HERE) == 8
        assert job.finish() > 0


def test_a_training_on_three_hosts(tmp_path: Path) -> None:
    """All faults, but for a cable that is cut between hosts alone."""
    need_hosts()
    with Hosts(3) as hosts, chaos(tmp_path, seed=2, hosts=hosts, slots=2) as job:
        assert play(job, count=6, minutes=2, kinds=("kill", "leave", "host")) == 6
        for kind in (
            "agent",
            "starter",
            "coordinator",
            "lost",
            "stop",
        ):  # each once: those that must not write any more
            job.fault(kind)
        assert all(min(job.seconds[kind], default=0.0) < ALLOWED[kind] for kind in job.seconds)
        assert job.finish() > 0
