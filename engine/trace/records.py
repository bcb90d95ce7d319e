"""Records that ranks leave behind after a failure: reading of flight records and failure reports, with limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
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
from ..text.readable import format_count
from .flight import newest_world
from .reading import MOST_RANKS

LIMIT = 16 * MIB  # maximum bytes of a record
CLOCK = (0.0, 1e11)  # valid range of a clock, in seconds
OLD = 60.0  # age in seconds, relative to the newest record, from which a record may be of another failure
NAME_BYTES = 191  # bytes of a name by which operations are compared; records of failed worlds have no more
MOST_DIMS = 64  # maximum number of dimensions of a tensor in a record
Members = tuple[str, tuple[int, ...]]  # name, which only groups of torch have, and ranks of a process set


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
    unfinished: list[dict[str, Any]] = field(default_factory=list)  # operations that ended without a result
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
        _keep_valid_rows(_parse_pending, _get_rows(told, "pending", lost, required=not cut), lost),
        _keep_valid_rows(_parse_entry, _get_rows(told, "history", lost, required=not cut), lost),
        _keep_valid_rows(_parse_rank_row, _get_rows(told, "ranks", lost, required=False), lost),
        _keep_valid_rows(_parse_unfinished, _get_rows(told, "unfinished", lost, required=False), lost),
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
        "bytes": get_whole({"bytes": 0, **row}, "bytes"),
        "name": get_text(row, "name"),
        "started": get_number(row, "started"),
        "ended": None if row.get("ended", ...) is None else get_number(row, "ended"),
    }


def _parse_pending(row: dict[str, Any]) -> dict[str, Any]:
    return {
        **_parse_operation(row),
        "seconds": get_number(row, "seconds"),
        "missing": None if row.get("missing", ...) is None else _get_ranks(row, "missing"),
    }


def _parse_operation(row: dict[str, Any]) -> dict[str, Any]:
    """Parse what a rank submitted. Records of older versions have no more than the name and the kind."""
    told = {"dtype": "", "dims": [], "bytes": 0, "described": "", **row}
    dims = told["dims"]
    if not isinstance(dims, list) or len(dims) > MOST_DIMS:
        raise ReadError(f"'dims' is no list of at most {MOST_DIMS} numbers")
    return {
        "name": get_text(row, "name"),
        "kind": get_text(row, "kind"),
        "dtype": get_text(told, "dtype"),
        "dims": [get_whole({"dims": each}, "dims") for each in dims],
        "bytes": get_whole(told, "bytes"),
        "described": get_text(told, "described"),
        "begun": bool(row.get("begun")),
    }


def _parse_unfinished(row: dict[str, Any]) -> dict[str, Any]:
    return {
        **_parse_operation(row),
        "entry": None if row.get("entry", ...) is None else get_whole(row, "entry"),
        "failed_call": bool(row.get("failed_call")),
        "submitted": get_number(row, "submitted"),
        "ended": get_number(row, "ended"),
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
