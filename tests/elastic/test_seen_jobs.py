"""An elastic job as scrapers and `enginerun top` see it through its resets."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from itertools import pairwise
from pathlib import Path

import pytest

from engine.trace.merging import merge

from ..launch.conftest import launcher as launcher
from ..launch.launch_jobs import Launcher
from ..waiting import until
from . import chaos_program

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

Series = dict[tuple[str, ...], float]
COUNTING = ("_total", "_count", "_sum", "_bucket")


def scraped(address: str) -> Series:
    """Return each series by its name and labels, without the run's label."""
    with urllib.request.urlopen(address, timeout=20) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        (sample.name, *(value for label, value in sorted(sample.labels.items()) if label != "run")): sample.value
        for family in families
        for sample in family.samples
    }


def pids(home: Path) -> dict[int, int]:
    """Return the pids of running workers, by number."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            variables = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdecimal() else []
        except OSError:
            continue
        if f"HERE={home}".encode() in variables:
            found.update({int(each[14:]): int(entry.name) for each in variables if each.startswith(b"ENGINE_WORKER=")})
    return found


@pytest.mark.slow
def test_a_job_is_seen_through_its_resets(launcher: Launcher) -> None:
    """No counter jumps back, no failure of the job is reported, and top shows what happened."""
    errors, home = launcher.home / "errors", launcher.home
    command = (sys.executable, "-m", chaos_program.__name__, home)
    with errors.open("wb") as stderr:
        options = ("-np", 2, "--min-np", 1, "--metrics-port", 0, "--timeline-filename", home / "timeline")
        process = launcher.start(*options, *command, stderr=stderr)
    until(lambda: (home / "steps.1").exists(), "steps")
    (address,) = re.findall(r"http://\S+/metrics", errors.read_text())
    history = [scraped(address)]
    os.kill(pids(home)[1], signal.SIGKILL)

    def grown() -> bool:
        history.append(scraped(address))
        return history[-1]["engine_elastic_worlds_total",] == 3 and history[-1]["engine_world_size", "1"] == 2

    until(grown, "the third world, and copies of its pages", 60, pause=0.02)
    for before, after in pairwise(history):
        counters = [series for series in before if series[0].endswith(COUNTING)]
        assert all(after.get(series, before[series]) >= before[series] for series in counters)
        assert not any(value for series, value in after.items() if series[0] == "engine_errors_total")
    last = history[-1]
    causes = {series[1]: value for series, value in last.items() if series[0] == "engine_elastic_resets_total"}
    expected = {"failure": 1.0, "host_lost": 0.0, "hosts": 0.0, "left": 0.0, "slow": 0.0, "newcomers": 1.0}
    assert causes == expected
    told = {series[0].removeprefix("engine_elastic_"): value for series, value in last.items()}
    assert (told["size"], told["min_size"], told["max_size"], told["resetting"]) == (2, 1, 2, 0)
    assert 0 < told["reset_seconds_total"] < 60
    assert {series["engine_elastic_size",] for series in history} == {1.0, 2.0}

    shown = subprocess.run(
        [sys.executable, "-m", "engine.launch", "top", "--once", "--interval", "0.5", str(process.pid)],
        env=launcher.environment | {"COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "world 3: 2 ranks (1 to 2)" in shown.stdout and "resets 2 in " in shown.stdout, shown.stdout + shown.stderr
    first, second = (line for line in shown.stdout.splitlines() if line.startswith("reset "))
    assert re.match(r"reset 2, 0:\d\d:\d\d ago, took .*s: there are newcomers", first)
    assert re.match(r"reset 1, .*: worker 1 in slot 1 of localhost: was killed by SIGKILL", second)
    (home / "enough").touch()
    done = launcher.finish(process)
    assert done.code == 0, errors.read_text()
    assert merge([home / "timeline"], home / "all.json", []) > 100
    events = json.loads((home / "all.json").read_text())
    tracks = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert tracks == {"worker 0", "worker 1", "worker 2", "the job"}
    resets = [event for event in events if event["name"].startswith("reset: ")]
    assert [reset["name"].partition("was ")[2] for reset in resets] == ["killed by SIGKILL", ""]
    assert resets[1]["name"] == "reset: there are newcomers" and all(0 <= reset["dur"] < 20e6 for reset in resets)
