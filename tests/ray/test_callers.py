"""Callers of `engine.ray` with several jobs at once, which shut Ray down early, are killed, or use Ray Client."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs ray: pip install 'ray[train]'")

import ray

from engine.host import machine

from ..waiting import until
from .test_executor import gone, nothing_is_left

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(240)]


def worker(directory: Path) -> list[int]:
    """Process IDs of the elastic workers that have reached a step."""
    return [int(path.name.partition(".")[2]) for path in directory.glob("worker.*")]


@pytest.mark.slow
def test_of_three_jobs_of_a_caller_that_is_killed_nothing_is_left(tmp_path: Path, cluster: Any) -> None:
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "PYTHONPATH": str(ROOT)}
    errors = tmp_path / "errors"
    with errors.open("w") as file:
        command = [sys.executable, str(HERE / "callers_program.py"), str(tmp_path)]
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
    expected = ["slots [1, 1]", "connected False", "ray.shutdown() has ended the ranks of this RayExecutor"]
    expected.append("connected False")
    assert [line for line in said if line in expected] == expected, said
    rank = next(int(line.split()[1]) for line in said if line.startswith("rank "))
    pids = [rank, *worker(tmp_path / "0"), *worker(tmp_path / "1")]
    until(lambda: all(map(gone, pids)), "rank and workers have ended", 60)
    nothing_is_left()


@pytest.mark.slow  # two more processes start with Ray
def test_a_caller_that_ray_client_connects_has_an_executor_and_an_elastic_job(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
    port = machine.free_port()
    listen = ("--address", ray.get_runtime_context().gcs_address, "--host", "127.0.0.1", "--port", str(port))
    server = [sys.executable, "-m", "ray.util.client.server", *listen, "--mode", "specific-server"]
    log = tmp_path / "server"
    with log.open("w") as file:
        serving = subprocess.Popen(server, stdout=file, stderr=file, env=environment)
    try:
        command = [sys.executable, str(HERE / "client_program.py"), f"ray://127.0.0.1:{port}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    finally:
        serving.terminate()
        serving.wait(30)
    said = [line for line in done.stdout.splitlines() if not line.startswith(("(", "\x1b"))]  # without ranks' lines
    expected = ["[[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]", "rank 1 of 2 failed first", "['2', '2']"]
    assert said == expected, done.stdout + done.stderr + log.read_text()
    nothing_is_left()
