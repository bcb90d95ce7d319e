"""The engine under torchrun, including restarts, and beside torch.distributed in the same process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from ..ranks import ROOT, run_ranks
from ..waiting import MARK, marked, until
from . import launcher_programs

pytest.importorskip("torch")


def torchrun(tmp_path: Path, function: str, *options: str) -> tuple[int, list[dict[str, Any]], str]:
    """Run a function of `launcher_programs` on two ranks; return the exit code, the ranks' lines, and the log."""
    mark = uuid.uuid4().hex
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*command, *options, "--module", launcher_programs.__name__, function],
        cwd=tmp_path,
        env={
            **os.environ,
            MARK: mark,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
            "ENGINE_OUTPUT_DIR": str(tmp_path / "out"),
        },
        capture_output=True,
        text=True,
        timeout=90,
    )
    until(lambda: not marked(mark), "nothing is left")
    return run.returncode, [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")], run.stderr


def test_under_torchrun(tmp_path: Path) -> None:
    code, said, log = torchrun(tmp_path, "under_torchrun")
    assert code == 0, log
    assert sorted(each["rank"] for each in said) == [0, 1]
    assert all(each["size"] == 2 and each["total"] == 3 for each in said)


@pytest.mark.slow
def test_a_restart_by_torchrun_makes_a_new_world(tmp_path: Path) -> None:
    code, said, log = torchrun(tmp_path, "restarted", "--max-restarts", "1")
    assert code == 0, log
    for each in said:
        if each["attempt"] == 0:  # torchrun may have ended rank 0 before it could say so
            assert (each["rank"], each["type"]) == (0, "RankRaisedError") and "first attempt" in each["text"]
    assert sorted(each["rank"] for each in said if each["attempt"] == 1 and each["type"] is None) == [0, 1], (said, log)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["engine", "gloo"])
def test_beside_torch_distributed(first: str) -> None:
    assert run_ranks(2, launcher_programs.beside_gloo, first).values == [True, True]
