"""The command that merges flight records, on jobs that are really stuck."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from engine.trace.postmortem import make_report

from ..ranks import Job, start_ranks
from ..waiting import until
from . import programs, set_programs
from .faults import ready, request_records, send, stop, stop_in_the_middle

LIMIT = {"ENGINE_STALL_LIMIT": "6"}


def told(job: Job) -> str:
    """Return what the command prints about the job's directory."""
    command = [sys.executable, "-m", "engine.trace", "flight", str(job.output)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize(("size", "victim", "moment"), [(3, 2, "streaming"), (2, 0, "known")])
def test_the_records_of_a_stalled_job_name_who_stands_still(size: int, victim: int, moment: str) -> None:
    survivors = [rank for rank in range(size) if rank != victim]
    with start_ranks(size, programs.stopped, victim, moment, env=LIMIT) as job:
        ready(job)
        if moment == "streaming":
            stop_in_the_middle(job, victim)
        else:
            stop(job, victim)

        def verdict() -> str:
            """Have the ranks write their records again, and return the verdict."""
            request_records(job, survivors)
            return make_report(job.output)[0].splitlines()[-1]  # without a process, because the limit approaches

        waiting = f"rank {survivors[0]} waits" if size == 2 else f"ranks {survivors[0]}, {survivors[1]} wait"
        if moment == "streaming":
            # It was stopped within an entry, or before it had submitted the next operation.
            stopped, withheld = (
                f"verdict: rank {victim} stopped in entry ",
                f"verdict: rank {victim} has not submitted 'shared'",
            )
            until(lambda: verdict().startswith((stopped, withheld)), "the standstill lasts a second")
            last = verdict()
            assert last.endswith(f"; {waiting} for it") and "'shared'" in last, last
        else:
            last = verdict()
            assert last == f"verdict: rank {victim} has not submitted 'known'; {waiting} for it"
        assert f"\nrank {victim}: no flight record" in "\n" + make_report(job.output)[0]
        job.wait_for(*(f"failed.{rank}" for rank in survivors))
        until(lambda: (job.output / f"rank.{survivors[0]}" / "failure.json").exists(), "the failure was written down")
        text = told(job)
        assert text.startswith(f"first cause: rank {victim} stalled: "), text
        assert f"rank {victim} " in text.splitlines()[-1]
        (job.directory / "resumed").touch()
        send(job, victim, signal.SIGCONT)
        job.finish(check=False)


@pytest.mark.sample(1)
@pytest.mark.parametrize("stopped", [False, True])
def test_the_records_name_who_stands_still_in_a_process_set(stopped: bool) -> None:
    """Rank 0 waits for both others in the world, rank 1 for rank 2 in their set, and rank 2 for none."""
    with start_ranks(3, set_programs.in_a_set, 2, "blocked") as job:
        ready(job)
        if stopped:
            stop(job, 2)
        request_records(job, range(2 if stopped else 3))
        text = told(job)
    assert text.splitlines()[-1] == "verdict: rank 2 has not submitted 'known' among ranks 1, 2; rank 1 waits for it"
    assert "\n  among ranks 1, 2: finished entry " in text, text
    assert "\n    waits for 'known' (allreduce) for " in text, text
