"""Records of an elastic job's worlds: those of the newest are kept, in any directory."""

from __future__ import annotations

from pathlib import Path

from engine.launch.process import leftovers
from engine.trace.flight import KEPT, Recorder, worlds_in

WORLDS = 3 * KEPT


def record(directory: Path, worlds: range) -> None:
    for world in worlds:
        for rank in range(2):
            Recorder(directory, rank, world).write("flight.json", {})


def test_records_of_the_newest_worlds_are_kept(tmp_path: Path) -> None:
    timeline = tmp_path / "world.3" / "rank.0.trace.json"
    timeline.parent.mkdir()
    timeline.touch()
    record(tmp_path, range(1, WORLDS + 1))
    assert timeline.exists() and not (timeline.parent / "rank.0").exists()
    kept = [int(path.name.removeprefix("world.")) for path in worlds_in(tmp_path)]
    assert kept == [3, *range(WORLDS - KEPT + 1, WORLDS + 1)]
    assert all((path / f"rank.{rank}/flight.json").exists() for path in worlds_in(tmp_path)[1:] for rank in range(2))


def test_records_of_an_earlier_job_are_not_taken_for_those_of_the_next(tmp_path: Path) -> None:
    record(tmp_path, range(7, 9))
    leftovers.forget_records(tmp_path)
    assert worlds_in(tmp_path) == []
