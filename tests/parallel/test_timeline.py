"""The timeline is complete however a job ends, bounded in size, and correct."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.trace.merging import merge
from engine.trace.reading import Recording, Tensor, read
from engine.trace.summary import format_summary, summarize_recordings
from engine.trace.timeline import BURST, PAGE, Timeline

from ..ranks import Finished, Job, run_ranks, start_ranks
from ..waiting import measured
from . import timeline_program

TENSORS = {*timeline_program.NAMES, "broadcast"}


def complete(path: Path) -> list[dict[str, Any]]:
    """Events of a file that was closed."""
    events = json.loads(path.read_text())
    assert isinstance(events, list) and events
    return events


def recordings(job: Job, pattern: str) -> list[Recording]:
    notes: list[str] = []
    found = read(sorted(job.directory.glob(pattern)), notes)
    assert not notes
    return found


def stepped(size: int, slow: int) -> tuple[Finished, list[Recording], list[list[dict[str, Any]]]]:
    """Job of steps in which one rank is slow; its timelines, and their events."""
    options = ["--timeline", "t.json", "--timeline-mark-cycles"]
    with start_ranks(size, timeline_program.steps, slow, 0.2 if size == 3 else 0.1, options=options) as job:
        finished = job.finish()
        files = [complete(job.directory / f"t.rank{rank}.json") for rank in range(size)]
        return finished, recordings(job, "t.rank*.json"), files


@pytest.mark.sample(1)
@pytest.mark.parametrize(("size", "slow"), [(1, 0), (2, 1), (4, 0), (3, 2)])
def test_every_tensor_is_shown_in_order_with_who_was_last(size: int, slow: int) -> None:
    finished, found, files = stepped(size, slow)
    assert [recording.rank for recording in found] == list(range(size))
    by_rank: list[dict[tuple[int, str], Tensor]] = [recording.tensors for recording in found]
    for rank, tensors in enumerate(by_rank):
        names = [name for _, name in tensors]
        assert {name: names.count(name) for name in TENSORS} == dict.fromkeys(TENSORS, timeline_program.STEPS)
        assert len(tensors) == len(names) == len(TENSORS) * timeline_program.STEPS
        for tensor in tensors.values():
            assert tensor.submitted <= tensor.ready <= tensor.started <= tensor.ended, (rank, tensor)
        knobs, totals = found[rank].knobs, found[rank].totals
        assert (knobs["fusion_threshold"], knobs["cycle_time_ms"], knobs["chunk_bytes"]) == (64 << 20, 5.0, 512 << 10)
        assert totals is not None
        assert (totals["steps"], totals["dropped"], totals["left_out"]) == (timeline_program.STEPS, 0, 0)
        assert totals["tensors"] == finished.values[rank]["tensors"] == len(tensors)
        assert totals["entries"] == finished.values[rank]["entries"] - len(TENSORS)  # those that define a name
        cycles = [event for event in files[rank] if event["name"] == "cycle"]
        assert len(cycles) == len(found[rank].entries) == totals["entries"]
        for entry in found[rank].entries.values():
            assert sum(entry.stages.values()) <= entry.ended - entry.started
            assert size == 1 or entry.stages, entry
    for key, tensor in by_rank[0].items():
        same = [tensors[key] for tensors in by_rank]
        submitted = [each.submitted for each in same]
        # The files hold each rank's time of submission, which proves the coordinator's claim of who was last.
        assert {(each.last, each.late, each.ready) for each in same} == {(tensor.last, tensor.late, tensor.ready)}
        assert tensor.last is not None
        assert submitted[tensor.last] == max(submitted)
        assert abs(tensor.late - (max(submitted) - min(submitted))) < 2e-6
    told = [found]

    def measure() -> None:
        """Check once; `measured` repeats it, since a busy machine may make another rank late, too."""
        each = told.pop() if told else stepped(size, slow)[1]
        figures = summarize_recordings(each)
        assert figures["slowest_rank"] == slow
        if size == 3:
            late = [tensor for tensor in each[0].tensors.values() if tensor.late > 0.1]
            assert len(late) >= timeline_program.STEPS // 2 and {tensor.last for tensor in late} == {slow}
            assert figures["lateness"][slow]["late"] > 0.15 * (timeline_program.STEPS // 2)

    if size > 1:
        measured(measure)


def test_entries_say_what_they_were_compressed_to() -> None:
    with start_ranks(2, timeline_program.compressed, options=["--timeline", "t.json"]) as job:
        job.finish()
        files = [complete(job.directory / f"t.rank{rank}.json") for rank in range(2)]
    for events in files:
        entries = [event["args"] for event in events if event["name"] == "allreduce" and "algorithm" in event["args"]]
        assert [(each.get("compression"), each["dtype"], each["bytes"]) for each in entries] == [
            (None, "float32", 400),
            ("bf16", "float32", 200),
            ("fp16", "float32", 200),
        ]


def test_overlap_is_what_the_program_did() -> None:
    def measure() -> None:
        with start_ranks(2, timeline_program.overlapping, 0.06) as job:
            job.finish()
            apart, together = (recordings(job, f"{name}.rank*.json") for name in "ab")
        for row in summarize_recordings(apart)["ranks"]:
            assert row["exact"] and row["overlapped"] > 0.6 and row["waiting"] < 0.5 * row["seconds"], row
        for row in summarize_recordings(together)["ranks"]:
            assert row["overlapped"] < 0.3 and row["waiting"] > 0.5 * row["communication"], row

    measured(measure)


def test_start_and_stop_while_running() -> None:
    with start_ranks(2, timeline_program.twice) as job:
        job.finish()
        for name in ("one", "two"):
            for recording in recordings(job, f"{name}.rank*.json"):
                names = [tensor for _, tensor in recording.tensors]
                assert {tensor: names.count(tensor) for tensor in TENSORS} == dict.fromkeys(TENSORS, 2)
                assert all(tensor.last is not None for tensor in recording.tensors.values())
                assert recording.totals is not None and recording.totals["steps"] == 2
        cycles = ['"name":"cycle"' in (job.directory / f"{name}.rank0.json").read_text() for name in ("one", "two")]
        assert cycles == [False, True]
        alone = recordings(job, "alone/rank.*.trace.json")
        assert [recording.rank for recording in alone] == [0]
        assert {name for _, name in alone[0].tensors} == TENSORS


def test_ctrl_c_leaves_complete_files() -> None:
    with start_ranks(2, timeline_program.endless, env={"ENGINE_TIMELINE": "t.json"}) as job:
        job.wait_for("ready.0", "ready.1")
        os.kill(job.process.pid, signal.SIGINT)
        job.finish(check=False)
        for rank in range(2):
            events = complete(job.directory / f"t.rank{rank}.json")
            assert any("engine_totals" in event.get("args", {}) for event in events)
        assert all({name for _, name in each.tensors} == TENSORS for each in recordings(job, "t.rank*.json"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_rank_leaves_a_file_that_lacks_the_bracket_only(number: signal.Signals) -> None:
    with start_ranks(2, timeline_program.endless, env={"ENGINE_TIMELINE": "t.json"}) as job:
        job.wait_for("ready.0", "ready.1")
        os.kill(job.pid(1), number)
        job.finish(check=False)
        text = (job.directory / "t.rank1.json").read_text()
        assert text.endswith("\n") and not text.endswith("]\n")
        assert len(json.loads(text + "]")) > 100
        complete(job.directory / "t.rank0.json")
        found = recordings(job, "t.rank*.json")
        assert all({name for _, name in each.tensors} >= TENSORS for each in found)
        shown = subprocess.run(
            [
                sys.executable,
                "-m",
                "engine.trace",
                "summary",
                *(str(job.directory / f"t.rank{r}.json") for r in (0, 1)),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    assert shown.returncode == 0 and not shown.stderr, shown.stderr
    assert "slowest rank: " in shown.stdout and "'" not in shown.stdout


def test_no_line_crosses_a_page() -> None:
    """A signal interrupts a write of several pages between two of them."""
    with start_ranks(1, timeline_program.many, 400, 3, options=["--timeline", "t.json"]) as job:
        job.finish()
        data = (job.directory / "t.rank0.json").read_bytes()
    at = 0
    for line in data.splitlines(True):
        begins = at + len(line) - len(line.lstrip(b" "))
        assert begins // PAGE == (at + len(line) - 1) // PAGE, line
        at += len(line)
    assert at > 20 * PAGE


def test_the_limit_holds_and_is_said_once() -> None:
    limit = 200_000
    env = {"ENGINE_TIMELINE_LIMIT": str(limit)}
    with start_ranks(2, timeline_program.at_once, 2000, 5, "t", env=env) as job:
        finished = job.finish()
        for rank in range(2):
            path = job.directory / "t" / f"rank.{rank}.trace.json"
            assert path.stat().st_size <= limit
            complete(path)
            assert finished.ranks[rank].stderr.count(f"has reached its limit of {limit} bytes") == 1
        figures = summarize_recordings(recordings(job, "t/rank.*.trace.json"))
    for row in figures["ranks"]:
        assert row["tensors"] == 4 * 2001, "totals count what is not shown"
        assert row["dropped"] > 0


def test_a_rate_bounds_what_is_recorded_and_all_ranks_record_the_same() -> None:
    rounds, names = 10, 2000
    rate, entry = 1000, 8 + 3 * (names + 1)  # lines per second at first; most lines of an entry
    env = {"ENGINE_TIMELINE": "t.json", "ENGINE_TIMELINE_LIMIT": "3000000"}
    with start_ranks(2, timeline_program.at_once, names, rounds, env=env) as job:
        job.finish()
        found = recordings(job, "t.rank*.json")
    assert set(found[0].entries) == set(found[1].entries)
    for recording in found:
        assert recording.totals is not None
        assert recording.totals["tensors"] == rounds * (names + 1)
        assert (recording.totals["dropped"], recording.totals["left_out"]) == (0, 0)
        seconds = (recording.totals["now_ns"] - recording.totals["since_ns"]) / 1e9
        shown = 8 * len(recording.entries) + 3 * len(recording.tensors)
        # Limit of one write, and an overdraft of one entry: some thousand tensors.
        assert names / 2 < len(recording.tensors) and shown < rate * (BURST + seconds) + 2 * entry, (shown, seconds)


def test_a_timeline_that_cannot_be_written_is_an_error_before_the_job_starts() -> None:
    finished = run_ranks(1, timeline_program.unwritable)
    assert finished.values[0] == (
        "timeline is '/proc/nowhere/timeline.json': rank 0 cannot write its timeline: No such file or directory "
        "(/proc/nowhere/timeline.rank0.json)"
    )


def test_paths_that_cannot_be_are_refused_on_every_rank_and_the_engine_goes_on() -> None:
    with start_ranks(2, timeline_program.refusals) as job:
        finished = job.finish()
        assert [recording.rank for recording in recordings(job, "new/directory/t.rank*.json")] == [0, 1]
        assert not list(job.directory.glob("rank.*.trace.json"))
        assert not list(job.directory.glob("elsewhere"))
    for rank, said in enumerate(finished.values):
        assert said == {
            "empty": (empty := said["empty"]),
            "blank": empty,
            "number": "TypeError: a timeline goes to a path, as a str or a pathlib.Path, not 5",
            "none": "TypeError: a timeline goes to a path, as a str or a pathlib.Path, not None",
            "bytes": "TypeError: a timeline goes to a path, as a str or a pathlib.Path, not b't.json'",
            "nul": "ValueError: a timeline cannot go to 'a\\x00b.json': a path has no NUL",
            "below a file": said["below a file"],
            "taken": said["taken"],
            "link": said["link"],
            "setting": "timeline is 5; expected dynamic, or a path",
        }
        assert empty.startswith("ValueError: a timeline goes to NAME.json, or to a directory; the path is empty")
        for name, why in (
            ("below a file", "/file is no directory"),
            ("taken", "Is a directory"),
            ("link", "symbolic link, which is not followed"),
        ):
            assert f"rank {rank} cannot write its timeline: " in said[name] and why in said[name], said[name]


def test_files_that_another_running_job_writes_to_are_refused_and_stay_as_they_are(tmp_path: Path) -> None:
    target = tmp_path / "t.json"
    holds = (
        "import os, sys; from engine.trace.timeline import Timeline; "
        "os.write(Timeline(sys.argv[1], 0, 1, 1 << 20, False)._file, b'[]'); print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", holds, str(target)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None and other.stdout.readline()
        with pytest.raises(BlockingIOError, match="another running job writes to this file; choose") as told:
            Timeline(target, 0, 1, 1 << 20, False)
        assert told.value.filename == str(tmp_path / "t.rank0.json")
        assert (tmp_path / "t.rank0.json").read_text() == "[]"
        Timeline(target, 1, 2, 1 << 20, False).stop()
        other.stdin.close()
    first = Timeline(target, 0, 1, 1 << 20, False)
    later = Timeline(target, 0, 1, 1 << 20, False)  # In a later world, since the first one's disk may have hung.
    assert (tmp_path / "t.rank0.json").read_text() == ""
    first.stop()
    later.stop()


# ---- process sets ---------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [2, 4, 3])
def test_process_sets_are_shown_in_the_same_file_by_the_ranks_of_the_world(size: int, tmp_path: Path) -> None:
    names, steps = set(timeline_program.NAMES), timeline_program.SET_STEPS
    with start_ranks(size, timeline_program.in_sets, options=["--timeline", "t.json"]) as job:
        finished = job.finish()
        files = sorted(job.directory.glob("t.rank*.json"))
        assert len(files) == size
        found = recordings(job, "t.rank*.json")
        events = [complete(path) for path in files]
        notes: list[str] = []
        merged = tmp_path / "all.json"
        assert merge(files, merged, notes) == sum(map(len, events))
        figures = summarize_recordings(found)
        assert summarize_recordings(read([merged], notes)) == figures and not notes
    members = {0: range(size), 1: [rank for rank in range(size) if rank != 1], 2: range(1, size), 3: range(1, size)}
    by_set = {number: {each.rank: each for each in found if each.number == number} for number in members}
    assert sum(map(len, by_set.values())) == len(found)
    for number, ranks in members.items():
        assert list(by_set[number]) == list(ranks)
        for rank, recording in by_set[number].items():
            assert recording.ranks == tuple(ranks)
            shown = [name for _, name in recording.tensors if name in names]
            assert {name: shown.count(name) for name in names} == dict.fromkeys(names, steps)
            totals = recording.totals
            assert totals is not None and (totals["dropped"], totals["left_out"]) == (0, 0)
            assert number == 0 or totals["tensors"] == finished.values[rank][number]["tensors"] == len(names) * steps
            for key, tensor in recording.tensors.items():
                assert tensor.submitted <= tensor.ready <= tensor.started <= tensor.ended, (rank, tensor)
                same = [each.tensors[key] for each in by_set[number].values()]
                assert {(each.last, each.late) for each in same} == {(tensor.last, tensor.late)}
                submitted = {r: each.tensors[key].submitted for r, each in by_set[number].items()}
                assert tensor.last is not None and submitted[tensor.last] == max(submitted.values())
    for rank, mine in enumerate(events):
        titles = list(dict.fromkeys(event["args"]["name"] for event in mine if event["name"] == "process_name"))
        assert titles[0] == f"rank {rank}" and len(titles) == len({event["pid"] for event in mine})
        among = {2: "among rank 1", 3: "among ranks 1, 2", 4: "among ranks 1-3"}[size]
        assert (f"rank {rank} {among} (set 3)" in titles) == (rank > 0)
        assert any(event["args"].get("algorithm") == "adasum" for event in mine if "args" in event) == (size != 3)
    measurements = [figures]

    def measure() -> None:
        """Check once; `measured` repeats it, since a busy machine may make another rank late, too."""
        if not measurements:
            with start_ranks(size, timeline_program.in_sets, options=["--timeline", "t.json"]) as job:
                job.finish()
                measurements.append(summarize_recordings(recordings(job, "t.rank*.json")))
        assert measurements.pop()["slowest_rank"] == size - 1

    measured(measure)
    assert [(each["id"], each["ranks"]) for each in figures["process_sets"]] == [
        (number, list(ranks)) for number, ranks in members.items() if number
    ]
    told = format_summary(figures)
    assert max(map(len, told.splitlines())) <= 100
    assert f"\n{among} (set 2)\n" in told and f"\n{among} (set 3)\n" in told


def test_a_timeline_that_starts_and_stops_while_there_are_sets() -> None:
    with start_ranks(3, timeline_program.started_among_sets) as job:
        job.finish()
        one, two = (recordings(job, f"{name}.rank*.json") for name in ("one", "two"))
    for found, name, added in ((one, "one.json", 2), (two, "two.json", 3)):
        parts = {(each.number, each.rank): each for each in found if each.number}
        assert list(parts) == [(1, 2), (added, 0)]
        assert all({tensor for _, tensor in each.tensors} == {name} for each in parts.values())


def test_a_killed_rank_leaves_its_sets_whole() -> None:
    with start_ranks(3, timeline_program.endless_in_sets, env={"ENGINE_TIMELINE": "t.json"}) as job:
        job.wait_for("ready.0", "ready.1", "ready.2")
        os.kill(job.pid(2), signal.SIGKILL)
        job.finish(check=False)
        text = (job.directory / "t.rank2.json").read_text()
        assert text.endswith("\n") and not text.endswith("]\n")
        json.loads(text + "]")
        found = recordings(job, "t.rank*.json")
    assert [(each.number, each.rank) for each in found] == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2)]
    assert all("part" in {name for _, name in each.tensors} for each in found if each.number)


def test_the_sets_of_a_rank_share_its_rate() -> None:
    rounds, names = 10, 300
    rate, entry = 1000, 8 + 3 * names  # lines per second; most lines of an entry
    env = {"ENGINE_TIMELINE": "t.json", "ENGINE_TIMELINE_LIMIT": "3000000"}
    with start_ranks(2, timeline_program.at_once_in_sets, names, rounds, env=env) as job:
        job.finish()
        found = recordings(job, "t.rank*.json")
    for rank in range(2):
        mine = [each for each in found if each.rank == rank]
        assert len(mine) == 2 and all(each.tensors for each in mine)
        assert all(each.totals is not None and each.totals["tensors"] >= rounds * (names + 1) for each in mine)
        seconds = max((each.totals["now_ns"] - each.totals["since_ns"]) / 1e9 for each in mine if each.totals)
        shown = sum(8 * len(each.entries) + 3 * len(each.tensors) for each in mine)
        # Before the sets were added, the world had the whole rate: it may have saved half of that on top.
        assert shown < rate * (BURST + BURST / 2 + seconds) + 2 * entry, (shown, seconds)


def test_sets_that_come_and_go_keep_to_the_limit() -> None:
    limit, count = 150_000, 300
    env = {"ENGINE_TIMELINE": "t.json", "ENGINE_TIMELINE_LIMIT": str(limit)}
    with start_ranks(2, timeline_program.many_sets, count, env=env) as job:
        finished = job.finish()
        sizes = [(job.directory / f"t.rank{rank}.json").stat().st_size for rank in range(2)]
        found = recordings(job, "t.rank*.json")
        complete(job.directory / "t.rank0.json")
    assert max(sizes) <= limit < 2 * sizes[0]
    assert finished.ranks[0].stderr.count(f"has reached its limit of {limit} bytes") == 1
    assert 10 < sum(each.number > 0 for each in found) < count
