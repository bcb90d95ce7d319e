"""A rank raises, exits or crashes while others wait: they are told who and why. Ctrl-C ends a waiting job."""

from __future__ import annotations

import os
import signal
import time

import pytest

from ..ranks import Finished, start_ranks
from . import programs
from .faults import named, others, ready, soon


def leave(size: int, victim: int, manner: str, name: str) -> tuple[Finished, float]:
    with start_ranks(size, programs.leaving, victim, manner, name) as job:
        ready(job, *(rank for rank in range(size) if rank != victim))
        if manner == "shutdown":
            job.wait_for(*(f"../value.{rank}" for rank in range(size) if rank != victim))
            (job.directory / "done").touch()
        finished = job.finish(check=False)
        return finished, float((job.directory / "left").read_text())


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("size", "victim", "manner", "name", "kind", "code"),
    [
        (2, 1, "raise", "known", "RankRaisedError", 1),
        (3, 0, "raise", "new", "RankRaisedError", 1),
        (2, 0, "memory", "known", "RankRaisedError", 1),
        (2, 1, "end", "known", "RankLeftError", 0),
        (3, 0, "end", "new", "RankLeftError", 0),
        pytest.param(3, 2, "end", "new", "RankLeftError", 0, marks=pytest.mark.slow),
        (2, 0, "exit0", "known", "RankLeftError", 0),
        (3, 1, "exit3", "known", "RankLeftError", 3),
        (2, 1, "exit3", "new", "RankLeftError", 3),
        (2, 0, "_exit", "known", "RankDiedError", 0),
        (3, 1, "_exit", "new", "RankDiedError", 0),
        (2, 1, "segfault", "known", "RankDiedError", 128 + signal.SIGSEGV),
        (2, 1, "shutdown", "known", "RankLeftError", 0),
        (3, 0, "shutdown", "new", "RankLeftError", 0),
    ],
)
def test_who_leaves_is_named(size: int, victim: int, manner: str, name: str, kind: str, code: int) -> None:
    finished, left = leave(size, victim, manner, name)
    named(finished, others(finished, victim), victim, kind, left)
    for value in others(finished, victim).values():
        if manner == "raise":
            assert "ValueError: bad batch 17" in value["text"] and "programs.py:" in value["text"]
        if manner == "memory":
            assert "MemoryError: no room for the activations" in value["text"]
        if kind == "RankLeftError":
            assert f"'{name}' was not " in value["text"]
    if code:
        assert finished.code == code, finished


def test_ctrl_c_ends_ranks_that_wait_for_one_that_never_comes() -> None:
    with start_ranks(3, programs.blocked_for_ever) as job:
        ready(job)
        begun = time.monotonic()
        os.kill(job.process.pid, signal.SIGINT)
        finished = job.finish(check=False)
        soon(time.monotonic() - begun, 5, finished)
    assert finished.code == 128 + signal.SIGINT
    assert "ended by SIGINT" in finished.err
