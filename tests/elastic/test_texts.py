"""Texts for users of elastic jobs when something is wrong, in jobs of real workers with the engine."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

import pytest

from engine.elastic.causes import Cause
from engine.launch.report.elastic_report import Last, first_failure

from ..launch.conftest import launcher as launcher
from ..launch.launch_jobs import Finished, Launcher
from ..waiting import until
from .elastic_jobs import worlds

PRELUDE = """
import os, sys
from pathlib import Path
import numpy as np
worker, here = int(os.environ["ENGINE_WORKER"]), Path(os.environ["HERE"])
"""


def start_text(text: str) -> str:
    return PRELUDE + textwrap.dedent(text)


def run(launcher: Launcher, text: str, *options: object) -> Finished:
    """Run a program as an elastic job of two ranks."""
    program = launcher.home / "train.py"
    program.write_text(start_text(text))
    return launcher.run("-np", 2, "--min-np", 1, *options, sys.executable, program)


def line_of(launcher: Launcher, code: str) -> int:
    """Return the number of the program's line with this code."""
    lines = (launcher.home / "train.py").read_text().splitlines()
    return lines.index(code) + 1


def of_the_engine(text: str) -> list[str]:
    """Return the frames of tracebacks that are in the engine."""
    package = Path(__file__).resolve().parents[2] / "engine"
    return [line for line in text.splitlines() if re.search(rf'File "({re.escape(str(package))}|engine_ext)/', line)]


@pytest.mark.slow
def test_an_error_of_the_program_shows_the_programs_frames(launcher: Launcher) -> None:
    """No frame of the engine is between the call of the wrapped function and its own first frame."""
    done = run(
        launcher,
        """
        import engine
        from engine.elastic import ObjectState, run
        def step(number):
            engine.allreduce(np.ones(4))
            raise ValueError("batch 7 is bad")
        @run
        def train(state):
            step(state.step)
        train(ObjectState(step=0))
        """,
    )
    assert done.code == 1
    assert done.err.count("Traceback") == 2 and not of_the_engine(done.err)
    assert done.failure[0].startswith("enginerun: first failure: worker ")
    number = line_of(launcher, '    raise ValueError("batch 7 is bad")')
    assert done.failure[1:] == [
        f'  |   File "{launcher.home}/train.py", line {number}, in step',
        '  |     raise ValueError("batch 7 is bad")',
        "  | ValueError: batch 7 is bad",
    ]
    assert f"raised the same: ValueError in {launcher.home}/train.py, line {number}" in done.err


def test_a_collective_outside_of_the_wrapped_function_is_named_by_the_programs_line(launcher: Launcher) -> None:
    """The same text helps users who have forgotten `elastic.run`."""
    done = run(launcher, "import engine\nengine.init()\nengine.allreduce(np.ones(4))\n")
    assert done.code == 1
    number = line_of(launcher, "engine.allreduce(np.ones(4))")
    assert f"raised the same: NotInitializedError in {launcher.home}/train.py, line {number}" in done.err
    frame, code, told = done.failure[1:]
    assert f"line {number}, in <module>" in frame and code == "  |     engine.allreduce(np.ones(4))"
    assert "move this call into that function" in told
    assert "A program that has none needs one (engine.elastic.run, docs/how-to/elastic.md)" in told
    assert "started without --min-np" in told


TRAINING = """
from tests.waiting import until_files
if {differs}:
    {change}
if late and worker > 0:
    until_files(here / "trained.0")
import engine
from engine.collectives import objects
from engine.elastic import ObjectState, run
from engine.session.optimizers import register_optimizer
class Wrapped:
    # as a wrapped optimizer
    def move_to_world(self, root):
        objects.compare_descriptions({{"options": (f"passes={{passes}}", 0)}}, "the ranks give different options")
engine.init()
wrapped = Wrapped()
register_optimizer(wrapped)
@run
def train(state):
    while not (here / "stop").exists() or state.step % 10:
        told = float(engine.allreduce(np.ones(1), engine.Sum)[0])
        state.step += 1
        state.commit()
        (here / f"trained.{{worker}}").touch()
train(ObjectState(step=0))
"""
BUILD = 'os.environ["ENGINE_KERNELS"] = "plain"'


def test_ranks_that_disagree_at_first_end_the_job_with_the_text(launcher: Launcher) -> None:
    done = run(launcher, "late, passes = False, 1\n" + TRAINING.format(differs="worker == 1", change=BUILD))
    assert done.code == 1
    assert "IncompatibleRanksError: the ranks cannot work together" in "\n".join(done.failure)
    assert re.search(r"rank 1 has kernels plain, rank 0 has kernels \w+: set the same ENGINE_KERNELS", done.failure[-1])
    assert worlds(done) == ["1: 2 ranks"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            BUILD,
            r"worker 1 in slot 1 of localhost is turned away, and its host blacklisted: it has ENGINE_KERNELS plain",
        ),
        ("passes = 3", r"MismatchError: the ranks give different options"),
    ],
)
def test_a_newcomer_that_differs_costs_nobody_else_the_job(launcher: Launcher, change: str, told: str) -> None:
    """A different build is turned away at the gate; a different optimizer, in the world that it joins."""
    program = launcher.home / "train.py"
    text = "late, passes = True, 1\n" + TRAINING.format(differs="worker > 0", change=change)
    program.write_text(start_text(text))
    errors = launcher.home / "errors"
    with errors.open("wb") as file:
        process = launcher.start("-np", 1, "--max-np", 2, "--slots", 2, sys.executable, program, stderr=file)
    until(lambda: re.search(told, errors.read_text()), "the newcomer is told")
    trained = launcher.home / "trained.0"
    trained.unlink()
    until(trained.exists, "the survivor trains on")
    (launcher.home / "stop").touch()
    done = launcher.finish(process)
    done.err = errors.read_text()
    assert done.code == 0, done.err
    if change == BUILD:
        assert worlds(done) == ["1: 1 rank"]
    else:
        assert "'options': rank 1 has passes=3, rank 0 has passes=1" in done.err


@pytest.mark.parametrize(
    ("code", "which"), [(-9, "; before that it had written to stderr"), (-11, "; from its stderr")]
)
def test_what_a_killed_worker_had_written_is_not_told_as_the_cause(code: int, which: str) -> None:
    """SIGKILL comes from outside; the output of a process that ends by its own signal may state the cause."""
    cause = Cause("worker 1: was killed", 1)
    lines = first_failure(cause, cause.text, Last(code, Path("rank.1/stderr"), ["a warning of long ago"]))
    assert lines == [f"first failure: worker 1: was killed{which} (rank.1/stderr):", "  | a warning of long ago"]
