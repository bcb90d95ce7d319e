"""Slow workers of real jobs: one for which the others wait at each step is replaced, and no step is lost."""

from __future__ import annotations

import sys

import pytest

from ..launch.conftest import launcher as launcher
from ..launch.launch_jobs import Launcher
from ..waiting import let_pass, until
from .elastic_jobs import worlds

pytest.importorskip("torch")

LIMIT, TIME = 0.03, 5


@pytest.mark.slow
def test_one_that_is_late_in_each_step_is_replaced_once_and_nobody_else_is(launcher: Launcher) -> None:
    """Neither a pause of rank 0 nor a loader for which all wait makes a worker slow."""
    errors = launcher.home / "errors"
    launcher.environment["OMP_NUM_THREADS"] = "1"
    options = ("-np", 2, "--min-np", 1, "--slow-limit", LIMIT, "--slow-time", TIME)
    options += ("--blacklist-cooldown-range", 2, 2)
    with errors.open("wb") as stderr:
        command = (sys.executable, "-m", "tests.elastic.slow_program")
        process = launcher.start(*options, *command, stderr=stderr)

    def made(worker: int) -> list[tuple[int, int]]:
        """Return the steps that a worker has made, each with the size of its world."""
        path = launcher.home / f"steps.{worker}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(step), int(size)) for step, size in map(str.split, lines)]

    until(lambda: len(made(0)) > 20, "steps")
    (launcher.home / "pause").touch()
    let_pass(TIME + 2)
    (launcher.home / "loader").touch()
    let_pass(TIME + 2)
    assert "is slow" not in errors.read_text()
    (launcher.home / "loader").unlink()
    (launcher.home / "slow").touch()
    until(lambda: made(2), "the first step of another worker", 60)
    let_pass(TIME + 4)
    (launcher.home / "stop").touch()
    done = launcher.finish(process)
    done.err = errors.read_text()
    assert done.code == 0, done.err
    said = "worker 1 in slot 1 of localhost is slow: the others wait "
    assert [line for line in done.err.splitlines() if line.startswith(f"enginerun: {said}")]
    first, second, third = worlds(done)
    assert first == "1: 2 ranks"
    assert second.startswith(f"2: 1 rank, because {said}")
    assert third == "3: 2 ranks, because there are newcomers"
    # Each step was made once, by the members of its time; the slow worker left, and its successor came, between steps.
    steps = [step for step, _ in made(0)]
    assert steps == list(range(1, len(steps) + 1))
    together = [step for step, size in made(0) if size == 2]
    assert [step for step, _ in made(1) + made(2)] == together


def test_who_does_not_count_finds_nobody(launcher: Launcher) -> None:
    done = launcher.run("-np", 2, "--min-np", 1, "--slow-limit", LIMIT, "--no-metrics", "true")
    assert done.code == 2 and "--slow-limit: who is slow is found by counters" in done.err
