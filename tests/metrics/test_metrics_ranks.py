"""Real ranks through the real launcher, scraped while they run and after one has died."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path

import pytest

from ..ranks import start_ranks
from ..waiting import until

PROGRAM = """
import pathlib
import numpy as np
import engine
from tests.waiting import until_files
engine.init()
for step in range(20):
    engine.allreduce(np.ones(1000, np.float32), name="gradient")
pathlib.Path(f"ready.{engine.rank()}").touch()
until_files("end", seconds=90)
"""


def scrape(directory: Path) -> dict[str, float]:
    """Scraped values, by the text before them without the label of the run."""
    [file] = directory.glob("*.json")
    [group] = json.loads(file.read_text())
    run = f',run="{file.stem}"'
    with urllib.request.urlopen(f"http://{group['targets'][0]}/metrics", timeout=60) as answer:
        lines = answer.read().decode().replace(run, "").splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


@pytest.mark.slow
def test_a_rank_that_has_died_is_down_and_keeps_its_counters(tmp_path):
    options = ["--metrics-file-sd", str(tmp_path), "--grace-period", "90"]
    with start_ranks(2, PROGRAM, options=options) as job:
        job.wait_for("ready.0", "ready.1")
        before = scrape(tmp_path)
        os.kill(job.pid(1), signal.SIGKILL)
        until(lambda: not scrape(tmp_path)['engine_rank_up{rank="1"}'], "rank 1 is down")
        after = scrape(tmp_path)
        (job.directory / "end").touch()
        job.finish(check=False)
    for rank in (0, 1):
        assert before[f'engine_rank_up{{rank="{rank}"}}'] == 1
        assert before[f'engine_submissions_total{{rank="{rank}"}}'] == 20
        assert before[f'engine_collective_duration_seconds_count{{op="allreduce",rank="{rank}"}}'] == 20
        assert before[f'engine_pending_tensors{{rank="{rank}"}}'] == 0
    assert after['engine_submissions_total{rank="1"}'] == 20
    assert after['engine_rank_up{rank="0"}'] == 1
    assert list(tmp_path.iterdir()) == []
