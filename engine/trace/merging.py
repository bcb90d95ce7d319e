"""Merging of the timelines of several ranks into one file.

That of an elastic job's worlds has a track for each worker across worlds, and one for the job.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..host import private_files
from .flight import worlds_in
from .reading import TraceError, about_of, events_of, files_of, read
from .timeline import HEAD, LATE_ROW, ROWS, SETS

JOB = 10**9  # process of the trace that stands for the job
WORKERS = 10**6  # worker 2 is process 2 of the trace, and in process set 3 it is process 3000002
FIRST_TENSOR = max(*ROWS, LATE_ROW) + 1
Event = dict[str, Any]


@dataclass
class _World:
    """Timelines of one world."""

    number: int
    reason: str
    size: int
    files: list[Path] = field(default_factory=list)
    ahead: dict[str, tuple[int, int]] = field(default_factory=dict)  # clock offset and its error in ns, by boot id
    shift: float | None = None  # microseconds from its clock to that of the first world; None: unknown
    begun: float = float("inf")  # microseconds
    ended: float = float("-inf")


def merge(paths: Iterable[str | Path], target: Path, notes: list[str]) -> int:
    """Merge the timelines of several ranks into one file and return the number of events.

    A directory of an elastic job stands for all its worlds; the merged file has one track for each worker. Errors are
    those of `read`, and OSError if the target cannot be written.
    """
    given = _expand_worlds(paths)
    if _is_of_worlds(given):
        events = _merge_worlds(given, notes)
    else:
        read(given, notes)  # They belong together.
        events = (event for path in files_of(given) for event in events_of(path, []))
    count = 0
    with open(private_files.open_file(target, os.O_TRUNC), "w", encoding="utf-8") as file:
        for event in events:
            file.write((",\n" if count else "[") + json.dumps(event, separators=(",", ":"), ensure_ascii=False))
            count += 1
        file.write("\n]\n")
    return count


def _expand_worlds(paths: Iterable[str | Path]) -> list[Path]:
    """Replace each directory that has worlds by the directories of those worlds in which there is a timeline."""

    def list_recorded_worlds(path: Path) -> list[Path]:
        return [each for each in worlds_in(path) if any(each.glob("rank.*.trace.json"))]

    return [each for path in map(Path, paths) for each in (list_recorded_worlds(path) or [path])]


def _is_of_worlds(paths: Sequence[Path]) -> bool:
    """Return whether the files are of several worlds."""
    return len({about_of(path).get("world") for path in files_of(paths)}) > 1


def _merge_worlds(paths: Sequence[Path], notes: list[str]) -> Iterator[Event]:
    """Yield the events of all worlds, by one clock.

    A path is a file, or a directory of one world. A line about each omission is appended to `notes`. Raises TraceError
    if files do not belong to one job, or some worlds share no host with the others.
    """
    worlds = _by_world(paths)
    for world in worlds:
        for recording in read(world.files, notes):
            about = recording.about
            told = about.get("ahead_ns", 0), about.get("ahead_error_ns", 0)
            world.ahead[str(about.get("own_boot", about.get("boot")))] = told
    _find_shifts(worlds)
    rows: dict[tuple[int, str], int] = {}
    named: set[int] = set()
    for world in worlds:
        for path in world.files:
            yield from _of_worker(path, world, rows, named)
    yield from _make_job_events(worlds)


def _find_shifts(worlds: Sequence[_World]) -> None:
    """Find the offset from each world's clock to that of the first world (a world's clock is that of rank 0's host).

    A host that was in two worlds knows the offset of each world's clock from its own.
    """
    worlds[0].shift = 0.0
    known = {boot: (ahead / 1e3, error) for boot, (ahead, error) in worlds[0].ahead.items()}  # for the first world
    left = list(worlds[1:])
    while left:
        found = next((world for world in left if world.ahead.keys() & known.keys()), None)
        if found is None:
            numbers = ", ".join(str(world.number) for world in left)
            raise TraceError(
                f"no file tells of a host that was in worlds {numbers} and in others, so that their clocks cannot be "
                "compared: collect the files of all hosts, or merge one, as DIR/world.K"
            )
        left.remove(found)
        both = found.ahead.keys() & known.keys()
        host = min(both, key=lambda boot: (known[boot][1] + found.ahead[boot][1], boot))
        found.shift = known[host][0] - found.ahead[host][0] / 1e3
        for boot, (ahead, error) in found.ahead.items():
            known.setdefault(boot, (ahead / 1e3 + found.shift, error + known[host][1]))


def _by_world(paths: Sequence[Path]) -> list[_World]:
    worlds: dict[int, _World] = {}
    for path in files_of(paths):
        about = about_of(path)
        if any(type(about.get(name)) is not int or about[name] < 0 for name in ("world", "worker")):
            raise TraceError(f"{path}: no timeline of an elastic job's world, as others of these files are")
        world = worlds.setdefault(about["world"], _World(about["world"], str(about.get("reason", "")), about["size"]))
        world.files.append(path)
    return [worlds[number] for number in sorted(worlds)]


def _of_worker(path: Path, world: _World, rows: dict[tuple[int, str], int], named: set[int]) -> Iterator[Event]:
    """Yield the events of one file on its worker's track, with the same row for a tensor in each world."""
    about = about_of(path)
    worker, rank = about["worker"], about["rank"]
    moved: dict[tuple[int, int], int] = {}  # rows of tensors, by process and row in the file
    for event in events_of(path, []):
        number = (event["pid"] - rank) // SETS  # number of the process set
        process = WORKERS * number + worker
        event = event | {"pid": process}
        if "ts" in event:
            event["ts"] += world.shift or 0
        if event["name"] == "thread_name" and event["tid"] >= FIRST_TENSOR:
            key = process, event["args"]["name"]
            moved[process, event["tid"]] = rows.setdefault(key, FIRST_TENSOR + len(rows))
        if "tid" in event:
            event["tid"] = moved.get((process, event["tid"]), event["tid"])
        if event["name"] == "process_name":
            if process in named:
                continue
            named.add(process)
            event["args"] = {"name": f"worker {worker}" + _of_set(event)}
        elif event["name"] == "process_sort_index":
            event["args"] = {"sort_index": SETS * worker + min(number, SETS - 1)}
        elif event["ph"] != "M":
            world.begun = min(world.begun, event["ts"])
            world.ended = max(world.ended, event["ts"] + event.get("dur", 0))
        yield event


def _of_set(event: Event) -> str:
    """Return the suffix of a process set's track: its ranks in the first world that has it."""
    name = event["args"]["name"]
    return "" if HEAD in event["args"] or "among" not in name else f" {name[name.index('among') :]}"


def _make_job_events(worlds: Sequence[_World]) -> Iterator[Event]:
    """Yield the worlds of the job, and the resets between them with their causes."""
    there = [world for world in worlds if world.begun <= world.ended]
    yield {"ph": "M", "pid": JOB, "name": "process_name", "args": {"name": "the job"}}
    yield {"ph": "M", "pid": JOB, "name": "process_sort_index", "args": {"sort_index": -1}}
    yield {"ph": "M", "pid": JOB, "tid": 1, "name": "thread_name", "args": {"name": "worlds and resets"}}
    for world in there:
        yield _make_slice(f"world {world.number}: {world.size} ranks", world.begun, world.ended, reason=world.reason)
    for before, after in pairwise(there):
        yield _make_slice(f"reset: {after.reason}", before.ended, max(before.ended, after.begun), world=after.number)


def _make_slice(name: str, begun: float, ended: float, **args: object) -> Event:
    return {"ph": "X", "pid": JOB, "tid": 1, "ts": begun, "dur": ended - begun, "name": name, "args": args}
