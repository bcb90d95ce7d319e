"""What goes wrong on one rank in the middle of `fit` is told on the others, at once and in the engine's words."""

from __future__ import annotations

import os
import signal

import pytest

pytest.importorskip("keras", reason="needs Keras")

from ..ranks import run_ranks, start_ranks
from . import keras_programs_called
from .backends import BACKENDS, environment

pytestmark = pytest.mark.timeout(240)  # jobs with several worlds, in which Keras compiles anew

TEXTS = {
    "mismatch": "MismatchError: ",
    "left": "RankLeftError: rank 1 ",
    "aborted": "enough of it",
    "died": "RankDiedError: rank 1 ",
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_failure_is_told_at_once(backend: str) -> None:
    finished = run_ranks(2, keras_programs_called.failures, check=False, env=environment(backend), timeout=200)
    found = finished.values[0]
    assert found is not None and finished.code != 0, finished
    assert len(found["goes on"]) == 1
    for kind, expected in TEXTS.items():
        text, seconds = found[kind]
        assert expected in text, (kind, text)
        assert seconds < 30.0, (kind, seconds, text)  # 0.1 s; who is not told waits for the stall limit, minutes


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_interrupt_ends_fit(backend: str) -> None:
    """Of one rank, where the others are told, and of the whole job, as Ctrl-C does; nothing of it is left."""
    patient = ["--stall-check-shutdown-time-seconds", "0"]
    program, env = keras_programs_called.interrupted, environment(backend)
    with start_ranks(2, program, env=env, options=patient, timeout=200) as job:
        job.wait_for("one.0", "one.1", timeout=100)
        os.kill(job.pid(1), signal.SIGINT)
        job.wait_for("one.interrupted.1", "one.told.0")
        assert "rank 1 left while others" in (job.directory / "one.told.0").read_text()
        job.wait_for("all.0", "all.1", timeout=60)
        os.killpg(job.process.pid, signal.SIGINT)
        finished = job.finish(check=False)
        assert list(job.directory.glob("all.interrupted.*")), finished
    assert finished.code != 0, finished
    assert "KeyboardInterrupt" in "".join(rank.stderr for rank in finished.ranks), finished
