"""Machines whose uptime is below a stall's warning, below its limit, or hardly above that."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from engine.trace.reading import Recording, read

from ..ranks import Finished, start_ranks
from . import uptime

UPTIMES = (1, *(pytest.param(seconds, marks=pytest.mark.slow) for seconds in (70, 700)))
LASTS = 120.0  # upper bound of the job's duration in seconds


@dataclass
class Booted:
    """Finished job on a machine with some uptime, and its files."""

    uptime: int
    finished: Finished
    recordings: list[Recording]
    textfile: str
    log: list[dict[str, object]]


@pytest.fixture(scope="module", params=UPTIMES)
def booted(request: pytest.FixtureRequest) -> Iterator[Booted]:
    if reason := uptime.refusal():
        pytest.skip(reason)
    pytest.importorskip("torch")
    options = ["--timeline", "t.json", "--autotune", "--autotune-log-file", "tuner.jsonl", "--run-name", "booted"]
    options += ["--metrics-port", "0", "--metrics-file-sd", "sd", "--metrics-textfile", "a.prom"]
    few = {"ENGINE_AUTOTUNE_WARMUP": "0", "ENGINE_AUTOTUNE_STEPS": "3", "OMP_NUM_THREADS": "1"}
    prefix = uptime.namespace(request.param)
    with start_ranks(2, uptime.run, prefix=prefix, options=options, env=few, timeout=100.0) as job:
        finished = job.finish()
        notes: list[str] = []
        recordings = read(sorted(job.directory.glob("t.rank*.json")), notes)
        assert not notes
        log = [json.loads(line) for line in (job.directory / "tuner.jsonl").read_text().splitlines()]
        yield Booted(request.param, finished, recordings, (job.directory / "a.prom").read_text(), log)


def test_collectives_with_a_late_rank_and_default_limits(booted: Booted) -> None:
    for value in booted.finished.values:
        assert booted.uptime <= value["began"] < booted.uptime + LASTS, "the namespace is not what it should be"
        assert abs(value["monotonic"]) < 1.0, "the namespace is not what it should be"
        assert value["sums"] == [3.0] * 2
    assert "stalled" not in booted.finished.err and "has waited" not in booted.finished.err
    assert not [path for path in booted.finished.files if path.startswith("rank.")]


def test_a_model_learns(booted: Booted) -> None:
    assert re.search(r"\d% of 297 unseen digits read correctly by 2 ranks", booted.finished.ranks[0].stdout)


def test_times_of_entries_and_waits_lie_within_the_run(booted: Booted) -> None:
    for value in booted.finished.values:
        lasted = (value["ended"] - value["began"] + 1.0) * 1e9
        assert 0 < value["counters"]["busy_ns"] < lasted and 0 < value["counters"]["wait_ns"] < lasted


def test_top_finds_the_job_and_shows_its_ranks(booted: Booted) -> None:
    shown = booted.finished.values[0]["top"]
    assert "booted" in shown and "2 ranks" in shown, shown
    hours = [int(number) for number in re.findall(r"\b(\d+) ?h\b", shown)]
    assert not hours, f"a time longer than the machine has been up\n{shown}"


def test_the_tuner_measures_its_trials(booted: Booted) -> None:
    measured = [row["samples"] for row in booted.log if "samples" in row]
    assert measured, booted.log
    for samples in measured:
        assert isinstance(samples, list) and all(0 < sample < LASTS for sample in samples), samples


def test_the_timeline_lies_within_the_run(booted: Booted) -> None:
    assert [recording.rank for recording in booted.recordings] == [0, 1]
    for recording in booted.recordings:
        value = booted.finished.values[recording.rank]
        assert recording.tensors
        for tensor in recording.tensors.values():
            times = tensor.submitted, tensor.ready, tensor.started, tensor.ended
            assert sorted(times) == list(times) and value["began"] <= times[0] and times[-1] <= value["ended"], tensor


@pytest.mark.parametrize("source", ["endpoint", "textfile"])
def test_the_metrics_have_plausible_times(booted: Booted, source: str) -> None:
    text = booted.textfile if source == "textfile" else booted.finished.values[0]["metrics"]
    found = re.findall(r"^(engine_\w+)\{[^}]*\} ([-+.\deE]+|NaN)$", text, re.MULTILINE)
    seconds = [(name, float(value)) for name, value in found if name.endswith(("_seconds_total", "_seconds_sum"))]
    assert {"engine_blocked_seconds_total", "engine_step_duration_seconds_sum"} <= {name for name, _ in seconds}, text
    for name, value in seconds:
        assert 0 <= value < LASTS, (name, value)
    stamps = [float(value) for name, value in found if name == "engine_start_timestamp_seconds"]
    lasts = [float(value) for name, value in found if name == "engine_last_collective_timestamp_seconds"]
    now = time.time()
    assert len(stamps) == len(lasts) == 2, text
    for first, last in zip(stamps, lasts, strict=True):
        assert first <= last < first + LASTS and 0 <= now - first < 3600, (first, last, now)
