"""Reading of timelines and flight records, on files with known content."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from engine.trace.__main__ import main
from engine.trace.disagreements import find_disagreement
from engine.trace.postmortem import make_report, missing_ranks
from engine.trace.reading import TraceError, files_of, read
from engine.trace.records import Failure, Flight
from engine.trace.summary import format_summary, length, measure_overlap, merge_intervals, summarize_recordings
from engine.trace.timeline import path_of

NOW = 1_800_000_000.0


def head(rank: int, size: int = 2, **about: Any) -> dict[str, Any]:
    args = {"version": 2, "rank": rank, "size": size, "boot": "here", **about}
    return process(rank, f"rank {rank}", engine_timeline=args)


def process(number: int, name: str, **told: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": number, "name": "process_name", "args": {"name": name, **told}}


def slice_(rank: int, row: int, name: str, begun_ms: float, ended_ms: float, **args: Any) -> dict[str, Any]:
    times = {"ts": begun_ms * 1e3, "dur": (ended_ms - begun_ms) * 1e3}
    return {"ph": "X", "pid": rank, "tid": row, **times, "name": name, "args": args}


def tensor(rank: int, row: int, entry: int, times_ms: list[float], last: int, late_ms: float) -> list[dict[str, Any]]:
    submitted, ready, started, ended = times_ms
    return [
        slice_(rank, row, "negotiate", submitted, ready, entry=entry, last=last, late_us=late_ms * 1e3),
        slice_(rank, row, "queue", ready, started, entry=entry),
        slice_(rank, row, "allreduce", started, ended, entry=entry, bytes=400),
    ]


def a_rank(rank: int) -> list[dict[str, Any]]:
    """Timeline of two entries, 10 to 20 and 30 to 50 ms; a caller waits from 15 to 40 ms; rank 1 is 4 and 6 ms late."""
    names = [
        {"ph": "M", "pid": rank, "tid": 17 + k, "name": "thread_name", "args": {"name": n}} for k, n in enumerate("ab")
    ]
    return [
        head(rank),
        *names,
        slice_(rank, 3, "allreduce", 10, 20, entry=5, tensors=2, bytes=800, algorithm="one-shot"),
        slice_(rank, 4, "fuse", 10, 12, entry=5, busy_us=1000),
        slice_(rank, 5, "reduce", 12, 19, entry=5, busy_us=4000),
        *tensor(rank, 17, 5, [4 if rank == 0 else 8, 8, 10, 20], 1, 4),
        *tensor(rank, 18, 5, [5 if rank == 0 else 9, 9, 10, 20], 1, 4),
        slice_(rank, 3, "allreduce", 30, 50, entry=6, tensors=1, bytes=400, algorithm="two-shot"),
        slice_(rank, 6, "unpack", 45, 50, entry=6, busy_us=4000),
        *tensor(rank, 17, 6, [22 if rank == 0 else 28, 28, 30, 50], 1, 6),
        slice_(rank, 2, "wait", 15, 40),
        slice_(rank, 1, "step", 0, 50),
    ]


def in_a_set(rank: int, number: int, ranks: list[int], late_ms: float = 5) -> list[dict[str, Any]]:
    """Timeline of one entry, 60 to 70 ms, of the tensor `a` in a process set, whose first rank is late by 5 ms."""
    about = {"rank": rank, "id": number, "ranks": ranks}
    pid = 1000 * number + rank
    submitted = 58 if rank == ranks[0] else 58 - late_ms
    return [
        process(pid, "set", engine_process_set=about),
        {"ph": "M", "pid": pid, "tid": 17, "name": "thread_name", "args": {"name": "a"}},
        slice_(pid, 3, "allreduce", 60, 70, entry=5, tensors=1, bytes=400, algorithm="one-shot"),
        *tensor(pid, 17, 5, [submitted, 58, 60, 70], ranks[0], late_ms),
    ]


def write(path: Path, events: list[dict[str, Any]], end: str = "]\n") -> Path:
    path.write_text("[" + "\n,".join(json.dumps(event) for event in events) + "\n" + end)
    return path


def test_the_summary_has_the_known_figures(tmp_path: Path) -> None:
    files = [write(tmp_path / f"rank.{rank}.trace.json", a_rank(rank)) for rank in range(2)]
    figures = summarize_recordings(read([tmp_path], []))
    assert figures == summarize_recordings(read(files, []))
    for row in figures["ranks"]:
        assert not row["exact"]
        assert row["seconds"] == pytest.approx(0.050)
        assert row["communication"] == pytest.approx(0.030)
        assert row["waiting"] == pytest.approx(0.025)
        assert row["overlapped"] == pytest.approx(0.5)  # 15 of 30 ms; a caller waits in the others
        assert (row["steps"], row["entries"], row["tensors"], row["bytes"]) == (1, 2, 3, 1200)
    assert figures["slowest_rank"] == 1
    assert figures["lateness"][0] == {"rank": 0, "last": 0, "of": 3, "mean_late": 0.0, "late": 0}
    # Late from 4 to 9 ms, when a and b were missing, and from 22 to 28 ms.
    assert figures["lateness"][1]["late"] == pytest.approx(0.011)
    assert figures["lateness"][1]["mean_late"] == pytest.approx(0.014 / 3)
    assert figures["stages"] == pytest.approx({"fuse": 1 / 30, "reduce": 4 / 30, "unpack": 4 / 30, "others": 21 / 30})
    a, b = figures["slowest_tensors"]
    assert (a["name"], a["times"], a["mostly_last"], b["name"], b["times"]) == ("a", 2, 1, "b", 1)
    assert a["negotiate"] == pytest.approx((0.004 + 0.006 + 0 + 0) / 4)
    assert a["queue"] == pytest.approx(0.002) and a["execute"] == pytest.approx(0.015)


def test_process_sets_are_told_apart_by_their_numbers(tmp_path: Path) -> None:
    parts = {1: [1, 2], 2: [0, 2]}
    sets = [[event for n, ranks in parts.items() if r in ranks for event in in_a_set(r, n, ranks)] for r in range(3)]
    files = [
        write(tmp_path / f"rank.{r}.trace.json", [head(r, 3), *(a_rank(r)[1:] if r < 2 else []), *sets[r]])
        for r in range(3)
    ]
    figures = summarize_recordings(read(files, []))
    assert [row["tensors"] for row in figures["ranks"]] == [3, 3, 0]
    assert [(each["id"], each["ranks"]) for each in figures["process_sets"]] == list(parts.items())
    for each in figures["process_sets"]:
        first, second = each["members"]
        assert (first["rank"], second["rank"]) == tuple(each["ranks"])
        assert (first["last"], first["of"], second["last"], second["of"]) == (1, 1, 0, 1)
        assert first["others_waited"] == pytest.approx(0.005) and first["tensors"] == 1
    # Rank 1 was last for three tensors of the world, and for one of the set of three ranks; both wait at once.
    assert [(row["last"], row["of"]) for row in figures["lateness"]] == [(1, 4), (4, 4), (0, 5)]
    assert figures["lateness"][1]["late"] == pytest.approx(0.011 + 0.005)
    assert {(row["process_set"], row["name"]) for row in figures["slowest_tensors"]} == {
        *((0, "a"), (0, "b"), (1, "a"), (2, "a"))
    }
    shown = format_summary(figures)
    assert "\namong ranks 1, 2 (set 1)\n" in shown and "\namong ranks 0, 2 (set 2)\n" in shown
    assert "\na (set 2) " in shown and "fusion: 5 tensors in 4 entries" in shown
    assert "slowest rank: 1, last with 4 of 4 tensors" in shown
    out = tmp_path / "out.json"
    assert main(["merge", *map(str, files), "-o", str(out)]) == 0
    assert summarize_recordings(read([out], [])) == figures


def in_a_group(rank: int, count: int, ranks: list[int], *names: str) -> list[dict[str, Any]]:
    """Timeline of one entry in the group that a rank has formed as its `count`th; the names that it had in turn."""
    said, *rest = in_a_set(rank, 10**6 + count, ranks)
    told = said["args"]["engine_process_set"] | {"id": -count}
    return [process(said["pid"], "group", engine_process_set={**told, "group": name}) for name in names] + rest


def test_groups_are_told_apart_by_names_and_ranks_though_ranks_count_them_differently(tmp_path: Path) -> None:
    """Rank 2 has not formed the first groups of the others, and is in two of equal ranks."""
    formed = {
        0: [(1, [0, 1], "tp (1)"), (2, [0, 2], "dp (3)"), (3, [0, 2], "4")],
        1: [(1, [0, 1], "tp (1)")],
        2: [(1, [0, 2], "dp (3)"), (2, [0, 2], "4")],
    }
    files = [
        write(
            tmp_path / f"rank.{rank}.trace.json",
            [head(rank, 3), *(event for count, ranks, name in each for event in in_a_group(rank, count, ranks, name))],
        )
        for rank, each in formed.items()
    ]
    notes: list[str] = []
    figures = summarize_recordings(read(files, notes))
    assert not notes
    assert [(each["group"], each["ranks"]) for each in figures["process_sets"]] == [
        *(("4", [0, 2]), ("dp (3)", [0, 2]), ("tp (1)", [0, 1]))
    ]
    assert all([member["tensors"] for member in each["members"]] == [1, 1] for each in figures["process_sets"])
    shown = format_summary(figures)
    assert "\namong ranks 0, 1 (group 'tp (1)')\n" in shown and "\namong ranks 0, 2 (group '4')\n" in shown
    assert "\na (dp (3)) " in shown
    out = tmp_path / "out.json"
    assert main(["merge", *map(str, files), "-o", str(out)]) == 0
    assert summarize_recordings(read([out], [])) == figures


def test_groups_of_one_name_one_after_another_are_two(tmp_path: Path) -> None:
    groups = [event for count in (1, 2) for event in in_a_group(0, count, [0], "1")]
    found = read([write(tmp_path / "t.json", [head(0), *groups])], [])
    assert [(each.number, each.group, len(each.entries)) for each in found] == [(0, "", 0), (-1, "1", 1), (-2, "1", 1)]


def test_a_group_that_gets_its_name_later_keeps_what_was_recorded(tmp_path: Path) -> None:
    first, second, *rest = in_a_group(0, 1, [0], "1", "tp (1)")
    path = write(tmp_path / "t.json", [head(0), first, *rest, second])
    world, group = read([path], [])
    assert (group.group, len(group.entries), world.group) == ("tp (1)", 1, "")


@pytest.mark.parametrize("wrong", [3, ["1"]])
def test_a_damaged_name_of_a_group_is_left_out_and_said(tmp_path: Path, wrong: Any) -> None:
    first, second, *rest = in_a_group(0, 1, [0], "1", "tp (1)")
    second["args"]["engine_process_set"] = {"group": wrong}
    notes: list[str] = []
    _, group = read([write(tmp_path / "t.json", [head(0), first, second, *rest])], notes)
    assert (group.group, len(group.entries), len(notes)) == ("1", 1, 1)


def test_sets_that_differ_between_files_are_refused(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{rank}.json", [head(rank, 3), *in_a_set(rank, 1, [rank, 2])]) for rank in range(2)]
    with pytest.raises(TraceError, match="rank 1's timeline is of another job: it has other process sets"):
        read(files, [])


def test_many_sets_and_large_ones_are_a_short_table(tmp_path: Path) -> None:
    sets = [event for number in range(1, 21) for event in in_a_set(0, number, [0, *range(2, 200, 2)])]
    shown = format_summary(summarize_recordings(read([write(tmp_path / "t.json", [*a_rank(0), *sets])], [])))
    assert max(map(len, shown.splitlines())) <= 100
    assert shown.count("among ranks 0, 2, 4, 6, 8, 10, 12, .., 198 (set ") == shown.count("among r") == 8
    assert "and 12 process sets in which less was done, with --json" in shown


def test_totals_go_before_what_is_drawn(tmp_path: Path) -> None:
    totals = {"since_ns": 0, "now_ns": int(2e9), "busy_ns": int(8e8), "wait_ns": int(3e8), "exposed_ns": int(2e8)}
    counts = {"entries": 40, "tensors": 80, "bytes": 4000, "steps": 10, "dropped": 2, "left_out": 3}
    event = process(0, "rank 0", engine_totals={**totals, **counts})
    steps = [slice_(0, 1, "step", 50, 53), slice_(0, 1, "step", 53, 58)]
    figures = summarize_recordings(read([write(tmp_path / "t.json", [*a_rank(0), *steps, event])], []))
    row = figures["ranks"][0]
    assert (row["exact"], row["seconds"], row["steps"], row["communication"]) == (True, 2.0, 10, 0.8)
    assert (row["overlapped"], row["waiting"]) == (0.75, 0.3)
    assert (row["entries"], row["tensors"], row["bytes"]) == (40, 80, 4000)
    assert (row["entries_shown"], row["dropped"]) == (2, 5)
    shown = format_summary(figures)
    # The first step began with the recording, and includes the start of the program.
    assert "10 steps of 4.00 ms in the mean" in shown and "75.0 %" in shown and "5 records are missing" in shown
    assert "1 rank, 2.00 s" in shown and "(of a job of 2 ranks)" in shown


def test_what_belongs_to_no_step_is_not_among_the_slowest_tensors_of_steps(tmp_path: Path) -> None:
    name = {"ph": "M", "pid": 0, "tid": 19, "name": "thread_name", "args": {"name": "once"}}
    once = tensor(0, 19, 99, [100, 100, 100, 900], 0, 0)
    often = [each for n in range(20) for each in tensor(0, 17, 100 + n, [1000 + n, 1000 + n, 1000 + n, 1001 + n], 0, 0)]
    figures = summarize_recordings(read([write(tmp_path / "t.json", [*a_rank(0), name, *once, *often])], []))
    assert figures["slowest_tensors"][0]["name"] == "a"


def test_the_table_is_narrow_whatever_the_names(tmp_path: Path) -> None:
    events = a_rank(0)
    events[1]["args"]["name"] = "module." * 40 + "weight"
    events[2]["args"]["name"] = "line\nbreak"
    shown = format_summary(summarize_recordings(read([write(tmp_path / "t.json", events)], [])))
    assert max(map(len, shown.splitlines())) <= 100
    assert "\nline\\nbreak " in shown
    assert "\nmodule.mod....module.module.weight " in shown


def test_what_is_broken_is_left_out_and_said(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", a_rank(0), end=',{"ph":"X","pid":0,"ti')
    notes: list[str] = []
    recording = read([path], notes)[0]
    assert len(recording.tensors) == 3
    assert len(notes) == 1 and str(path) in notes[0] and "1 broken line left out" in notes[0]


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ([head(0)], [head(0)], "rank 0 is in another"),
        ([head(0)], [head(1, boot="there")], "another host"),
        ([head(0)], [head(1, size=3)], "another job"),
        ([head(0)], [head(1, version=99)], "version 99"),
        ([head(0)], [{"ph": "M", "pid": 1, "name": "engine_timeline", "args": {"version": 1}}], "of version 1; "),
        ([head(0)], [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "other"}}], "no timeline of this"),
        ([head(0)], [slice_(1, 3, "other", 0, 1)], "no timeline of this engine"),
        ([head(0)], [], "no timeline of this engine"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(
    tmp_path: Path, first: list[Any], second: list[Any], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [write(tmp_path / "a.json", first), write(tmp_path / "b.json", second)]
    with pytest.raises(TraceError, match=why):
        read(files, [])
    for command in (["summary"], ["merge", "-o", str(tmp_path / "out.json")]):
        assert main([*command, *map(str, files)]) == 2
        assert why in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_a_missing_file_and_an_empty_directory_are_said(tmp_path: Path) -> None:
    assert main(["summary", str(tmp_path / "none.json")]) == 2
    with pytest.raises(TraceError, match=r"no rank.N.trace.json and no NAME.rankN.json in it"):
        files_of([tmp_path])


@pytest.mark.parametrize("form", ["rank.{}.trace.json", "t.rank{}.json", "a.b.rank{}.json"])
def test_a_directory_stands_for_the_timelines_of_one_job(tmp_path: Path, form: str) -> None:
    files = [write(tmp_path / form.format(rank), a_rank(rank)) for rank in range(2)]
    for other in ("merged.json", "t.rankx.json", "t.rank0.json.old"):
        (tmp_path / other).touch()
    assert files_of([tmp_path]) == files
    assert summarize_recordings(read([tmp_path], [])) == summarize_recordings(read(files, []))
    write(tmp_path / "u.rank0.json", a_rank(0))
    names = ", ".join(sorted((form.format("*"), "u.rank*.json")))
    with pytest.raises(TraceError, match=re.escape(f"timelines of several names ({names}): give one, as {tmp_path}/")):
        files_of([tmp_path])


def test_a_merged_file_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(write(tmp_path / f"t.rank{rank}.json", a_rank(rank), end="")) for rank in range(2)]
    out = tmp_path / "out.json"
    assert main(["merge", *files, "-o", str(out)]) == 0
    assert json.loads(out.read_text()) == [*a_rank(0), *a_rank(1)]
    assert summarize_recordings(read([out], [])) == summarize_recordings(read(files, []))
    capsys.readouterr()
    assert main(["summary", "--json", str(out)]) == 0
    assert json.loads(capsys.readouterr().out)["slowest_rank"] == 1


def test_intervals() -> None:
    assert merge_intervals([(3, 4), (0, 1), (0.5, 2), (2, 2.5)]) == [(0, 2.5), (3, 4)]
    assert length(merge_intervals([(0, 2), (1, 3)])) == 3
    assert measure_overlap([(0, 2), (3, 5)], [(1, 4), (4.5, 9)]) == 2.5
    assert measure_overlap([], [(0, 1)]) == 0


@pytest.mark.parametrize("path", ["", " ", 5, None, b"t.json", "a\0.json"])
def test_what_is_no_path(path: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="a timeline "):
        path_of(path, 0)


def test_where_files_go(tmp_path: Path) -> None:
    assert path_of(tmp_path / "t.json", 3) == tmp_path / "t.rank3.json"
    assert path_of(tmp_path / "traces", 3) == tmp_path / "traces" / "rank.3.trace.json"
    (tmp_path / "d.json").mkdir()
    assert path_of(tmp_path / "d.json", 0) == tmp_path / "d.json" / "rank.0.trace.json"


# ---- flight records -------------------------------------------------------------------------------------------------


def row(entry: int, name: str, ended: float | None = 10.0, **more: Any) -> dict[str, Any]:
    about = {"type": "batch", "kind": "allreduce", "tensors": 1, "started": 9.0}
    return {"entry": entry, "name": name, "ended": ended, **about, **more}


def record(rank: int, size: int = 4, **more: Any) -> dict[str, Any]:
    about = {"reason": "stall", "time": NOW, "monotonic": 12.5, "pending": [], "history": [row(380, "layer.2")]}
    return {"rank": rank, "size": size, **about, **more}


def place(rank: int, entry: int | None, passed: int) -> dict[str, Any]:
    return {"rank": rank, "entry": entry, "packed": passed, "reduced": passed, "copied": passed, "left": False}


def pending(name: str, seconds: float, missing: list[int] | None) -> dict[str, Any]:
    return {"name": name, "kind": "allreduce", "seconds": seconds, "missing": missing}


def keep(directory: Path, rank: int, name: str, content: Any) -> Path:
    home = directory / f"rank.{rank}"
    home.mkdir(exist_ok=True)
    path = home / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_rank_without_a_record_is_found_in_the_others(tmp_path: Path) -> None:
    history = [row(380, "layer.2"), row(381, "layer.3.weight", None)]
    ranks = [place(0, 381, 40), place(1, 381, 40), place(2, 381, 39), place(3, 381, 40)]
    for rank in (0, 1, 3):
        keep(tmp_path, rank, "flight.json", record(rank, history=history, ranks=ranks))
    shown, data = make_report(tmp_path)
    assert data["verdict"] == "rank 2 stopped in entry 381 'layer.3.weight' (allreduce); ranks 0, 1, 3 wait for it"
    assert data["without_record"] == [2]
    lines = shown.splitlines()
    assert lines[2] == "rank 2: no flight record"
    assert lines[0].endswith(
        "finished entry 380 'layer.2' (allreduce); in entry 381 'layer.3.weight' (allreduce) for 3.5 s"
    )
    assert lines[-1] == f"verdict: {data['verdict']}"


def test_records_of_hosts_whose_clocks_differ_come_in_their_order(tmp_path: Path) -> None:
    """The first failure is found by the clock that the records share, not by those of their hosts."""
    for rank, at, ahead in ((0, 100.3, 0.0), (1, 100.1, 3600.0), (2, 100.2, -3600.0)):
        told = {"time": NOW + at + ahead, "common": at}
        blamed = {"rank": 2 if rank == 1 else 0, "cause": "died", "message": f"what {rank} says", **told}
        keep(tmp_path, rank, "failure.json", blamed)
        keep(tmp_path, rank, "flight.json", record(rank, 3, **told))
    shown, data = make_report(tmp_path)
    assert [failure["reporter"] for failure in data["failures"]] == [1, 2, 0]
    assert shown.startswith("first cause: what 1 says") and "it may speak of another failure" not in shown
    times = [data["ranks"][rank]["time"] for rank in (1, 2, 0)]
    assert [round(time - times[0], 3) for time in times] == [0.0, 0.1, 0.2]


def test_a_rank_that_is_just_behind_is_not_called_stopped(tmp_path: Path) -> None:
    ranks = [place(0, 381, 40), place(1, None, 41)]
    keep(tmp_path, 0, "flight.json", record(0, 2, monotonic=9.1, history=[row(381, "x", None)], ranks=ranks))
    assert make_report(tmp_path)[1]["verdict"] == "rank 0 is the last in entry 381 'x' (allreduce); rank 1 waits for it"


def test_who_has_not_brought_a_tensor(tmp_path: Path) -> None:
    keep(tmp_path, 0, "flight.json", record(0, 3, pending=[pending("known", 5, [1, 2]), pending("later", 1, [2])]))
    keep(tmp_path, 1, "flight.json", record(1, 3, pending=[pending("own", 4, [0, 2])]))
    shown, data = make_report(tmp_path)
    assert data["verdict"] == "ranks 1, 2 have not submitted 'known'; rank 0 waits for it"
    assert "waits for 'later' (allreduce) for 1.0 s: rank 2 has not submitted it" in shown


def test_a_new_name_is_missing_where_no_record_has_it(tmp_path: Path) -> None:
    for rank in range(3):
        waiting = [pending("new", 5, None)] if rank != 1 else []
        keep(tmp_path, rank, "flight.json", record(rank, 3, pending=waiting))
    assert make_report(tmp_path)[1]["verdict"] == "rank 1 has not submitted 'new'; ranks 0, 2 wait for it"


def flight(rank: int, rows: list[dict[str, Any]], unfinished: list[dict[str, Any]]) -> Flight:
    return Flight(rank, 2, 1.0, "abort", 1.0, rows, [], [], unfinished)


def test_who_has_not_brought_one_of_many_tensors_is_found() -> None:
    rows = [pending(f"layer.{number}", 1.0, None) for number in range(100)]
    flights = {rank: flight(rank, rows[rank == 7 :], []) for rank in range(50)}
    missing = missing_ranks(flights, range(50))
    assert {name: ranks for name, ranks in missing.items() if ranks} == {"layer.0": [7]}


@pytest.mark.parametrize(
    ("name", "kept"),
    [("layer.10", "layer.10"), ("x" * 300, "x" * 191), ("x" * 190 + "\u00e9" * 9, "x" * 190 + "\ufffd")],
)
def test_the_operation_that_a_failure_names_is_the_one_on_which_ranks_disagree(name: str, kept: str) -> None:
    """Another one may have failed later, and been caught, whose name is a part of it."""
    blamed = Failure(0, 1, "raised", f"rank 1 failed: MismatchError: ranks disagree on '{name}': no", 1.0)
    about = {"failed_call": False, "kind": "allreduce", "dtype": "float32", "dims": [1], "bytes": 4}
    others = ("layer.1", "x" * 150)
    for other in others:
        rows = [
            [
                {**about, "name": other, "entry": 9, "described": "a"},
                {**about, "name": kept, "entry": 5, "described": who},
            ]
            for who in "ab"
        ]
        found = find_disagreement({rank: flight(rank, [], rows[rank]) for rank in range(2)}, blamed)
        assert found is not None and found.entry == 5


def test_the_first_cause_comes_first(tmp_path: Path) -> None:
    for rank, delay in ((0, 0.5), (1, 0.1), (3, 0.2)):
        blamed = 2 if rank != 3 else 1
        content = {"rank": blamed, "cause": "died", "message": f"rank {blamed} died: SIGKILL", "time": NOW + delay}
        keep(tmp_path, rank, "failure.json", content)
        keep(tmp_path, rank, "flight.json", record(rank, reason="abort"))
    shown, data = make_report(tmp_path)
    assert shown.startswith("first cause: rank 2 died: SIGKILL\n  told by ranks 0, 1, first at ")
    assert "  rank 3 says: rank 1 died: SIGKILL" in shown
    assert data["verdict"] == "rank 2 died: SIGKILL"


def part(members: list[int], **more: Any) -> dict[str, Any]:
    return {"id": 1, "members": members, "pending": [], "history": [], "ranks": [], **more}


def test_a_rank_that_waits_in_a_set_is_not_the_cause(tmp_path: Path) -> None:
    world = [pending("barrier", 5, [1, 2])]
    waiting = part([1, 2], history=[row(7, "part")], pending=[pending("known", 6, [2])])
    keep(tmp_path, 0, "flight.json", record(0, 3, pending=world))
    keep(tmp_path, 1, "flight.json", record(1, 3, process_sets=[part([0, 1]), waiting]))
    keep(tmp_path, 2, "flight.json", record(2, 3, process_sets=[part([1, 2])]))
    shown, data = make_report(tmp_path)
    assert data["verdict"] == "rank 2 has not submitted 'known' among ranks 1, 2; rank 1 waits for it"
    assert data["ranks"][1]["process_sets"][1]["pending"][0]["missing"] == [2]
    assert "\n  among ranks 1, 2: finished entry 7 'part' (allreduce) 2.5 s before\n" in shown
    assert "\n    waits for 'known' (allreduce) for 6.0 s: rank 2 has not submitted it\n" in shown
    assert "among ranks 0, 1" not in shown


def test_a_rank_that_waits_in_the_world_is_not_the_cause_of_a_wait_in_a_set(tmp_path: Path) -> None:
    keep(tmp_path, 0, "flight.json", record(0, 3, pending=[pending("barrier", 5, [2])]))
    keep(tmp_path, 1, "flight.json", record(1, 3, process_sets=[part([0, 1], pending=[pending("x", 6, [0])])]))
    shown, data = make_report(tmp_path)
    assert data["verdict"] == "rank 2 has not submitted 'barrier'; ranks 0, 1 wait for it"
    assert "waits for 'x' (allreduce) for 6.0 s: rank 0 has not submitted it" in shown


def test_a_standstill_within_an_entry_of_a_set(tmp_path: Path) -> None:
    ranks = [place(1, 381, 40), place(2, 381, 39)]
    entered = part([1, 2], history=[row(381, "x", None)], ranks=ranks)
    keep(tmp_path, 1, "flight.json", record(1, 3, process_sets=[entered]))
    assert make_report(tmp_path)[1]["verdict"] == (
        "rank 2 stopped in entry 381 'x' (allreduce) among ranks 1, 2; rank 1 waits for it"
    )


def test_groups_of_equal_ranks_are_told_apart_by_their_names(tmp_path: Path) -> None:
    named = [part([0, 1], group=name, id=-number) for number, name in enumerate(("tp (1)", "2"), 1)]
    waiting = part([0, 1], group="tp (1)", pending=[pending("x", 6, None)])
    keep(tmp_path, 0, "flight.json", record(0, 2, process_sets=[waiting, named[1]]))
    keep(tmp_path, 1, "flight.json", record(1, 2, process_sets=named))
    shown, data = make_report(tmp_path)
    assert data["verdict"] == ("rank 1 has not submitted 'x' in the group 'tp (1)' of ranks 0, 1; rank 0 waits for it")
    assert [each["group"] for each in data["ranks"][0]["process_sets"]] == ["tp (1)", "2"]
    assert "\n  in the group 'tp (1)' of ranks 0, 1: finished nothing\n" in shown


def test_who_is_blamed_goes_before_who_is_waited_for(tmp_path: Path) -> None:
    keep(tmp_path, 0, "flight.json", record(0, 3, pending=[pending("barrier", 5, [2])]))
    keep(tmp_path, 1, "flight.json", record(1, 3, process_sets=[part([0, 1], pending=[pending("x", 6, [0])])]))
    keep(tmp_path, 1, "failure.json", {"rank": 0, "cause": "stalled", "message": "rank 0 stalled", "time": NOW})
    assert make_report(tmp_path)[1]["verdict"] == "rank 0 has not submitted 'x' among ranks 0, 1; rank 1 waits for it"


def test_nothing_is_wrong(tmp_path: Path) -> None:
    for rank in range(4):
        keep(tmp_path, rank, "flight.json", record(rank, reason="signal"))
    assert (
        make_report(tmp_path)[1]["verdict"] == "no rank stands still: nothing waits for another rank in these records"
    )


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "broken"),
        (json.dumps(record(1))[:20], "broken"),
        ("\x00\xff", "broken"),
        ([1, 2], "not written by this engine"),
        ({"rank": 1}, "no flight record of this engine"),
        ({**record(1), "history": [{"entry": 1}, 5]}, "2 rows left out, damaged; the first: an object is expected in"),
        ({**record(1), "size": 1 << 40}, "no flight record of this engine, or of another version of it ('size' is"),
        ({**record(1), "time": 1e300}, "broken: the number 1e+300 is beyond 1e+18"),
        ("[" * 100_000, "broken: is nested too deeply"),
        ({**record(1), "history": None}, "no flight record of this engine"),
        ({**record(3)}, "it is rank 3's"),
        ({**record(1, 8)}, "a world of 8 ranks, not 4"),
        ({**record(1), "time": NOW - 300}, "301 s older than rank 0's"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_the_rest_is_read(tmp_path: Path, content: Any, why: str) -> None:
    path = keep(tmp_path, 1, "flight.json", content)
    keep(tmp_path, 0, "flight.json", record(0, time=NOW + 1, pending=[pending("known", 5, [2])]))
    keep(tmp_path, 0, "failure.json", "{")
    (tmp_path / "rank.x").mkdir()
    shown, data = make_report(tmp_path)
    assert [note for note in data["notes"] if note.startswith(str(path)) and why in note], data["notes"]
    assert f"note: {tmp_path / 'rank.0' / 'failure.json'}: broken: " in shown
    assert data["verdict"] == "rank 2 has not submitted 'known'; ranks 0, 1, 3 wait for it"


def test_a_record_that_is_cut_short_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    whole = json.dumps(record(0, 2, history=[row(380, "layer.2"), row(381, "layer.3"), row(382, "layer.4")]))
    path = keep(tmp_path, 0, "flight.json", whole[: whole.index("layer.4")])
    shown, data = make_report(tmp_path)
    assert "rank 0 (stall, " in shown and "finished entry 381 'layer.3' (allreduce)" in shown
    assert f"note: {path}: broken: no JSON: Unterminated string" in shown
    assert f"note: {path}: 1 row left out, damaged; the first: 'type' is missing" in shown
    assert data["size"] == 2


def test_absurd_numbers_of_ranks_are_not_believed(tmp_path: Path) -> None:
    keep(tmp_path, 0, "flight.json", record(0, 2))
    keep(tmp_path, 0, "failure.json", {"rank": 10**12, "cause": "died", "message": "m", "time": NOW})
    for name in ("rank.99999999999", "rank.-1", "rank.\u0663"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "flight.json").write_text(json.dumps(record(1, 2)))
    shown, data = make_report(tmp_path)
    assert data["size"] == 2 and len(shown.splitlines()) < 10


def test_a_record_does_not_control_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blamed = {"rank": 0, "cause": "died", "message": "\x1b]0;x\x07\ud800", "time": NOW}
    keep(tmp_path, 0, "failure.json", blamed)
    assert main(["flight", str(tmp_path)]) == 0
    assert "first cause: ?]0;x??" in capsys.readouterr().out


def test_a_timeline_with_absurd_sizes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for size in (10**18, 0, -1, "2", None):
        path = write(tmp_path / "t.json", [head(0, size=size)])
        assert main(["summary", str(path)]) == 2
        assert "a damaged timeline, which does not tell its rank and the number of ranks" in capsys.readouterr().err
    path.unlink()
    path.mkdir()
    (path / "t.rank0.json").mkdir()
    assert main(["summary", str(path)]) == 2
    assert "t.rank0.json: is a directory, and no regular file" in capsys.readouterr().err


def test_a_timeline_that_another_program_has_laid_out_anew_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for indent in (1, None):
        path.write_text(json.dumps(a_rank(0), indent=indent))
        notes: list[str] = []
        assert len(read([path], notes)[0].tensors) == 3 and notes == []


def test_a_record_of_before_ranks_were_in_it_is_read(tmp_path: Path) -> None:
    old = record(0, 2, history=[row(7, "x", None)])
    del old["monotonic"]
    keep(tmp_path, 0, "flight.json", old)
    assert make_report(tmp_path)[1]["verdict"] == "all ranks are in entry 7 'x' (allreduce); none is behind the others"


def test_a_directory_without_records_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flight", str(tmp_path)]) == 2
    assert "no rank.N/flight.json or rank.N/failure.json" in capsys.readouterr().err
    keep(tmp_path, 0, "flight.json", record(0))
    assert main(["flight", "--json", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["without_record"] == [1, 2, 3]


def of_worlds(directory: Path, **about: Any) -> Path:
    """Write two worlds: workers 0 and 1, then 100 ms later workers 1 and 2 as ranks 0 and 1. Tensors' rows differ."""
    for number, workers in ((1, (0, 1)), (2, (1, 2))):
        (directory / f"world.{number}").mkdir()
        reason = "the job begins" if number == 1 else "rank 0 was killed by SIGKILL"
        for rank, worker in enumerate(workers):
            told = {"world": number, "worker": worker, "reason": reason, **about}
            events = [head(rank, **told), *a_rank(rank)[1:], *in_a_set(rank, 3, [0, 1])]
            for event in events if number == 2 else ():
                event["tid"] = {17: 18, 18: 17}.get(event.get("tid", 0), event.get("tid", 0))
                event["ts"] = event.get("ts", 0) + 100_000
            write(directory / f"world.{number}" / f"rank.{rank}.trace.json", events)
    (directory / "world.3").mkdir()  # has no timeline
    return directory


def test_worlds_are_merged_with_a_track_for_each_worker_and_the_resets_between(tmp_path: Path) -> None:
    target = tmp_path / "all.json"
    assert main(["merge", str(of_worlds(tmp_path)), "-o", str(target)]) == 0
    events = json.loads(target.read_text())
    tracks = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    workers = {0: "worker 0", 1: "worker 1", 2: "worker 2"}
    assert {number: name for number, name in tracks.items() if number < 1000} == workers
    job = next(number for number, name in tracks.items() if name == "the job")
    drawn = [event for event in events if event["pid"] == job and event["ph"] == "X"]
    assert [(each["name"], each["ts"], each["dur"]) for each in drawn] == [
        ("world 1: 2 ranks", 0, 70_000),
        ("world 2: 2 ranks", 100_000, 70_000),
        ("reset: rank 0 was killed by SIGKILL", 70_000, 30_000),
    ]
    # A tensor has one row in both worlds, and no event of the files is lost.
    rows = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    tensors = [event for event in events if event["ph"] == "X" and event["name"] == "negotiate"]
    assert {rows[event["pid"], event["tid"]] for event in tensors} == {"a", "b"}
    assert len({event["tid"] for event in tensors if event["pid"] == 1}) == 2
    assert len([event for event in events if event["ph"] == "X" and event["name"] == "step"]) == 4


@pytest.mark.parametrize(
    ("about", "text"),
    [({"boot": "another"}, "another host, or another start of it"), ({"worker": "?"}, "no timeline of an elastic job")],
)
def test_worlds_that_cannot_be_merged_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], about: dict[str, Any], text: str
) -> None:
    of_worlds(tmp_path)
    write(tmp_path / "world.2" / "rank.1.trace.json", [head(1, **{"world": 2, "worker": 2} | about), *a_rank(1)[1:]])
    assert main(["merge", str(tmp_path), "-o", str(tmp_path / "all.json")]) == 2
    assert text in capsys.readouterr().err


def test_worlds_are_merged_by_the_clock_of_a_host_that_was_in_both(tmp_path: Path) -> None:
    """World 1 uses the clock of host a, 5 ms ahead of host b's, which world 2 uses."""
    of_worlds(tmp_path)
    clocks = {(1, 0): ("a", 0), (1, 1): ("b", 5_000_000), (2, 0): ("b", 0), (2, 1): ("c", -7_000_000)}
    for (number, rank), (boot, ahead) in clocks.items():
        told = {"world": number, "worker": number + rank - 1, "boot": f"world {number}", "own_boot": boot}
        told |= {"ahead_ns": ahead, "ahead_error_ns": 1000}
        write(tmp_path / f"world.{number}" / f"rank.{rank}.trace.json", [head(rank, **told), *a_rank(rank)[1:]])
    target = tmp_path / "all.json"
    assert main(["merge", str(tmp_path), "-o", str(target)]) == 0
    drawn = [event for event in json.loads(target.read_text()) if event["ph"] == "X" and "world 2" in event["name"]]
    assert [(each["ts"], each["dur"]) for each in drawn] == [(5_000, 50_000)]


def test_worlds_on_several_hosts_have_clocks_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_worlds(tmp_path)
    for rank, worker in enumerate((1, 2)):
        told = {"world": 2, "worker": worker, "boot": "world 2"}
        write(tmp_path / "world.2" / f"rank.{rank}.trace.json", [head(rank, **told), *a_rank(rank)[1:]])
    assert main(["merge", str(tmp_path), "-o", str(tmp_path / "all.json")]) == 2
    assert "merge one, as DIR/world.K" in capsys.readouterr().err
    assert main(["merge", str(tmp_path / "world.2"), "-o", str(tmp_path / "one.json")]) == 0
