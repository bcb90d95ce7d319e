"""Names of torch's groups in errors, timelines and flight records."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.metrics.page import GROUPS
from engine.trace.postmortem import make_report
from engine.trace.reading import read
from engine.trace.summary import format_summary, summarize_recordings

from .jobs import run_job

pytest.importorskip("torch")

from engine.c10d.membership import format_name

PROGRAMS = "tests.c10d.named_programs"


@pytest.mark.parametrize(
    ("name", "description", "text"),
    [
        ("3", "tp", "tp (3)"),
        ("3", "undefined", "3"),
        ("3", "", "3"),
        ("c2e1b5b1a7e9d1d2f2c8b7a6958473625140f1e2", "tp", "tp (c2e1b5b1)"),
        ("3", "two\nlines", "two?lines (3)"),
    ],
)
def test_description_and_name_are_shown_together(name: str, description: str, text: str) -> None:
    assert format_name(name, description) == text


def test_errors_and_timelines_name_the_group(tmp_path: Path) -> None:
    directory = tmp_path / "timelines"
    names = ["errors_in_groups", "sums_in_groups"]
    ended = run_job(tmp_path, PROGRAMS, names, 3, env={"ENGINE_TIMELINE": str(directory)})
    assert ended.codes == [0] * 3, "\n".join(ended.outputs)
    for shown, mismatch, gone in ended.returned["errors_in_groups"][:2]:
        assert shown == "<EngineProcessGroup 'tp (1)' of ranks [0, 1]>"
        assert "ranks disagree on 'allreduce.noname.0' in the group 'tp (1)' of ranks 0, 1: rank 0 sent" in mismatch
        assert gone.endswith("NotInitializedError: the group 'tp (1)' of ranks 0, 1 was destroyed")
    notes: list[str] = []
    found = read([directory], notes)
    assert not notes
    _, (first, whole, last), _ = ended.returned["sums_in_groups"]
    members = {f"tp ({first})": (0, 1), f"dp ({whole})": (0, 1, 2), last: (1, 2), "tp (1)": (0, 1)}
    for name, ranks in members.items():
        recordings = [each for each in found if each.group == name]
        assert [(each.rank, each.ranks) for each in recordings] == [(rank, ranks) for rank in ranks]
        assert len({each.number for each in recordings}) == 1
        tensors = 0 if name == "tp (1)" else 3  # its ranks have disagreed
        assert [each.totals and each.totals["tensors"] for each in recordings] == [tensors] * len(ranks)
    assert f"\namong ranks 0-2 (group 'dp ({whole})')\n" in format_summary(summarize_recordings(found))


def test_groups_are_counted_by_their_names(tmp_path: Path) -> None:
    """A place is free again when its group is gone; groups beyond all places are not counted one by one."""
    ended = run_job(tmp_path, PROGRAMS, ["counts_of_groups"], 3, env={"ENGINE_METRICS": "1"})
    assert ended.codes == [0] * 3, "\n".join(ended.outputs)
    for rank, (both, left, many) in enumerate(ended.returned["counts_of_groups"]):
        member = rank < 2
        assert sorted(both) == ["dp (2)", *["process set 1", "tp (1)"] * member]
        assert (both["dp (2)"].ranks, both["dp (2)"].collectives, both["dp (2)"].nbytes) == (3, 2, 800)
        if member:
            assert (both["tp (1)"].ranks, both["tp (1)"].collectives, both["tp (1)"].nbytes) == (2, 1, 400)
            assert (both["process set 1"].ranks, both["process set 1"].nbytes) == (2, 40)
        assert all(each.pending == 0 and each.nanoseconds > 0 for each in both.values())
        assert sorted(left) == ["dp (2)", *["process set 1"] * member]
        assert len(many) == GROUPS
        assert many["3"].nbytes == 12 and many["dp (2)"].nbytes == 800


def test_failures_and_flight_records_name_the_group(tmp_path: Path) -> None:
    records = tmp_path / "records"
    env = {"ENGINE_OUTPUT_DIR": str(records), "ENGINE_STALL_WARNING": "0.5"}
    ended = run_job(tmp_path, PROGRAMS, ["stall_in_a_group"], 2, env=env)
    where = "in the group 'tp (1)' of ranks 0, 1"
    first, second = ended.returned["stall_in_a_group"]
    assert f"rank 1 stalled: {where}: rank 0 waits for 'allreduce.noname.0', which rank 1 has not submitted" in first
    assert f"{where}: " in second
    warning = f"'allreduce.noname.0' (allreduce) has waited 0 s for rank 1; submitted by rank 0 {where}"
    assert warning.replace("0 s", "1 s") in ended.outputs[0].replace("0 s", "1 s")
    shown, data = make_report(records)
    assert where in data["verdict"]  # by the record, or by the failure if the operation was over when it was written
    assert "in the group '2' of ranks 0, 1: finished entry" in shown
