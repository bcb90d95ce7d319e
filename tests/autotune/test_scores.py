"""Scores of the tuner: whose steps count, which traffic, and how much of it is waiting."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from autotune import cli, journal
from autotune.journal import JournalError
from autotune.replay import replay_log
from engine.tuning import steps as stepping
from engine.tuning.listener import ACTIVE, Listener, choose_anchor, find_rarest_optimizer, is_periodic
from engine.tuning.steps import TRAFFIC, Changed, Mark, Score, Steps

from ..ranks import run_ranks
from ..waiting import measured
from . import scored_programs

FEW = ["--autotune", "--autotune-steps-per-sample", "4", "--autotune-warmup-samples", "0"]
GIB = 1 << 30


def options(log: Path, trials: int = 12) -> list[str]:
    return [*FEW, "--autotune-bayes-opt-max-samples", str(trials), "--autotune-log-file", str(log)]


def told(log: Path) -> list[dict[str, Any]]:
    return [row for row in journal.read(log) if row["row"] == "tell"]


@pytest.mark.slow
def test_without_an_optimizer_periods_of_the_traffic_are_tuned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    held = {"HOROVOD_FUSION_THRESHOLD": str(1 << 20), "ENGINE_CHUNK_BYTES": "64K"}
    finished = run_ranks(2, scored_programs.traffic, options=options(log), env=held)
    first, second = finished.values
    assert first == second and first["cycle_time_ms"] <= 2.0
    rows = journal.read(log)
    assert rows[0]["about"]["score"] == "seconds per period"
    assert replay_log(rows).exact and all(0 <= row["exposed"] <= 1 for row in told(log))
    (said,) = (line for line in finished.ranks[0].stderr.splitlines() if "autotune: " in line)
    assert ": a period of 'p" in said and "less time than before" in said
    assert cli.main(["show", str(log)]) == 0
    shown = capsys.readouterr().out
    assert "ms/period" in shown and "exposed" in shown and "ms/step" not in shown


@pytest.mark.slow
@pytest.mark.timeout(400)  # several jobs, at most
def test_of_tensors_without_names_the_busy_time_is_tuned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    held = {"HOROVOD_FUSION_THRESHOLD": str(1 << 20), "ENGINE_CHUNK_BYTES": "64K", "ENGINE_STORES": "cached"}

    def measure() -> None:
        log.unlink(missing_ok=True)
        finished = run_ranks(2, scored_programs.unnamed_traffic, options=options(log, 10), env=held)
        first, second = finished.values
        assert first == second and first["cycle_time_ms"] < 4.0  # the default is 5, and after 4 ms somebody waits
        assert journal.read(log)[0]["about"]["score"] == "busy seconds per GiB"
        (said,) = [line for line in finished.ranks[0].stderr.splitlines() if "autotune: " in line]
        assert ": a byte takes " in said and "less busy time than before" in said

    measured(measure)
    assert cli.main(["show", str(log)]) == 0
    shown = capsys.readouterr().out
    assert "busy" in shown and "ms/GiB" in shown and "ms/step" not in shown


@pytest.mark.slow
def test_steps_that_come_later_are_tuned_in_a_search_of_their_own(tmp_path: Path) -> None:
    logs = [tmp_path / "log.jsonl", tmp_path / "log.2.jsonl"]
    # Enough trials are left when steps begin, so that they are seen before the search by traffic is over.
    finished = run_ranks(
        2, scored_programs.steps_after_traffic, [str(each) for each in logs], options=options(logs[0], 9)
    )
    assert [journal.read(log)[0]["about"]["score"] for log in logs] == ["seconds per period", "seconds per step"]
    said = [line for line in finished.ranks[0].stderr.splitlines() if "autotune: " in line]
    assert "from now on the steps of an optimizer count: the search begins anew" in said[0] and len(said) == 2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_whole_alternation_of_two_optimizers_is_a_step(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"

    def measure() -> None:
        log.unlink(missing_ok=True)
        finished = run_ranks(2, scored_programs.alternation, options=options(log, 4))
        samples = [sample for row in told(log) for sample in row["samples"]]
        least = 2 * scored_programs.SHORT + scored_programs.LONG
        assert statistics.median(samples) >= 0.99 * least  # and no single step takes that long
        assert statistics.median(samples) == pytest.approx(finished.values[0], rel=0.25)

    measured(measure, 5)


@pytest.mark.timeout(400)
def test_rank_0_measures_the_slowest_rank_and_sees_who_waits() -> None:
    def measure() -> None:
        here, there = run_ranks(2, scored_programs.late_ranks).values
        for late in here:
            steps, others = statistics.median(here[late][0]), statistics.median(there[late][0])
            if late != "nobody":
                assert steps == pytest.approx(others, rel=0.15), late
                assert steps >= 0.99 * scored_programs.LATE
            assert all(0 <= share <= 1 for share in here[late][1])
        waiting = {late: statistics.median(shares) for late, (_, shares) in here.items()}
        assert waiting["rank 1"] > 0.5 > waiting["rank 0"]
        assert waiting["rank 1"] > 2 * waiting["rank 0"]

    measured(measure, 5)


@pytest.mark.slow
def test_a_job_of_process_sets_is_told_that_they_are_not_tuned() -> None:
    first, second = run_ranks(2, scored_programs.only_process_sets, options=FEW).values
    assert "Process sets, which this job has, are not tuned" in first[0]
    assert len(first) == 2 and "the job ended" in first[1] and second == []


# In one process


def marks(*sources: int, seconds: float = 1.0) -> list[Mark]:
    return [Mark(round(1e9 * seconds * k), 0, source, 0, 0, 0) for k, source in enumerate(sources)]


def test_the_rarest_optimizer_that_goes_on_is_scored() -> None:
    assert find_rarest_optimizer([], 2) is None
    assert find_rarest_optimizer(marks(*[0] * 11), 12) is None
    assert find_rarest_optimizer(marks(*[0] * 12), 12) == 0
    assert find_rarest_optimizer(marks(*[0, 0, 5] * 6), 12) == 5
    assert find_rarest_optimizer(marks(*[0] * 30, 1, *[0] * 30), 12) == 0  # once is no period
    assert find_rarest_optimizer(marks(*[1] * 4, *[0] * 30), 12) == 0  # it has ended


def defined(*traffic: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"name": name, "times": times, "bytes": nbytes} for name, times, nbytes in traffic]


def test_the_tensor_that_periods_are_cut_by() -> None:
    gradients = [(f"g{k}", 50, 1 << 20) for k in range(9)]
    others = [("loss", 500, 4), ("validation", 8, 64), ("weights", 1, 1 << 40)]
    assert choose_anchor(defined(*gradients, *others)) == "g0"
    assert choose_anchor(defined(("d", 100, 1 << 20), ("g", 50, 1 << 20))) == "g"
    assert choose_anchor(defined(("allreduce.noname.3", 50, 1 << 20), ("over", 40, 4))) is None
    assert choose_anchor(defined(*[(f"g.{k}", 1, 1 << 20) for k in range(99)])) is None
    assert choose_anchor(defined(("barrier", 50, 0))) == "barrier"
    assert choose_anchor([]) is None


def test_what_is_a_period() -> None:
    assert is_periodic([1.0] * 39 + [100.0])  # such as a validation
    assert not is_periodic(([0.1] * 4 + [10.0]) * 8)  # five tensors of one name


class Told:
    """Engine that only has marks."""

    def __init__(self) -> None:
        self.all: list[Mark] = []

    def record_steps(self) -> None:
        pass

    def steps(self, since: int) -> tuple[int, list[Mark]]:
        return since, self.all[since:]


def test_samples_of_each_score() -> None:
    told: Any = Told()
    steps = Steps(told)
    steps.follow_score(Score(source=2))
    second = 10**9
    told.all = [Mark(0, 0, 2, 0, 0, 0), Mark(second, 0, 1, 0, 0, 0), Mark(2 * second, 0, 2, second, 0, 9)]
    assert steps.read() == [(2.0, 0, 0.5)]
    steps.follow_score(Score(source=TRAFFIC, every=4))
    told.all += [Mark(k * second, 1, TRAFFIC, 5 * k * second, 0, 0) for k in range(3, 5)]
    assert steps.read() == [(0.25, 1, 1.0)]  # several threads waited, so the sum exceeds the time
    steps.follow_score(Score(source=TRAFFIC, busy=True))
    told.all += [Mark(k * second, k // 7, TRAFFIC, 0, k * second // 2, k * GIB // 4) for k in range(5, 8)]
    told.all += [told.all[-1]._replace(time=9 * second)]  # time without traffic
    assert steps.read() == [(2.0, 0, 0.0), (2.0, None, 0.0)]


def test_a_score_ends_when_what_it_goes_by_ends() -> None:
    told: Any = Told()
    steps = Steps(told)
    told.all += marks(*[0, 1] * 200)
    assert len(steps.read()) == 199
    told.all += marks(*[1] * stepping.OTHERS)
    with pytest.raises(Changed, match="another optimizer"):
        steps.read()
    steps.follow_score(Score(source=TRAFFIC))
    told.all += marks(*[TRAFFIC, 0] * (stepping.STEPPED - 1))
    steps.read()
    told.all += marks(0)
    with pytest.raises(Changed, match="an optimizer"):
        steps.read()


@pytest.fixture
def native() -> Iterator[Any]:
    engine.init()
    yield engine.session.runtime.current_engine()
    engine.shutdown()


def reduced(native: Any, *names: str, length: int = 256) -> None:
    for name in names:
        memory = np.ones(length, np.float32)
        native.allreduce(memory, memory, name, int(engine.Sum), 1.0, 1.0, True).wait()


def test_the_engine_marks_the_traffic(native: Any) -> None:
    native.mark_traffic("a")
    reduced(native, "a")
    assert native.steps(0) == (0, [])  # recording is off
    native.record_steps()
    native.mark_traffic("a", every=2)
    for length in (256, 512, 256, 512):  # the coordinator evicts and redefines the name
        reduced(native, "b", "a", length=length)
    _, found = native.steps(0)
    assert [mark[2] for mark in found] == [TRAFFIC] * 2 and found[1][5] - found[0][5] == 2 * 4 * (256 + 512)
    assert found[0][4] == 0  # busy time is not counted
    began = time.monotonic_ns()
    native.mark_traffic(window=3)
    reduced(native, *"abcdefg")
    passed = time.monotonic_ns() - began  # a mark's time is slightly after the work that it counts
    _, windows = native.steps(2)
    assert len(windows) == 2 and windows[1][5] - windows[0][5] == 3 * 1024
    assert 0 < windows[1][4] - windows[0][4] <= passed  # busy nanoseconds
    assert 0 < windows[1][3] - windows[0][3] <= passed  # waiting nanoseconds
    native.mark_traffic()
    reduced(native, *"abcdefg")
    assert native.steps(4) == (4, [])
    with pytest.raises(ValueError, match="a name has 1 to"):
        native.mark_traffic("")


def test_the_share_of_waiting_is_optional_in_a_log(tmp_path: Path) -> None:
    space = {"stores": {"kind": "Choice", "values": ["auto", "cached"]}}
    head = {"row": "open", "n": 0, "schema": 1, "seed": 0, "max_trials": 3, "space": space, "first": [], "settings": {}}
    ask = {"row": "ask", "n": 1, "id": 0, "knobs": {"stores": "auto"}, "phase": "default", "why": ""}
    row = {"row": "tell", "n": 2, "id": 0, "status": "ok", "samples": [1.0]}

    def write(last: dict[str, Any]) -> None:
        rows = (head | {"default": {"stores": "auto"}}, ask, last)
        (tmp_path / "log").write_text("".join(json.dumps(each) + "\n" for each in rows))

    for exposed in ({}, {"exposed": 0.25}, {"exposed": 1}):
        write(row | exposed)
        assert journal.read(tmp_path / "log")[2] == row | exposed
    for wrong in (-0.1, 1.5, True, "much"):
        write(row | {"exposed": wrong})
        with pytest.raises(JournalError, match="'exposed' to be a share"):
            journal.read(tmp_path / "log")


class OnGpus:
    """Engine whose tensors, all on GPUs, recur without a period."""

    def __init__(self) -> None:
        self.looks = self.asked = 0
        self.marks: list[tuple[int, ...]] = []
        self.marking = False

    def record_steps(self) -> None:
        """Do nothing: there are no steps."""

    def counters(self) -> dict[str, int]:
        return {"entries": self.looks, "tensors": self.looks, "bytes": 1000, "device_bytes": 1000}

    def definitions(self) -> list[dict[str, Any]]:
        self.asked += 1
        return [{"name": "x", "times": 100, "bytes": 10}]

    def mark_traffic(self, name: str | None = None, every: int = 1, window: int = 0) -> None:
        assert not window, "busy time per byte says nothing of a GPU"
        self.marking = name is not None

    def steps(self, since: int) -> tuple[int, list[tuple[int, ...]]]:
        self.looks += 1
        if self.marking:
            self.marks += [(self.looks * 10**9 + k * 10**6, 0, TRAFFIC, 0, 0, 0) for k in range(5)]
        return since, self.marks[since:]


def test_traffic_on_gpus_without_a_period_is_listened_to_anew() -> None:
    fake: Any = OnGpus()
    listener = Listener(fake, Steps(fake), 20)
    for _ in range(40 * ACTIVE):
        assert listener.choose_score() is None
        assert len(listener._ends) < 40 * 9 * ACTIVE / 5
    assert 2 <= fake.asked <= 40
