"""A rank is stopped, or withholds a tensor: every rank that waits is told in time which rank is at fault."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest

from ..ranks import run_ranks, start_ranks
from ..waiting import until
from . import programs
from .faults import WITHIN, named, others, ready, send, soon, stop, stop_in_the_middle

LIMIT = 2.0
STALL = {"ENGINE_STALL_LIMIT": str(LIMIT)}
WARNED = {**STALL, "ENGINE_STALL_WARNING": str(LIMIT / 2)}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("size", "victim", "moment"),
    [
        (2, 0, "known"),
        (3, 1, "known"),
        (2, 0, "new"),
        (3, 2, "new"),
        (2, 1, "streaming"),
        (3, 0, "streaming"),
    ],
)
def test_a_stopped_rank_is_named_and_corrupts_nothing(size: int, victim: int, moment: str) -> None:
    survivors = [rank for rank in range(size) if rank != victim]
    with start_ranks(size, programs.stopped, victim, moment, env=WARNED) as job:
        ready(job)
        stopped = stop_in_the_middle(job, victim) if moment == "streaming" else stop(job, victim)
        job.wait_for(*(f"failed.{rank}" for rank in survivors))
        (job.directory / "resumed").touch()
        send(job, victim, signal.SIGCONT)
        finished = job.finish(check=False)
    kind = "RankStalledError"
    named(finished, others(finished, victim), victim, kind, stopped, LIMIT + WITHIN)
    # The limit, counted from the first wait, does not expire early.
    begun = stopped if moment == "streaming" else min(finished.values[rank]["begun"] for rank in survivors)
    for rank in survivors:
        assert finished.values[rank]["at"] - min(stopped, begun) > LIMIT / 2
    if any("in the middle of schedule entry" in finished.values[rank]["text"] for rank in survivors):
        expected = rf"schedule entry \d+ \('shared'\) has stood still for \d s for rank {victim}\n"
        assert any(re.search(expected, finished.ranks[rank].stderr) for rank in survivors), finished
    resumed = finished.values[victim]
    assert resumed["type"] == kind and resumed["rank"] == victim, resumed
    for rank, value in enumerate(finished.values):
        assert value["changed"] == 0, f"rank {rank}'s gradients changed after the failure"
        assert value["again"] == kind, value
        assert value["busy"] < programs.BUSY, f"rank {rank} uses the processor, doing nothing"
        record = json.loads(finished.files[f"rank.{rank}/failure.json"])
        assert record["rank"] == victim and record["cause"] == "stalled"


def test_a_short_stop_is_no_failure() -> None:
    with start_ranks(2, programs.signalled, env={"ENGINE_STALL_LIMIT": "10"}) as job:
        ready(job)
        for rank in (0, 1, 0):
            stop(job, rank)
            send(job, rank, signal.SIGCONT)
        (job.directory / "stop").touch()
        finished = job.finish()
    assert not finished.files


def test_who_is_kept_waiting_is_not_blamed() -> None:
    finished = run_ranks(3, programs.chain, 3.0, check=False)
    for value in finished.values:
        assert value["type"] == "RankStalledError" and value["rank"] == 2, finished.values


@pytest.mark.slow
def test_a_full_request_ring_is_no_hiding_place() -> None:
    with start_ranks(2, programs.full_ring, LIMIT) as job:
        ready(job)
        stopped = stop(job, 0)
        (job.directory / "stopped").touch()
        until(lambda: (job.home / "value.1").exists(), "rank 1 was told")
        send(job, 0, signal.SIGCONT)
        finished = job.finish(check=False)
    named(finished, others(finished, 0), 0, "RankStalledError", stopped, LIMIT + 1 + WITHIN)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["known", "new"])
def test_the_stall_report_names_tensors_and_missing_ranks(kind: str) -> None:
    finished = run_ranks(
        3, programs.differing_names, kind, env={"ENGINE_STALL_WARNING": "1", "ENGINE_STALL_LIMIT": "3"}, check=False
    )
    log = finished.err

    def warned(rank: int, name: str, missing: str) -> bool:
        """Return whether a rank warned of a name: all ranks have come by then, though one may print late."""
        told = rf"'{name}' \(allreduce\) has waited \d s for {missing}"
        return re.search(told, finished.ranks[rank].stderr) is not None

    if kind == "known":
        assert warned(0, "even", "rank 1") and warned(1, "odd", "ranks 0, 2") and warned(2, "even", "rank 1"), finished
    else:
        for rank, missing in enumerate(("1, 2", "0, 2", "0, 1")):
            assert warned(0, f"new.{rank}", f"ranks {missing}"), finished
            assert f"'new.{rank}' (allreduce) has waited" in finished.ranks[rank].stderr, finished
    for rank, value in enumerate(finished.values):
        assert value["type"] == "RankStalledError", value
        soon(value["at"] - value["begun"], 3 + WITHIN, value)
        assert value["at"] - min(each["begun"] for each in finished.values) > 2, value
        # The report is rank 0's, whichever rank exceeded the limit first.
        assert "which rank" in value["text"] and "They keep each other waiting: do all ranks call" in value["text"], (
            value
        )
        told = "ranks 0, 2 wait for 'even', which rank 1 has not submitted" in value["text"]
        assert told == (kind == "known"), value
        record = json.loads(finished.files[f"rank.{rank}/flight.json"])
        assert [row["type"] for row in record["history"][:3]] == ["define", "batch", "define"]
    assert "flight records of ranks 0-2: " in log, log


@pytest.mark.slow
def test_a_flight_record_on_request_disturbs_nothing() -> None:
    with start_ranks(3, programs.signalled) as job:
        ready(job)
        written = [job.output / f"rank.{rank}" / "flight.json" for rank in range(3)]
        for _ in range(3):
            os.kill(job.process.pid, signal.SIGUSR1)
            until(lambda: all(path.exists() for path in written), "every rank has written its record")
            records = [json.loads(path.read_text()) for path in written]
            for path in written:
                path.unlink()
        os.kill(job.process.pid, signal.SIGUSR1)
        until(lambda: all(path.exists() for path in written), "every rank has written its record")
        (job.directory / "stop").touch()
        finished = job.finish()
    assert len(set(finished.values)) == 1 and finished.values[0] > 5
    for rank, record in enumerate(records):
        assert (record["rank"], record["reason"], record["failure"]) == (rank, "signal", None)
        entries = [row["entry"] for row in record["history"]]
        assert entries == list(range(entries[0], entries[0] + len(entries))) and len(entries) > 5
        assert record["history"][-1]["name"] in ("gradient", "stop")
        assert "SIGUSR1: schedule entries in " in finished.ranks[rank].stderr
    assert f"flight records of ranks 0-2: {job.output}/rank.N/flight.json" in finished.err
