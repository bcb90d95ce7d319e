"""Failures of one rank in the middle of `fit` are reported on the others, at once and in the engine's words."""

from __future__ import annotations

import os
import signal

import pytest

pytest.importorskip("keras", reason="needs Keras")

from ..ranks import start_ranks
from . import keras_programs_called
from .backends import BACKENDS, environment

pytestmark = pytest.mark.timeout(240)  # jobs with several worlds, in each of which Keras compiles

TEXTS = {
    "mismatch": "MismatchError: ",
    "left": "RankLeftError: rank 1 ",
    "aborted": "enough of it",
    "died": "RankDiedError: rank 1 ",
}


PATIENT = ["--stall-check-shutdown-time-seconds", "0"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_failure_is_told_at_once_and_an_interrupt_ends_fit(backend: str) -> None:
    with start_ranks(2, keras_programs_called.failures, env=environment(backend), options=PATIENT, timeout=200) as job:
        job.wait_for("begun.0", "begun.1", timeout=100)
        os.kill(job.pid(1), signal.SIGINT)
        job.wait_for("interrupted.1", "told.0")
        assert "rank 1 left while others" in (job.directory / "told.0").read_text()
        finished = job.finish(check=False)
    found = finished.values[0]
    assert found is not None and finished.code != 0, finished
    assert len(found["goes on"]) == 1
    for kind, expected in TEXTS.items():
        text, seconds = found[kind]
        assert expected in text, (kind, text)
        assert seconds < 30.0, (kind, seconds, text)  # usually 0.1 s; a rank that is not told waits for ever


@pytest.mark.slow
def test_an_interrupt_of_the_whole_job_ends_fit() -> None:
    """Ctrl-C leaves nothing running. With JAX, programs run on threads that know nothing of signals."""
    program, env = keras_programs_called.interrupted_together, environment("jax")
    with start_ranks(2, program, env=env, options=PATIENT, timeout=200) as job:
        job.wait_for("begun.0", "begun.1", timeout=100)
        os.killpg(job.process.pid, signal.SIGINT)
        finished = job.finish(check=False)
        assert list(job.directory.glob("interrupted.*")), finished
    assert finished.code != 0, finished
    assert "KeyboardInterrupt" in "".join(rank.stderr for rank in finished.ranks), finished
