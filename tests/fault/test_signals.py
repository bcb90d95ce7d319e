"""A signal handler that shuts the engine down ends, wherever it interrupts the engine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ..ranks import Job, run_ranks, start_ranks
from ..waiting import until
from . import signal_programs
from .faults import send


def listens(job: Job) -> bool:
    """Return whether rank 0 has opened the rendezvous socket, on which it waits."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    sockets = {f"socket:[{words[6]}]" for words in lines if "@engine-" in words[-1]}
    descriptors = Path(f"/proc/{job.pid(0)}/fd").iterdir()
    return any(os.readlink(path) in sockets for path in descriptors if path.is_symlink())


@pytest.mark.slow
def test_shutdown_in_a_signal_handler_ends_in_the_middle_of_init_and_of_shutdown() -> None:
    with start_ranks(2, signal_programs.interrupted) as job:
        job.wait_for("in.init")
        until(lambda: listens(job), "rank 0 gathers the others")
        send(job, 0, signal.SIGTERM)
        job.wait_for("handled.0")
        job.wait_for("in.flight")
        send(job, 0, signal.SIGTERM)
        job.wait_for("handling.1")
        send(job, 0, signal.SIGTERM)
        job.wait_for("handled.2", timeout=signal_programs.SPOKEN - 1)  # while the first shutdown still waits
        assert not (job.directory / "handled.1").exists()
        finished = job.finish(check=False)
    first, second = finished.values
    assert first is not None and second is not None, finished
    assert (first["after_init"], second["after_init"]) == (False, True)
    said = finished.ranks[0].stderr
    assert "engine.shutdown() was called while engine.init() runs in the same thread" in said
    assert "engine.shutdown() was called while engine.shutdown() runs in the same thread" in said


def test_a_program_finds_its_signals_as_they_were() -> None:
    """`init` changes only two realtime signals; Lightning, for example, uses SIGUSR1 only if it has no handler."""
    for changed in run_ranks(2, signal_programs.handlers).values:
        assert changed == ["SIGRTMIN+8", "SIGRTMIN+9"]
