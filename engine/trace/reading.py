"""Reader of timelines: files of `engine.trace.timeline`, complete or cut off, or merged files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..text import readable
from ..text.bounded_reader import (
    LARGEST,
    MIB,
    ReadError,
    get_number,
    get_text,
    get_whole,
    parse_json,
    read_lines,
    read_text,
)
from .flight import newest_world
from .timeline import DEVICE_ROW, HEAD, KNOBS, LATE_ROW, ROWS, SET, TOTALS, VERSION

STEPS, WAITS, ENTRIES, FUSE, REDUCE, UNPACK, CYCLES = ROWS
_NAMED = re.compile(r"(?:rank\.\d+\.trace|(?P<name>.+)\.rank\d+)\.json")
STAGES = {FUSE: "fuse", REDUCE: "reduce", UNPACK: "unpack"}
LIMIT = 1 << 30  # maximum bytes of a file
LINE = MIB  # maximum bytes of an event's line
WHOLE = 64 * MIB  # maximum bytes of a file that is parsed at once, because another program has changed its lines
MOST_RANKS = 4096  # maximum number of ranks in a file
MOST_GROUPS = 1 << 31  # maximum number of groups that a rank has formed
MOST_TRACKS = 1 << 40  # upper bound of process and thread numbers in a trace
TOTAL = ("since_ns", "now_ns", "busy_ns", "wait_ns", "exposed_ns", "steps", "entries", "tensors", "bytes")


class TraceError(Exception):
    """Error of a file that is not a timeline, or of timelines that do not belong together."""


@dataclass
class Tensor:
    """One tensor in one entry on one rank. Times are in seconds of the host's monotonic clock."""

    name: str
    entry: int
    submitted: float = 0.0  # this rank's submission
    ready: float = 0.0  # the last rank's submission
    started: float = 0.0  # start of the entry on this rank
    ended: float = 0.0  # end of the entry on this rank
    last: int | None = None  # rank that submitted the tensor last; None: unknown
    late: float = 0.0  # seconds from the first rank's submission to the last one's
    nbytes: int = 0
    kind: str = ""


@dataclass
class Entry:
    """Schedule entry on one rank; `stages` has the seconds of each stage, `compression` the dtype on the wire.

    `algorithm` and `dtype` are empty in files that do not tell them.
    """

    number: int
    kind: str
    started: float
    ended: float
    tensors: int
    nbytes: int
    stages: dict[str, float] = field(default_factory=dict)
    compression: str = "none"
    algorithm: str = ""
    dtype: str = ""


@dataclass
class Recording:
    """The recording of one rank, in the world or in a process set."""

    rank: int  # rank in the world, as everywhere in this module
    about: dict[str, Any]  # header of the file: version, size of the world, host and more
    # Number of the process set; 0: the world. Sets that members alone formed, as torch's groups, count down from -1
    number: int = 0
    ranks: tuple[int, ...] = ()  # ranks of the process set, or of the world
    group: str = ""  # name of the set, as torch's groups have one; empty: none
    totals: dict[str, int] | None = None  # sums over all entries; None if the rank ended before writing them
    # Last knobs in the file; empty in files of engines that did not write them
    knobs: dict[str, Any] = field(default_factory=dict)
    entries: dict[int, Entry] = field(default_factory=dict)
    tensors: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    waits: list[tuple[float, float]] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)


def files_of(paths: Iterable[str | Path]) -> list[Path]:
    """Return the files at the given paths; a directory stands for its timelines, which must be of one job.

    Raises TraceError if a directory has no timelines, or timelines written under several names.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        found += _list_timelines(path) if path.is_dir() else [path]
    return found


def _list_timelines(directory: Path) -> list[Path]:
    """Return the timelines in a directory, named by `engine.trace.timeline.path_of`; of worlds, those of the last."""
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
    """Return the events of a file, without the broken lines of a killed process, which are reported in `notes`.

    Each event has a string `name`, and numbers where it has `pid`, `tid`, `ts` and `dur`. Its `args`, if any, are a
    dict with unchecked content. Raises TraceError if the file cannot be read, or is not a timeline of this engine.
    """
    try:
        found = _parse_events(path, notes)
    except ReadError as error:
        raise TraceError(str(error)) from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    events = [event for event in found if _is_event(event)]
    versions = [told.get("version") for told in map(_get_header, events) if told is not None]
    versions += [event.get("args", {}).get("version") for event in events if event["name"] == HEAD]  # in version 1
    if not versions:
        raise TraceError(f"{path}: no timeline of this engine")
    for version in versions:
        if version != VERSION:
            shown = version if type(version) is int else "another form"
            raise TraceError(f"{path}: a timeline of version {shown}; this program reads version {VERSION}")
    if len(events) < len(found):
        notes.append(f"{path}: {readable.format_count(len(found) - len(events), 'event')} left out, damaged")
    return events


def _parse_events(path: Path, notes: list[str]) -> list[Any]:
    """Parse each line of a file, or the whole file if its first line alone is not valid JSON."""
    found: list[Any] = []
    broken: list[int] = []
    for line_number, line in read_lines(path, LIMIT, LINE):
        bare = line.strip().lstrip(b"[,").removesuffix(b"]") if line is not None else b"?"  # too long
        if not bare:
            continue
        try:
            found.append(parse_json(bare))
        except ReadError:
            if not found and not broken and path.stat().st_size <= WHOLE and (events := _at_once(path)):
                return events
            broken.append(line_number)
    if broken:
        notes.append(
            f"{path}: {readable.format_count(len(broken), 'broken line')} left out, the first is line {broken[0]}"
        )
    return found


def _at_once(path: Path) -> list[Any]:
    """Return the events of a file with other line breaks than `engine.trace.timeline` writes; empty if not an array."""
    try:
        events = parse_json(read_text(path, WHOLE).rstrip().removesuffix("]") + "]", entries=WHOLE)
    except ReadError:
        return []
    return events if isinstance(events, list) else []


def _is_event(event: Any) -> bool:
    """Return whether an event of a timeline has the fields of its kind, with valid types and ranges."""
    if not isinstance(event, dict):
        return False
    args, phase, name = event.get("args", {}), event.get("ph"), event.get("name")
    named = name in ("process_name", "thread_name")
    needed = ["pid", *["tid"] * (phase == "X" or name == "thread_name"), *["ts", "dur"] * (phase == "X")]
    return (
        isinstance(name, str)
        and isinstance(phase, str)
        and isinstance(args, dict)
        and (not named or isinstance(args.get("name"), str))
        and all(key in event for key in needed)
        and all(type(event.get(key, 0)) is int and 0 <= event.get(key, 0) < MOST_TRACKS for key in ("pid", "tid"))
        and all(type(event.get(key, 0)) in (int, float) and abs(event.get(key, 0)) <= LARGEST for key in ("ts", "dur"))
        and event.get("dur", 0) >= 0
    )


def _get_header(event: dict[str, Any]) -> dict[str, Any] | None:
    """Return the file's header if the event contains it."""
    told = event.get("args", {}).get(HEAD)
    return told if isinstance(told, dict) else None


def read(paths: Iterable[str | Path], notes: list[str]) -> list[Recording]:
    """Read the recordings at the given paths: the world's by rank, then those of each process set.

    A line about each omission is appended to `notes`. Raises TraceError if a file is not a timeline, files are of
    different hosts or boots, whose clocks differ, or a rank occurs twice.
    """
    recordings: dict[tuple[int, int], Recording] = {}
    made = [(path, each) for path in files_of(paths) for each in _make_recordings(path, events_of(path, notes), notes)]
    _number_groups([recording for _, recording in made])
    for path, recording in made:
        if (recording.number, recording.rank) in recordings:
            raise TraceError(f"{path}: rank {recording.rank} is in another of the files too")
        recordings[recording.number, recording.rank] = recording
    found = [recordings[key] for key in sorted(recordings, key=lambda key: (key[0] < 0, abs(key[0]), key[1]))]
    ranks = {recording.number: recording.ranks for recording in reversed(found)}
    for other in found[1:]:
        if other.ranks != ranks[other.number]:
            raise TraceError(f"rank {other.rank}'s timeline is of another job: it has other process sets")
        for key, what in (("boot", "another host, or another start of it: the clocks differ"), ("size", "another job")):
            if other.about.get(key) != found[0].about.get(key):
                raise TraceError(f"rank {other.rank}'s timeline is of {what} than rank {found[0].rank}'s")
    return found


def _number_groups(recordings: Iterable[Recording]) -> None:
    """Give recordings of one group one number: in the files each rank has counted its own groups."""
    times: Counter[tuple[int, str, tuple[int, ...]]] = Counter()  # groups that a rank had by that name
    groups: dict[tuple[str, tuple[int, ...], int], list[Recording]] = {}
    for recording in recordings:
        if recording.number < 0:
            name, ranks = recording.group, recording.ranks
            groups.setdefault((name, ranks, times[recording.rank, name, ranks]), []).append(recording)
            times[recording.rank, name, ranks] += 1
    for index, (_, same) in enumerate(sorted(groups.items(), key=lambda item: item[0]), 1):
        for recording in same:
            recording.number = -index


def _make_recordings(path: Path, events: list[dict[str, Any]], notes: list[str]) -> list[Recording]:
    names: dict[tuple[int, int], str] = {}
    found: dict[int, Recording] = {}
    damaged = 0
    for event in events:
        try:
            if event["name"] == "process_name":
                _add_process(found, event["pid"], event["args"])
            elif event["name"] == "thread_name":
                names[event["pid"], event["tid"]] = get_text(event["args"], "name")
            elif event["ph"] == "X":
                _add_slice(found[event["pid"]], event, names)
        except (KeyError, ReadError):
            damaged += 1
    if damaged:
        left_out = readable.format_count(damaged, "event")
        notes.append(f"{path}: {left_out} left out, not of a kind that this program knows")
    if not found:
        raise TraceError(f"{path}: a damaged timeline, which does not tell its rank and the number of ranks")
    return list(found.values())


def _add_process(found: dict[int, Recording], process: int, told: dict[str, Any]) -> None:
    if SET in told and process in found:  # the group has got its name meanwhile
        found[process].group = _get_group(told[SET])
    elif HEAD in told or SET in told:
        found[process] = _make_recording(found, told)
    elif TOTALS in told:
        totals = told[TOTALS]
        optional = [key for key in ("dropped", "left_out") if key in totals]
        found[process].totals = {key: get_whole(totals, key) for key in (*TOTAL, *optional)}
    if isinstance(told.get(KNOBS), dict):
        found[process].knobs = told[KNOBS]


def _make_recording(found: dict[int, Recording], told: dict[str, Any]) -> Recording:
    if HEAD in told:
        about = _check_header(told[HEAD])
        return Recording(about["rank"], about, 0, tuple(range(about["size"])))
    about = told[SET]
    rank, set_number = get_whole(about, "rank", 0, MOST_RANKS), get_whole(about, "id", -MOST_GROUPS, MOST_RANKS)
    ranks = about.get("ranks")
    world = found[rank]
    if not isinstance(ranks, list) or not all(type(each) is int and 0 <= each < MOST_RANKS for each in ranks):
        raise ReadError("'ranks' are no ranks")
    if rank not in ranks or len(set(ranks)) < len(ranks):
        raise ReadError("'ranks' are no process set with this rank in it")
    return Recording(rank, world.about, set_number, tuple(ranks), _get_group(about))


def _get_group(about: Any) -> str:
    """Return the name in what a file says of a process set; empty: it has none."""
    return get_text(about, "group") if isinstance(about, dict) and "group" in about else ""


def _check_header(about: dict[str, Any]) -> dict[str, Any]:
    """Return a file's header after checking the ranges of its numbers."""
    get_whole(about, "rank", 0, get_whole(about, "size", 1, MOST_RANKS) - 1)
    for name, least in (("hosts", 1), ("ahead_ns", -LARGEST), ("ahead_error_ns", 0)):
        if name in about:
            get_whole(about, name, int(least))
    return about


def _add_slice(recording: Recording, event: dict[str, Any], names: dict[tuple[int, int], str]) -> None:
    row, start = event["tid"], round(event["ts"] * 1e3)  # nanoseconds: sums are exact
    begun, ended = start / 1e9, (start + round(event["dur"] * 1e3)) / 1e9
    if row == STEPS:
        recording.steps.append((begun, ended))
        return
    if row == WAITS:
        recording.waits.append((begun, ended))
        return
    if row in (DEVICE_ROW, LATE_ROW):
        return  # samples, which are not the total of any entry; reasons of steps that are in their own row, too
    args = event.get("args")
    entry_number = get_whole(args, "entry")
    if row == ENTRIES:
        entry = Entry(entry_number, event["name"], begun, ended, get_whole(args, "tensors"), get_whole(args, "bytes"))
        told = {"compression": "none", "algorithm": "", "dtype": "", **event["args"]}
        entry.compression, entry.algorithm, entry.dtype = (
            get_text(told, name) for name in ("compression", "algorithm", "dtype")
        )
        recording.entries[entry_number] = entry
    elif row in STAGES:
        recording.entries[entry_number].stages[STAGES[row]] = get_number(args, "busy_us", 0) / 1e6
    else:
        _tensor_slice(recording, event, names[event["pid"], row], begun, ended)


def _tensor_slice(recording: Recording, event: dict[str, Any], name: str, begun: float, ended: float) -> None:
    """Record a slice in a tensor's row."""
    args = event["args"]
    key = get_whole(args, "entry"), name
    if event["name"] == "negotiate":
        last = None if args.get("last") is None else get_whole(args, "last", 0, MOST_RANKS)
        late = get_number({"late_us": 0, **args}, "late_us", 0) / 1e6
        tensor = recording.tensors.setdefault(key, Tensor(name, key[0]))
        tensor.submitted, tensor.ready, tensor.last, tensor.late = begun, ended, last, late
    elif event["name"] != "queue":
        nbytes = get_whole(args, "bytes")
        tensor = recording.tensors.setdefault(key, Tensor(name, key[0]))
        tensor.started, tensor.ended, tensor.kind, tensor.nbytes = begun, ended, event["name"], nbytes


def about_of(path: Path) -> dict[str, Any]:
    """Return the header of a timeline; raises TraceError as in `events_of`."""
    why = "no timeline of this engine"
    for event in events_of(path, []):
        if (told := _get_header(event)) is not None:
            try:
                return _check_header(told)
            except ReadError as error:
                why = f"a damaged timeline: {error}"
    raise TraceError(f"{path}: {why}")
