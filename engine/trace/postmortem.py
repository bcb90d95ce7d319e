"""Merging of a job's flight records: the first cause, each rank's last actions, and which ranks block others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ..text.bounded_reader import (
    MIB,
    ReadError,
    get_number,
    get_text,
    get_whole,
    parse_cut_json,
    parse_natural,
    read_bytes,
)
from ..text.readable import format_count, format_members, format_ranks
from .flight import newest_world
from .reading import MOST_RANKS

LIMIT = 16 * MIB  # maximum bytes of a record
CLOCK = (0.0, 1e11)  # valid range of a clock, in seconds
OLD = 60.0  # age in seconds, relative to the newest record, from which a record may be of another failure
PENDING_SHOWN = 8
SETS_SHOWN = 8  # maximum number of process sets shown of a rank: those with the latest activity
Members = tuple[str, tuple[int, ...]]  # name, which only groups of torch have, and ranks of a process set
STANDSTILL = 1.0  # seconds in an entry from which a rank counts as stopped


@dataclass
class Failure:
    """Report of one rank about the end of its world."""

    reporter: int
    rank: int
    cause: str
    message: str
    time: float
    common: float | None = None  # `time` by the monotonic clock of rank 0's host


@dataclass
class Flight:
    """Flight record of one rank, for the world or for a process set; `sets` has those of the sets."""

    rank: int
    size: int
    time: float
    reason: str
    monotonic: float | None
    pending: list[dict[str, Any]]
    history: list[dict[str, Any]]
    ranks: list[dict[str, Any]]
    common: float | None = None  # same as in `Failure`
    sets: dict[Members, Flight] = field(default_factory=dict)

    @property
    def finished(self) -> dict[str, Any] | None:
        """Last row of the history whose entry is done; None if there is none."""
        return next((row for row in reversed(self.history) if row["ended"] is not None), None)

    @property
    def current(self) -> dict[str, Any] | None:
        """Row of the history whose entry is in progress; None if there is none."""
        return self.history[-1] if self.history and self.history[-1]["ended"] is None else None

    def format_wait(self, since: float) -> str:
        """Format the time passed since a monotonic time; empty if the record has no monotonic time."""
        return "" if self.monotonic is None else f" for {self.monotonic - since:.1f} s"


def _has_or_have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _wait(ranks: Sequence[int], everybody: Sequence[int]) -> str:
    """Describe the ranks that wait for `ranks`: all others."""
    others = [rank for rank in everybody if rank not in ranks]
    return f"{format_ranks(others)} wait{'s' * (len(others) == 1)} for it" if others else "nobody is left to wait"


def entry_name(row: dict[str, Any]) -> str:
    """Format an entry, such as `entry 381 'layer.3.weight' (allreduce)`."""
    more = f" and {row['tensors'] - 1} more" if row["tensors"] > 1 else ""
    kind = row["kind"] if row["type"] == "batch" else row["type"]
    return f"entry {row['entry']} {row['name']!r}{more} ({kind})"


def _load(path: Path, notes: list[str]) -> tuple[dict[str, Any], bool] | None:
    """Return the content of a file and whether it is cut short; None if it cannot be used."""
    try:
        data, wrong = parse_cut_json(read_bytes(path, LIMIT))
    except OSError as error:
        notes.append(f"{path}: {error.strerror or error}")
    except ReadError as error:
        notes.append(f"{path}: broken: {str(error).removeprefix(f'{path}: ')}")
    else:
        if isinstance(data, dict):
            if wrong:
                notes.append(f"{path}: broken: {wrong}; what stands before that is shown")
            return data, bool(wrong)
        notes.append(f"{path}: not written by this engine")
    return None


def _read_flight(path: Path, notes: list[str]) -> Flight | None:
    loaded = _load(path, notes)
    if loaded is None:
        return None
    data, cut = loaded
    lost: list[str] = []
    try:
        flight = _parse_flight(data, data, cut, lost)
        for each in _get_rows(data, "process_sets", lost, required=False):
            if "members" in each:  # else it was written before process sets were in the report
                members = get_text({"group": "", **each}, "group"), tuple(_get_ranks(each, "members"))
                flight.sets[members] = _parse_flight(data, each, cut, lost)
    except ReadError as error:
        notes.append(f"{path}: no flight record of this engine, or of another version of it ({error})")
        return None
    if lost:
        notes.append(f"{path}: {format_count(len(lost), 'row')} left out, damaged; the first: {lost[0]}")
    return flight


def _parse_flight(data: dict[str, Any], told: dict[str, Any], cut: bool, lost: list[str]) -> Flight:
    """Parse the part `told` of one engine in the record `data`; append the error of each skipped row to `lost`."""
    size = get_whole(data, "size", 1, MOST_RANKS)
    return Flight(
        get_whole(data, "rank", 0, size - 1),
        size,
        get_number(data, "time", *CLOCK),
        get_text(data, "reason"),
        _get_optional_time(data, "monotonic"),
        _keep_valid_rows(_pending, _get_rows(told, "pending", lost, required=not cut), lost),
        _keep_valid_rows(_parse_entry, _get_rows(told, "history", lost, required=not cut), lost),
        _keep_valid_rows(_parse_rank_row, _get_rows(told, "ranks", lost, required=False), lost),
        _get_optional_time(data, "common"),
    )


def _keep_valid_rows(
    checked: Callable[[dict[str, Any]], dict[str, Any]], rows: Iterable[dict[str, Any]], lost: list[str]
) -> list[dict[str, Any]]:
    found = []
    for row in rows:
        try:
            found.append(checked(row))
        except ReadError as error:
            lost.append(str(error))
    return found


def _parse_entry(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "entry": get_whole(row, "entry"),
        "type": get_text(row, "type"),
        "kind": get_text(row, "kind"),
        "tensors": get_whole(row, "tensors"),
        "name": get_text(row, "name"),
        "started": get_number(row, "started"),
        "ended": None if row.get("ended", ...) is None else get_number(row, "ended"),
    }


def _pending(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": get_text(row, "name"),
        "kind": get_text(row, "kind"),
        "seconds": get_number(row, "seconds"),
        "missing": None if row.get("missing", ...) is None else _get_ranks(row, "missing"),
    }


def _parse_rank_row(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "rank": get_whole(row, "rank", 0, MOST_RANKS),
        "entry": None if row.get("entry", ...) is None else get_whole(row, "entry"),
        "passed": sum(get_whole(row, stage) for stage in ("packed", "reduced", "copied")),
        "left": bool(row.get("left")),
    }


def _get_rows(told: dict[str, Any], name: str, lost: list[str], required: bool) -> list[dict[str, Any]]:
    """Return a field that is a list of objects, without other items, whose errors are appended to `lost`."""
    rows = told.get(name, ... if required else [])
    if not isinstance(rows, list):
        raise ReadError(f"{name!r} is no list")
    lost += [f"an object is expected in {name!r}" for row in rows if not isinstance(row, dict)]
    return [row for row in rows if isinstance(row, dict)]


def _get_ranks(told: dict[str, Any], name: str) -> list[int]:
    """Return a field that is a list of ranks."""
    ranks = told.get(name)
    if not isinstance(ranks, list) or not all(type(rank) is int and 0 <= rank < MOST_RANKS for rank in ranks):
        raise ReadError(f"{name!r} is no list of ranks")
    return ranks


def _get_optional_time(data: dict[str, Any], name: str) -> float | None:
    """Return an optional time."""
    return None if data.get(name) is None else get_number(data, name, *CLOCK)


def _read_failure(path: Path, reporter: int, notes: list[str]) -> Failure | None:
    loaded = _load(path, notes)
    if loaded is None:
        return None
    data, _ = loaded
    try:
        cause, message, time = get_text(data, "cause"), get_text(data, "message"), get_number(data, "time", *CLOCK)
        return Failure(
            reporter, get_whole(data, "rank", 0, MOST_RANKS), cause, message, time, _get_optional_time(data, "common")
        )
    except ReadError as error:
        notes.append(f"{path}: no failure report of this engine, or of another version of it ({error})")
        return None


def collect(directory: Path) -> tuple[dict[int, Flight], list[Failure], list[str]]:
    """Read a job's files: flight records by rank, failure reports with the first failure first, and notes.

    The directory has `rank.N/flight.json` and `rank.N/failure.json`, or such directories for each world of an elastic
    job, of which the last is read. The notes have a line for each file that could not be used or is suspect.
    """
    flights: dict[int, Flight] = {}
    failures: list[Failure] = []
    notes: list[str] = []
    directory = newest_world(directory)
    for home in sorted(directory.glob("rank.*")):
        rank = parse_natural(home.name.removeprefix("rank."), MOST_RANKS)
        if rank is None or not home.is_dir():
            continue
        path = home / "flight.json"
        if path.exists():
            flight = _read_flight(path, notes)
            if flight is not None and flight.rank != rank:
                notes.append(f"{path}: it is rank {flight.rank}'s; left out")
            elif flight is not None:
                flights[rank] = flight
        path = home / "failure.json"
        if path.exists():
            failure = _read_failure(path, rank, notes)
            if failure is not None:
                failures.append(failure)
    _by_one_clock([*flights.values(), *failures])
    failures.sort(key=lambda failure: failure.time)
    if flights:
        newest = max(flights.values(), key=lambda flight: flight.time)
        for rank, flight in list(flights.items()):
            path = directory / f"rank.{rank}" / "flight.json"
            if flight.size != newest.size:
                notes.append(f"{path}: of a world of {flight.size} ranks, not {newest.size}; left out")
                del flights[rank]
            elif newest.time - flight.time > OLD:
                age = newest.time - flight.time
                notes.append(f"{path}: {age:.0f} s older than rank {newest.rank}'s: it may speak of another failure")
    return flights, failures, notes


def _by_one_clock(records: Sequence[Flight | Failure]) -> None:
    """Convert the times of records to one clock, as the hosts' clocks may differ."""
    offset = next((record.time - record.common for record in records if record.common is not None), 0.0)
    for record in records:
        if record.common is not None:
            record.time = record.common + offset


def missing_ranks(flights: dict[int, Flight]) -> dict[str, list[int]]:
    """Return, by name, the ranks that have not submitted an operation, the longest wait first.

    A rank that knows the missing ranks has them in its record. For a new name only the coordinator knows them. Then
    ranks whose own records do not have it in flight count as missing, as far as the records' times agree.
    """
    found: dict[str, list[int]] = {}
    each = [(entry["seconds"], entry) for flight in flights.values() for entry in flight.pending]
    for _, entry in sorted(each, key=lambda pair: -pair[0]):
        name = entry["name"]
        if entry["missing"] is not None:
            found[name] = sorted({*found.get(name, []), *entry["missing"]})
        else:
            holders = {flight.rank for flight in flights.values() if any(p["name"] == name for p in flight.pending)}
            found.setdefault(name, sorted(set(flights) - holders))
    return found


def stuck_in_entry(flights: dict[int, Flight]) -> tuple[list[int], int, dict[str, Any] | None, float] | None:
    """Find the ranks that block the others in an entry.

    Returns the ranks, the entry's number, its row if a record has it, and the seconds for which it has been in
    progress. The positions of all ranks come from the newest record whose own rank is in an entry; this includes ranks
    without a record.
    """
    inside = [flight for flight in flights.values() if flight.current is not None]
    if not inside:
        return None
    number = min(flight.history[-1]["entry"] for flight in inside)
    slowest = [flight for flight in inside if flight.history[-1]["entry"] == number]
    row = slowest[0].current
    seconds = max((flight.monotonic or 0.0) - flight.history[-1]["started"] for flight in slowest)
    teller = max((flight for flight in inside if flight.ranks), key=lambda flight: flight.time, default=None)
    if teller is None:
        return [], number, row, seconds
    done = float("inf")
    at = {each["rank"]: (done if each["entry"] is None else each["entry"], each["passed"]) for each in teller.ranks}
    least = min(at.values())
    behind = sorted(rank for rank, place in at.items() if place == least)
    return (behind if len(behind) < len(at) else []), number, row, seconds


def _describe_state(ranks: list[int], blamed: Failure | None, seconds: float) -> str:
    """Describe the state of the ranks that others wait for in an entry."""
    if blamed is not None and blamed.rank in ranks:
        fates = {"died": "died", "raised": "failed", "left": "left", "lost": "cannot be reached"}
        return fates.get(blamed.cause, "stopped")
    return "stopped" if seconds >= STANDSTILL else f"{'is' if len(ranks) == 1 else 'are'} the last"


@dataclass
class Standstill:
    """Reason why one schedule, the world's or a process set's, does not progress."""

    culprits: set[int]  # ranks that the others wait for; empty if no rank is behind the others
    waiting: set[int]  # other ranks that have an operation in flight
    line: str  # description in words


def find_standstill(
    flights: dict[int, Flight], blamed: Failure | None, everybody: Sequence[int], where: str = ""
) -> Standstill | None:
    """Find the ranks that block `everybody` in one schedule; None if no rank does. `where` names the schedule."""
    busy = {rank for rank, flight in flights.items() if flight.pending or flight.current is not None}
    stuck = stuck_in_entry(flights)
    if stuck is not None:
        ranks, number, row, seconds = stuck
        ranks = ranks or ([blamed.rank] if blamed is not None and blamed.rank in everybody else [])
        what = (entry_name(row) if row is not None else f"entry {number}") + where
        if not ranks:
            return Standstill(set(), busy, f"all ranks are in {what}; none is behind the others")
        line = f"{format_ranks(ranks)} {_describe_state(ranks, blamed, seconds)} in {what}; {_wait(ranks, everybody)}"
        return Standstill(set(ranks), busy - set(ranks), line)
    missing = {name: ranks for name, ranks in missing_ranks(flights).items() if ranks}
    if missing:
        # Prefer what the blamed rank lacks, or else the longest wait: a rank may lack a later tensor because it waits
        # itself.
        name, ranks = next(
            ((name, ranks) for name, ranks in missing.items() if blamed is not None and blamed.rank in ranks),
            next(iter(missing.items())),
        )
        more = sum(ranks == other for other in missing.values()) - 1
        what = f"{name!r}" + (f" and {more} more" if more else "") + where
        line = f"{format_ranks(ranks)} {_has_or_have(ranks)} not submitted {what}; {_wait(ranks, everybody)}"
        return Standstill(set(ranks), busy - set(ranks), line)
    return None


def sets_of(flights: dict[int, Flight]) -> dict[Members, dict[int, Flight]]:
    """Return the records of each process set, by its name and ranks, then by rank."""
    found: dict[Members, dict[int, Flight]] = {}
    for rank, flight in flights.items():
        for members, told in flight.sets.items():
            found.setdefault(members, {})[rank] = told
    return found


def describe_cause(flights: dict[int, Flight], failures: Sequence[Failure], size: int) -> str:
    """Describe in one line the rank that blocks the others, and who waits for it.

    A rank that others wait for in the world may itself wait in a process set, or the reverse. Then the cause is the
    rank that is waited for there.
    """
    blamed = failures[0] if failures else None
    found = [find_standstill(flights, blamed, range(size))]
    found += [
        find_standstill(each, blamed, members[1], _format_members(members))
        for members, each in sets_of(flights).items()
    ]
    stills = [still for still in found if still is not None]

    def make_sort_key(still: Standstill) -> tuple[bool, bool, bool]:
        held = any(still.culprits & other.waiting for other in stills if other is not still)
        return not still.culprits, blamed is not None and blamed.rank not in still.culprits, held

    if stills:
        return min(stills, key=make_sort_key).line
    if blamed is not None:
        return blamed.message
    return "no rank stands still: nothing waits for another rank in these records"


def _format_members(members: Members) -> str:
    group, ranks = members
    return f" {format_members(ranks, group)}"


def make_report(directory: Path) -> tuple[str, dict[str, Any]]:
    """Report on a job's directory, as text and as a dictionary for JSON.

    Raises FileNotFoundError if there is no record of any rank.
    """
    flights, failures, notes = collect(directory)
    if not flights and not failures:
        detail = "".join(f"\n  {note}" for note in notes)
        raise FileNotFoundError(
            f"{directory}: no rank.N/flight.json or rank.N/failure.json that can be read; give the directory that has "
            f"rank.N{detail}"
        )
    sizes = [flight.size for flight in flights.values()]
    named = [*(failure.rank for failure in failures), *(failure.reporter for failure in failures), *flights]
    size = max([*sizes, max(named) + 1])
    lines = []
    if failures:
        first = failures[0]
        told = sorted({failure.reporter for failure in failures if failure.rank == first.rank})
        lines += [
            f"first cause: {first.message}",
            f"  told by {format_ranks(told)}, first at {_format_time(first.time)}",
        ]
        other = [failure for failure in failures if failure.rank != first.rank]
        lines += [f"  rank {failure.reporter} says: {failure.message}" for failure in other]
        lines.append("")
    absent = missing_ranks(flights)
    in_sets = {members: missing_ranks(each) for members, each in sets_of(flights).items()}
    for rank in range(size):
        if rank in flights:
            lines += [
                f"rank {rank} ({flights[rank].reason}, {_format_time(flights[rank].time)}): "
                + _describe_last_entry(flights[rank])
            ]
            lines += _describe_waits(flights[rank], absent)
            lines += _set_lines(flights[rank], in_sets)
        else:
            lines.append(f"rank {rank}: no flight record")
    conclusion = describe_cause(flights, failures, size)
    lines += ["", *(f"note: {note}" for note in notes), f"verdict: {conclusion}"]
    data = {
        "size": size,
        "verdict": conclusion,
        "failures": [failure.__dict__ for failure in failures],
        "ranks": {
            rank: {
                "time": flight.time,
                "reason": flight.reason,
                **_to_json(flight, absent),
                "process_sets": [
                    {"group": members[0], "ranks": list(members[1]), **_to_json(told, in_sets[members])}
                    for members, told in flight.sets.items()
                ],
            }
            for rank, flight in sorted(flights.items())
        },
        "without_record": [rank for rank in range(size) if rank not in flights],
        "notes": notes,
    }
    return "\n".join(lines), data


def _format_time(time: float) -> str:
    return datetime.fromtimestamp(min(max(time, CLOCK[0]), CLOCK[1])).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def _to_json(flight: Flight, absent: dict[str, list[int]]) -> dict[str, Any]:
    return {
        "finished": flight.finished,
        "current": flight.current,
        "pending": [{**each, "missing": absent.get(each["name"])} for each in flight.pending],
    }


def _describe_last_entry(flight: Flight) -> str:
    """Describe the last entry that a rank has finished, and the entry that it is in."""
    finished, current = flight.finished, flight.current
    text = "finished nothing" if finished is None else f"finished {entry_name(finished)}"
    if finished is not None and current is None:
        text += flight.format_wait(finished["ended"]).replace(" for", "") + " before" * (flight.monotonic is not None)
    if current is not None:
        text += f"; in {entry_name(current)}{flight.format_wait(current['started'])}"
    return text


def _describe_waits(flight: Flight, absent: dict[str, list[int]]) -> list[str]:
    """Describe the tensors that a rank waits for, and the ranks that have not submitted them."""
    lines = []
    for each in flight.pending[:PENDING_SHOWN]:
        ranks = absent.get(each["name"], [])
        who = f"{format_ranks(ranks)} {_has_or_have(ranks)} not submitted it" if ranks else "all have submitted it"
        lines.append(f"  waits for {each['name']!r} ({each['kind']}) for {each['seconds']:.1f} s: {who}")
    if len(flight.pending) > PENDING_SHOWN:
        lines.append(f"  and for {len(flight.pending) - PENDING_SHOWN} more")
    return lines


def _set_lines(flight: Flight, absent: dict[Members, dict[str, list[int]]]) -> list[str]:
    """Describe the same for the process sets of a rank."""

    def get_last_activity(told: Flight) -> tuple[bool, float]:
        return bool(told.pending), told.history[-1]["started"] if told.history else 0.0

    lines = []
    used = sorted(
        (item for item in flight.sets.items() if item[1].pending or item[1].history),
        key=lambda i: get_last_activity(i[1]),
    )
    for members, told in reversed(used[-SETS_SHOWN:]):
        lines.append(f" {_format_members(members)}: {_describe_last_entry(told)}")
        lines += [f"  {line}" for line in _describe_waits(told, absent[members])]
    if len(used) > SETS_SHOWN:
        lines.append(f"  and {len(used) - SETS_SHOWN} process sets more")
    return lines
