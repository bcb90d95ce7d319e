"""Callers of `engine.ray` that have several jobs at once, end Ray before their executors, or are killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs ray: pip install 'ray[train]'")

import ray

from ..waiting import until
from .test_executor import gone, nothing_is_left

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "callers_program.py"

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(240)]


def worker(directory: Path) -> list[int]:
    """The worker of an elastic job that has come to a step."""
    return [int(path.name.partition(".")[2]) for path in directory.glob("worker.*")]


def test_of_three_jobs_of_a_caller_that_is_killed_nothing_is_left(tmp_path: Path, cluster: Any) -> None:
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "PYTHONPATH": str(ROOT)}
    errors = tmp_path / "errors"
    with errors.open("w") as file:
        command = [sys.executable, str(PROGRAM), str(tmp_path)]
        caller = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, env=environment)
    try:
        assert caller.stdout is not None

        def at_work() -> bool:
            assert caller.poll() is None, errors.read_text()
            return all([(tmp_path / "at-work").exists(), worker(tmp_path / "0"), worker(tmp_path / "1")])

        until(at_work, "all three jobs work", 120, pause=0.1)
    finally:
        caller.kill()
        said = caller.communicate()[0].splitlines()
    expected = ["slots [1, 1]", "ray.shutdown() has ended the ranks of this RayExecutor", "connected False"]
    assert [line for line in said if line in expected] == expected, said
    rank = next(int(line.split()[1]) for line in said if line.startswith("rank "))
    pids = [rank, *worker(tmp_path / "0"), *worker(tmp_path / "1")]
    until(lambda: all(map(gone, pids)), "rank and workers have ended", 60)
    nothing_is_left()
