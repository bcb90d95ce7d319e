"""`enginerun --summary` at the end of real runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..waiting import measured
from .watched_jobs import ENVIRONMENT

TRAINS = """
import os, signal, sys
import engine, torch, engine.torch
from tests.waiting import be_late
engine.init()
model = torch.nn.Linear(200, 200)
optimizer = engine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
for step in range(60):
    if sys.argv[1:] == ["late"] and engine.rank() == 1:
        be_late(0.04)  # more than steps differ by on a machine that does much else
    if sys.argv[1:] == ["dies"] and engine.rank() == 1 and step == 40:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model(torch.ones(4, 200)).sum().backward()
    optimizer.step()
"""


def summarized(tmp_path: Path, *options: str, program: str = TRAINS) -> tuple[int, str]:
    """Exit code of a run, and the launcher's own lines."""
    script = tmp_path / "train.py"
    script.write_text(program)
    command = [sys.executable, "-m", "engine.launch", "-np", "2", "--summary", sys.executable, str(script), *options]
    run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=100)
    return run.returncode, "\n".join(re.findall(r"^enginerun: (.*)$", run.stderr, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.timeout(400)  # three jobs, at most
def test_a_run_is_summarised_with_its_late_rank(tmp_path: Path) -> None:
    def measure() -> None:
        code, text = summarized(tmp_path, "late")
        assert code == 0
        step = re.search(r"steps: +60, of ([\d.]+) (ms|s)\b", text)
        assert step is not None and (step[2] == "s" or float(step[1]) >= 10), text
        assert re.search(r"communication: +blocked for \d+\.\d % of the time", text), text
        assert "look at rank 1: it submits its tensors" in text
        assert "--fusion-threshold 64M --cycle-time-ms 5" in text

    measured(measure)


def test_a_failed_run_is_summarised_up_to_its_failure_which_is_said_last(tmp_path: Path) -> None:
    code, text = summarized(tmp_path, "dies")
    assert code == 137
    steps = re.search(r"steps: +(\d+), of", text)
    assert steps is not None and 38 <= int(steps[1]) <= 41
    assert "rank 0 failed: rank 1 died" in text
    assert text.index("summary: 2 ranks") < text.index("first failure: rank 1")


@pytest.mark.slow
def test_a_run_that_the_user_ends_is_no_failure(tmp_path: Path) -> None:
    endless = TRAINS.replace("range(60)", "range(10**9)").replace("    optimizer.zero_grad()", """
    if step == 30 and engine.rank() == 0:
        os.kill(os.getppid(), signal.SIGINT)
    optimizer.zero_grad()""")  # fmt: skip
    code, text = summarized(tmp_path, program=endless)
    assert code == 130 and "the user ended the job (SIGINT)" in text and "ended by SIGINT" in text
    assert "failed" not in text, text


@pytest.mark.slow
def test_a_run_that_never_starts_the_engine_says_so(tmp_path: Path) -> None:
    code, text = summarized(tmp_path, program="print('hello')")
    assert code == 0 and "nothing was counted: no rank has started the engine" in text


@pytest.mark.slow
def test_without_the_option_nothing_is_summarised(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "engine.launch", "-np", "1", "true"]
    run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and "summary" not in run.stderr
