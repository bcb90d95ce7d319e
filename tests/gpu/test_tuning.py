"""The tuner with gradients on GPUs, which are stand-ins."""

from __future__ import annotations

from pathlib import Path

from autotune import journal

from .jobs import Job


def test_search_turns_knobs_of_the_gpu_alone_and_ends(libraries: Path, registered: Path, tmp_path: Path) -> None:
    """The search begins once it is known where the bytes are, and its space has no knobs of host memory."""
    log = tmp_path / "log.jsonl"
    told = ("searches", str(registered), str(log))
    Job(libraries, tmp_path, 2, *told, module="tuning_programs", one_thread=1).succeeds()
    rows = journal.read(log)
    assert rows[0]["space"].keys() == {"fusion_threshold", "cycle_time_ms"}
    asked = [row["knobs"] for row in rows if row["row"] == "ask"]
    assert len(asked) > 1 and all(knobs.keys() == rows[0]["space"].keys() for knobs in asked)
    assert any(row.get("final") for row in rows if row["row"] == "decide")
