"""Read timelines back: what `engine.trace.timeline` wrote, whole or cut off, or several of them merged."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import readable
from .flight import newest_world
from .timeline import DEVICE_ROW, HEAD, KNOBS, ROWS, SET, TOTALS, VERSION

STEPS, WAITS, ENTRIES, FUSE, REDUCE, UNPACK, CYCLES = ROWS
_NAMED = re.compile(r"(?:rank\.\d+\.trace|(?P<name>.+)\.rank\d+)\.json")
STAGES = {FUSE: "fuse", REDUCE: "reduce", UNPACK: "unpack"}


class TraceError(Exception):
    """A file that is no timeline, or timelines that do not belong together."""


@dataclass
class Tensor:
    """One tensor in one entry, on one rank. Times in seconds of the host's monotonic clock.

    Attributes
    ----------
    name : str
    entry : int
    submitted, ready, started, ended : float
        Submitted by this rank; submitted by all; the entry begun here; the entry done here.
    last : int or None
        The rank that submitted it last; None: not known.
    late : float
        Seconds between the first rank's submission and the last's.
    nbytes : int
    kind : str
    """

    name: str
    entry: int
    submitted: float = 0.0
    ready: float = 0.0
    started: float = 0.0
    ended: float = 0.0
    last: int | None = None
    late: float = 0.0
    nbytes: int = 0
    kind: str = ""


@dataclass
class Entry:
    """One schedule entry on one rank; `stages` has the seconds spent in each, `compression` what it travelled as."""

    number: int
    kind: str
    started: float
    ended: float
    tensors: int
    nbytes: int
    stages: dict[str, float] = field(default_factory=dict)
    compression: str = "none"


@dataclass
class Recording:
    """The recording of one rank, in the world or in a process set.

    Attributes
    ----------
    rank : int
        In the world, as are all ranks here.
    about : dict
        What the file says of itself: version, size of the world, host ..
    number : int
        Of the process set; 0: the world.
    ranks : tuple of int
        Those of the process set, or all.
    totals : dict or None
        What the rank counted, of all entries; None: it ended before it wrote them.
    knobs : dict
        The last that the file tells of; empty in files of engines that did not write them.
    """

    rank: int
    about: dict[str, Any]
    number: int = 0
    ranks: tuple[int, ...] = ()
    totals: dict[str, int] | None = None
    knobs: dict[str, Any] = field(default_factory=dict)
    entries: dict[int, Entry] = field(default_factory=dict)
    tensors: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    waits: list[tuple[float, float]] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)


def files_of(paths: Iterable[str | Path]) -> list[Path]:
    """The files meant: a directory stands for the timelines in it, which are those of one job.

    Raises
    ------
    TraceError
        Nothing is there, or timelines that were written under several names.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        found += _inside(path) if path.is_dir() else [path]
    return found


def _inside(directory: Path) -> list[Path]:
    """The timelines in a directory, as `engine.trace.timeline.path_of` names them; of worlds, those of the last."""
    directory = newest_world(directory)
    sets: dict[str, list[Path]] = {}
    for path in sorted(directory.iterdir()):
        if (named := _NAMED.fullmatch(path.name)) is not None:
            name = named["name"]
            sets.setdefault("rank.*.trace.json" if name is None else f"{name}.rank*.json", []).append(path)
    if not sets:
        raise TraceError(f"{directory}: no rank.N.trace.json and no NAME.rankN.json in it")
    if len(sets) > 1:
        first = directory / min(sets)
        raise TraceError(f"{directory}: timelines of several names ({', '.join(sorted(sets))}): give one, as {first}")
    (only,) = sets.values()
    return only


def events_of(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The events of a file. What a killed process left broken is left out, and said in `notes`.

    Raises
    ------
    TraceError
        The file cannot be read, or is no timeline of this engine.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    body = text.rstrip().removesuffix("]")
    events: list[Any]
    try:
        events = json.loads(body + "]")
    except ValueError:
        events = list(_by_line(path, text, notes))
    if not all(isinstance(event, dict) for event in events):
        raise TraceError(f"{path}: no timeline of this engine")
    heads = [event["args"] for event in events if isinstance(event.get("args"), dict)]
    versions = [each[HEAD].get("version") for each in heads if isinstance(each.get(HEAD), dict)]
    versions += [event.get("args", {}).get("version") for event in events if event.get("name") == HEAD]  # of version 1
    if not versions:
        raise TraceError(f"{path}: no timeline of this engine")
    for version in versions:
        if version != VERSION:
            raise TraceError(f"{path}: a timeline of version {version}; this program reads version {VERSION}")
    return events


def _by_line(path: Path, text: str, notes: list[str]) -> Iterator[dict[str, Any]]:
    broken = []
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip().lstrip("[,").removesuffix("]")
        if not bare:
            continue
        try:
            event = json.loads(bare)
        except ValueError:
            broken.append(number)
            continue
        if isinstance(event, dict):
            yield event
    if broken:
        notes.append(f"{path}: {readable.count(len(broken), 'broken line')} left out, the first is line {broken[0]}")


def read(paths: Iterable[str | Path], notes: list[str]) -> list[Recording]:
    """The recordings in some files: the world's by rank, then those of each process set.

    Parameters
    ----------
    paths : iterable of paths
        Files or directories.
    notes : list of str
        Gets a line about each thing that was left out.

    Raises
    ------
    TraceError
        A file that is no timeline; files of different hosts or starts, whose clocks differ; one rank twice.
    """
    recordings: dict[tuple[int, int], Recording] = {}
    for path in files_of(paths):
        for recording in _recordings(path, events_of(path, notes), notes):
            if (recording.number, recording.rank) in recordings:
                raise TraceError(f"{path}: rank {recording.rank} is in another of the files too")
            recordings[recording.number, recording.rank] = recording
    found = [recordings[key] for key in sorted(recordings)]
    ranks = {recording.number: recording.ranks for recording in reversed(found)}
    for other in found[1:]:
        if other.ranks != ranks[other.number]:
            raise TraceError(f"rank {other.rank}'s timeline is of another job: it has other process sets")
        for key, what in (("boot", "another host, or another start of it: the clocks differ"), ("size", "another job")):
            if other.about.get(key) != found[0].about.get(key):
                raise TraceError(f"rank {other.rank}'s timeline is of {what} than rank {found[0].rank}'s")
    return found


def _recordings(path: Path, events: list[dict[str, Any]], notes: list[str]) -> list[Recording]:
    names: dict[tuple[int, int], str] = {}
    found: dict[int, Recording] = {}
    damaged = 0
    for event in events:
        try:
            if event["name"] == "process_name":
                _process(found, event["pid"], event["args"])
            elif event["name"] == "thread_name":
                names[event["pid"], event["tid"]] = event["args"]["name"]
            elif event["ph"] == "X":
                _slice(found[event["pid"]], event, names)
        except (KeyError, TypeError, AttributeError):
            damaged += 1
    if damaged:
        left_out = readable.count(damaged, "event")
        notes.append(f"{path}: {left_out} left out, not of a kind that this program knows")
    return list(found.values())


def _process(found: dict[int, Recording], process: int, told: dict[str, Any]) -> None:
    if HEAD in told or SET in told:
        found[process] = _recording(found, told)
    elif TOTALS in told:
        found[process].totals = told[TOTALS]
    if KNOBS in told:
        found[process].knobs = told[KNOBS]


def _recording(found: dict[int, Recording], told: dict[str, Any]) -> Recording:
    if HEAD in told:
        about = told[HEAD]
        return Recording(about["rank"], about, 0, tuple(range(about["size"])))
    rank, number, ranks = (told[SET][key] for key in ("rank", "id", "ranks"))
    return Recording(rank, found[rank].about, number, tuple(ranks))


def _slice(recording: Recording, event: dict[str, Any], names: dict[tuple[int, int], str]) -> None:
    row, start = event["tid"], round(event["ts"] * 1e3)  # nanoseconds: sums are exact
    begun, ended = start / 1e9, (start + round(event["dur"] * 1e3)) / 1e9
    if row == STEPS:
        recording.steps.append((begun, ended))
    elif row == WAITS:
        recording.waits.append((begun, ended))
    elif row == ENTRIES:
        args = event["args"]
        number = args["entry"]
        entry = Entry(number, event["name"], begun, ended, args["tensors"], args["bytes"])
        entry.compression = args.get("compression", "none")
        recording.entries[number] = entry
    elif row == DEVICE_ROW:
        return  # samples, which stand for no entry's share
    elif row in STAGES:
        args = event["args"]
        recording.entries[args["entry"]].stages[STAGES[row]] = args["busy_us"] / 1e6
    else:
        args, name = event["args"], names[event["pid"], row]
        tensor = recording.tensors.setdefault((args["entry"], name), Tensor(name, args["entry"]))
        if event["name"] == "negotiate":
            tensor.submitted, tensor.ready = begun, ended
            tensor.last, tensor.late = args.get("last"), args.get("late_us", 0) / 1e6
        elif event["name"] != "queue":
            tensor.started, tensor.ended, tensor.kind, tensor.nbytes = begun, ended, event["name"], args["bytes"]


def about_of(path: Path) -> dict[str, Any]:
    """What a timeline says of itself.

    Raises
    ------
    TraceError
        As `events_of`.
    """
    for event in events_of(path, []):
        told = event.get("args")
        if isinstance(told, dict) and isinstance(told.get(HEAD), dict):
            about: dict[str, Any] = told[HEAD]
            return about
    raise TraceError(f"{path}: no timeline of this engine")
