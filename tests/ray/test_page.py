"""The examples of docs/how-to/ray*.md run as printed, on the tests' cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs ray: pip install 'ray[train]'")
pytest.importorskip("torch", reason="needs torch")

import ray

from ..documents import read_program

PAGES = {"executor": "how-to/ray.md", "elastic": "how-to/ray-elastic.md", "train": "how-to/ray-train.md"}
pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(180)]


def run(name: str, directory: Path) -> str:
    """Run one example as a separate program, as a user does; return its output."""
    script = directory / "train_on_ray.py"
    script.write_text(read_program(PAGES[name], name))
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "HOME": str(directory)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_example_of_the_executor_trains_one_model_on_two_ranks(tmp_path: Path) -> None:
    lines = re.findall(r"rank (\d) of 2: loss ([0-9.]+), weights ([0-9.]+)", run("executor", tmp_path))
    assert [rank for rank, _, _ in lines] == ["0", "1"]
    assert lines[0][2] == lines[1][2] and all(float(loss) < 0.5 for _, loss, _ in lines), lines


@pytest.mark.slow  # two workers import torch after a driver has
def test_the_example_of_an_elastic_job_trains(tmp_path: Path) -> None:
    said = run("elastic", tmp_path)
    lines = re.findall(r"^rank (\d) of (\d): loss ([0-9.]+)$", said, re.M)
    assert [rank for rank, _, _ in lines] == [str(rank) for rank in range(len(lines))] and lines, said
    assert len({loss for _, _, loss in lines}) == 1 and float(lines[0][2]) < 8, said
    logged = re.search(r"^(\d+) steps were logged$", said, re.M)
    assert logged is not None and int(logged[1]) >= 5 * 25, said


@pytest.mark.slow  # the workers of Ray Train import much
def test_the_example_of_ray_train_trains(tmp_path: Path) -> None:
    said = run("train", tmp_path)
    found = re.search(r"\{'loss': ([0-9.]+), 'epoch': 4\}", said)
    assert found is not None and float(found[1]) < 0.5, said
