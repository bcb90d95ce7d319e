"""The report of a failed job names the line of its program at which a rank was stuck or crashed."""

from __future__ import annotations

import re
import signal

import pytest

from ..ranks import start_ranks

PROGRAM = """
import ctypes, os, signal, threading
import numpy as np
import engine

def load_batch(how):
    if how == "native":
        ctypes.PyDLL(None).sleep(600)  # holds the interpreter's lock
    elif how == "crash":
        ctypes.string_at(0)
    elif how == "library":
        threading.Event().wait(600)
    else:
        os.kill(os.getpid(), signal.SIGSTOP)

engine.init()
engine.barrier()
if engine.rank() == 1:
    load_batch(HOW)
engine.allreduce(np.ones(3), name="batch")
"""
# Users do not have the test command's own dump of stacks at a crash.
SETTINGS = {"ENGINE_STALL_LIMIT": "2", "PYTHONFAULTHANDLER": ""}
OPTIONS = ["--grace-period", "2"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("how", "word", "line"), [("native", "stood", 8), ("library", "stood", 12), ("crash", "crashed", 10)]
)
def test_the_line_of_the_users_program_is_told(how: str, word: str, line: int) -> None:
    with start_ranks(2, f"HOW = {how!r}\n" + PROGRAM, env=SETTINGS, options=OPTIONS) as job:
        finished = job.finish(check=False)
    assert "first failure: rank 1 " in finished.err, finished
    said = re.search(rf"enginerun: rank 1 {word} at rank.py:(\d+) in load_batch \(all threads: (.*)\)", finished.err)
    assert said is not None, finished
    assert int(said[1]) == line + 2  # the test command's prelude, and the line above the program
    assert finished.code == (128 + signal.SIGSEGV if how == "crash" else 1)
    assert "rank.1/stacks.txt" in finished.files
    assert "rank.0/stacks.txt" not in finished.files  # it was not asked


@pytest.mark.slow
def test_functions_made_of_a_table_are_not_the_users_line() -> None:
    """`engine.torch.allreduce` is compiled from text: its file name is not one of the program's."""
    pytest.importorskip("torch", reason="needs torch")
    program = (
        "import torch\nimport engine.torch\nengine.init()\nengine.barrier()\n"
        "if engine.rank() == 1:\n    engine.torch.allreduce('no tensor')\nengine.torch.allreduce(torch.ones(3))\n"
    )
    with start_ranks(2, program, env=SETTINGS, options=OPTIONS) as job:
        finished = job.finish(check=False)
    assert re.search(r"TypeError: .* at rank\.py:\d+", finished.err), finished
    assert " at <engine" not in finished.err


@pytest.mark.slow
def test_a_stopped_rank_cannot_say_where_it_stands() -> None:
    with start_ranks(2, "HOW = 'stop'\n" + PROGRAM, env=SETTINGS, options=OPTIONS) as job:
        finished = job.finish(check=False)
    assert "enginerun: rank 1 did not answer where it stands: it was stopped, the kernel holds it, or" in finished.err
    assert "first failure: rank 1 " in finished.err
