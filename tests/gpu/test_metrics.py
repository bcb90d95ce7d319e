"""Counters and times on GPUs, which are stand-ins: samples by events, never by the host's clock."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..waiting import measured
from .jobs import Job, Start
from .metrics_programs import KERNEL, LATE, MANY, STEPS
from .mutants import changed
from .test_plane import EVERY_CALL

PROGRAMS = "metrics_programs"
CLOCK = 0.02  # seconds between two readings of a busy host's clock, at most


def told(job: Job) -> list[dict[str, Any]]:
    """Return what each rank reports at its end."""
    return [said(text) for text in job.succeeds()]


def said(text: str) -> dict[str, Any]:
    """Return the program's line of results, without the engine's warnings."""
    (line,) = (line for line in text.splitlines() if line.startswith("{"))
    found: dict[str, Any] = json.loads(line)
    return found


def check_stages(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        first, last = rank["first"], rank["last"]
        assert first["gpu"] == 1
        assert (first["device_entries"], first["device_enqueued"], first["device_passed"]) == (1, 1, 1)
        assert first["device_bytes"] == first["device_sampled_bytes"] == 4000
        for stage in ("queue", "pack", "nccl", "unpack"):
            assert first["stages"][stage][0] == 1, (stage, first)
        assert first["stages"]["exposed"] == [0, 0]
        assert first["stages"]["pack"][1] >= 0.95e9 * KERNEL
        assert first["stages"]["unpack"][1] >= 0.95e9 * KERNEL
        assert last["device_entries"] == last["device_enqueued"] == last["device_passed"] == 1 + MANY
        assert last["device_bytes"] == 4000 + 40 * MANY
        assert last["stages"]["queue"][0] >= 2, "of so many one is a sample"
    # Rank 0's GPU waits in NCCL for rank 1's computation; rank 1's queue begins only after it.
    assert ranks[0]["first"]["stages"]["nccl"][1] >= 1e9 * (LATE - 5 * KERNEL)
    assert ranks[1]["first"]["stages"]["nccl"][1] < 1e9 * LATE
    for rank in ranks:  # the k-th tensor waits for at least k packs
        assert rank["last"]["stages"]["queue"][1] - rank["first"]["stages"]["queue"][1] >= 0.95e9 * KERNEL


def check_steps(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["bare"][0] == rank["hidden"][0] == STEPS
        assert rank["bare"][1] >= 0.95e9 * KERNEL * (STEPS - 1), rank
        assert 0 <= rank["hidden"][1] < rank["bare"][1] / 2, rank


def test_stages_of_a_collective(start_ranks: Start) -> None:
    check_stages(told(start_ranks(2, "stages")))


@pytest.mark.slow
def test_steps_stand_for_what_is_not_hidden(start_ranks: Start) -> None:
    check_steps(told(start_ranks(2, "steps")))


@pytest.mark.slow
def test_pieces_and_what_has_too_many(start_ranks: Start) -> None:
    """Devices work in random order."""
    for rank in told(start_ranks(2, "pieces", policy="drawn")):
        first, last = rank["first"], rank["last"]
        assert last["device_entries"] == last["device_passed"] == 3 * MANY
        for stage in ("queue", "pack", "nccl", "unpack"):
            assert 1 <= first["stages"][stage][0] <= MANY
            assert first["stages"][stage][0] < last["stages"][stage][0], "no mark is lost with what has too many"
        assert last["device_sampled_bytes"] % 40 == 0, "none of those with too many pieces"


def check_timeline(where: Path, rank: dict[str, Any]) -> None:
    events = json.loads((where / "rank.0.trace.json").read_text())
    row = [event for event in events if event.get("tid") == 8]
    assert [event["args"]["name"] for event in row if event["ph"] == "M"] == ["GPU (sampled entries)"]
    assert "error_us" in next(event for event in row if event["ph"] == "M")["args"]["about"]
    slices = [event for event in row if event["ph"] == "X"]
    assert [event["name"] for event in slices[:3]] == ["pack", "NCCL", "unpack"]
    for event in slices:
        begun, ended, error = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6, event["args"]["error_us"] / 1e6
        assert rank["begun"] - error - CLOCK <= begun <= ended <= rank["ended"] + error + CLOCK
        assert event["args"]["bytes"] == 4000
        if event["name"] != "NCCL":
            assert event["dur"] >= 0.95e6 * KERNEL
    assert all(one["ts"] + one["dur"] <= other["ts"] + 1 for one, other in itertools.pairwise(slices))


def test_timeline_has_slices_where_the_host_saw_the_work(start_ranks: Start, tmp_path: Path) -> None:
    number = itertools.count()

    def measure() -> None:
        """Check once; `measured` repeats it, since the CUDA thread may be too late for samples on a busy machine."""
        where = tmp_path / f"trace.{next(number)}"
        check_timeline(where, told(start_ranks(2, "timeline", str(where)))[0])

    measured(measure)


# ---- mutants ---------------------------------------------------------------------------------------------------------

KILLERS: dict[str, str] = {
    "samples_are_never_read": "stages",
    "samples_are_read_too_early": "stages",
    "held_marks_are_given_out": "pieces",
    "stands_are_read_too_early": "steps",
    "stand_begins_behind_the_wait": "steps",
    "stages_are_not_told_apart": "stages",
    "queue_begins_at_the_work": "stages",
    "clocks_are_not_compared": "timeline",
}


@pytest.mark.skipif(not EVERY_CALL, reason="takes minutes: make gpu-faults")
@pytest.mark.parametrize("mutant", KILLERS)
def test_mutant_is_killed(mutant: str, start_ranks: Start, tmp_path: Path) -> None:
    program, where = KILLERS[mutant], tmp_path / "trace"
    rest = [str(where)] if program == "timeline" else []
    statuses, texts = start_ranks(2, program, *rest, more=changed(mutant, tmp_path / "mutant")).end(90)
    if any(statuses):
        return
    found = [said(text) for text in texts]
    checks: dict[str, Callable[[], None]] = {
        "stages": lambda: check_stages(found),
        "steps": lambda: check_steps(found),
        "timeline": lambda: check_timeline(where, found[0]),
    }
    with pytest.raises(AssertionError):
        checks[program]()
