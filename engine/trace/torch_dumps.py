"""Conversion of a job's flight records to dumps of PyTorch's flight recorder, which `torchfrtrace` reads.

PyTorch pairs the operations of ranks by a number per process group, the engine by their names. So all ranks' records
are converted together: what the engine knows to be one operation gets one number, the schedule entry's where it has
one. A rank that the others wait for has no row for the operation, and so counts as missing.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..host import private_files
from ..text.bounded_reader import parse_natural
from ..text.readable import format_members, format_ranks
from .disagreements import Disagreement, make_signature
from .postmortem import add_waits, find_cause, missing_ranks, sets_of, stuck_in_entry
from .records import Failure, Flight, Members, collect

VERSION = "2.10"  # version of the dumps' format, as torch 2.13 writes it; readers since 2.7 take it alike
PREFIX = "rank_"
OTHERS = "others"  # directory of all dumps but the one that is read first
BACKEND = "gloo"  # a name of a library that the reader accepts; the engine's own is not among them
KEPT = 512  # number of newest operations of each process set that are converted
MOST_PARTS = 1 << 21  # number of ranks' parts in operations that are converted, over all process sets
TYPES = {
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather_v",
    "alltoall": "all_to_all_v_single",
    "reducescatter": "reduce_scatter_v",
    "barrier": "barrier",
}
DTYPES = {
    "float16": "Half",
    "bfloat16": "BFloat16",
    "float32": "Float",
    "float64": "Double",
    "int8": "Char",
    "uint8": "Byte",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}


@dataclass
class RankPart:
    """One rank's part in an operation; times are by the clock of its record, in seconds."""

    kind: str
    dims: list[int]
    dtype: str
    created: float | None = None
    started: float | None = None
    ended: float | None = None


@dataclass
class DumpedCollective:
    """One operation of a process set, and the ranks that have joined it."""

    number: int
    label: str
    parts: dict[int, RankPart]
    state: str = "completed"  # of the operation: it is completed only once it is on every rank


@dataclass
class Schedule:
    """Operations of the world or of a process set: those that are done, and those that do not come to an end."""

    name: str
    members: Members
    done: list[DumpedCollective] = field(default_factory=list)
    open: list[DumpedCollective] = field(default_factory=list)

    @property
    def description(self) -> str:
        """The set's description, the same on all ranks."""
        return "default_pg" if self.name == "0" else format_members(self.members[1], self.members[0])


@dataclass
class Dumps:
    """Dumps of a job, by rank."""

    content: dict[int, dict[str, Any]]
    first: int  # rank whose dump the reader has to take first, because it compares the others with it
    notes: list[str]

    def write_files(self, directory: Path) -> None:
        """Write each rank's dump to a file of the directory, and remove those of an earlier call.

        The reader compares all ranks with that of the first file that it finds, and calls the others culprits. It
        finds files of the directory before those of directories in it.
        """
        private_files.make_directory(directory)
        private_files.make_directory(directory / OTHERS)
        for path in (*directory.glob(f"{PREFIX}*"), *(directory / OTHERS).glob(f"{PREFIX}*")):
            if parse_natural(path.name.removeprefix(PREFIX)) is not None:
                path.unlink()
        for rank, dump in self.content.items():
            home = directory if rank == self.first else directory / OTHERS
            private_files.replace(home / f"{PREFIX}{rank}", pickle.dumps(dump, protocol=2))


def convert_records(directory: Path) -> Dumps:
    """Convert the flight records in a job's directory.

    Raises FileNotFoundError if there is no flight record of any rank.
    """
    flights, failures, notes = collect(directory)
    if not flights:
        detail = "".join(f"\n  {note}" for note in notes)
        raise FileNotFoundError(
            f"{directory}: no rank.N/flight.json that can be read; give the directory that has rank.N{detail}"
        )
    return _Conversion(flights, failures[0] if failures else None, notes).convert_all()


class _Conversion:
    """Conversion of one job's records; `blamed` is the world's first failure."""

    def __init__(self, flights: dict[int, Flight], blamed: Failure | None, notes: list[str]) -> None:
        self._flights = add_waits(flights)
        self._size = next(iter(flights.values())).size
        self._blamed = blamed if blamed is not None and blamed.rank < self._size else None
        self._notes = notes
        self._parts_left = MOST_PARTS
        self._cause = find_cause(self._flights, self._blamed, self._size)

    def convert_all(self) -> Dumps:
        every = [(None, self._flights), *sorted(sets_of(self._flights).items(), key=lambda item: item[0][::-1])]
        schedules = []
        for number, (members, flights) in enumerate(every):
            schedule = Schedule(str(number), members or ("", tuple(range(self._size))))
            if self._parts_left < 2 * len(schedule.members[1]):
                self._notes.append(f"{len(every) - number} process sets are left out: there are too many operations")
                break
            self._add_operations(schedule, members, flights)
            schedules.append(schedule)
        causing = self._find_causing(schedules)
        schedules.sort(key=lambda schedule: schedule is not causing)
        ranks = self._choose_ranks(schedules)
        content = {rank: self._make_dump(rank, schedules) for rank in ranks}
        return Dumps(content, self._choose_first(causing, ranks), self._notes)

    # ---- operations of one schedule

    def _add_operations(self, schedule: Schedule, members: Members | None, flights: dict[int, Flight]) -> None:
        found = self._cause if self._cause is not None and self._cause[0] == members else None
        disagreement = found[1] if found is not None and isinstance(found[1], Disagreement) else None
        end = disagreement.entry if disagreement is not None else None
        self._add_entries(schedule, flights, end)
        if disagreement is not None:
            schedule.open = [self._convert_disagreement(disagreement)]
        else:
            schedule.open += self._convert_waits(schedule, flights)

    def _add_entries(self, schedule: Schedule, flights: dict[int, Flight], end: int | None) -> None:
        """Add the entries that all records cover, before the entry `end`."""
        rows: dict[int, dict[int, dict[str, Any]]] = {}
        for rank, flight in flights.items():
            for row in flight.history:
                if row["type"] == "batch" and row["kind"] in TYPES and (end is None or row["entry"] < end):
                    rows.setdefault(row["entry"], {})[rank] = row
        start = max((flight.history[0]["entry"] for flight in flights.values() if flight.history), default=0)
        stuck = None if end is not None else stuck_in_entry(flights)
        for number in sorted(entry for entry in rows if entry >= start)[-self._take_share(schedule, len(rows)) :]:
            of_ranks = rows[number]
            if stuck is None or number < stuck[1]:
                schedule.done.append(self._convert_entry(number, of_ranks, set(schedule.members[1]), "completed"))
                continue
            behind = set(stuck[0]) or self._blamed_ranks(schedule)
            joined = set(schedule.members[1]) - behind if number == stuck[1] else set(of_ranks)
            schedule.open.append(self._convert_entry(number, of_ranks, joined, "started"))

    def _take_share(self, schedule: Schedule, wanted: int) -> int:
        """Return how many operations of a schedule to convert, at least one, so that all of them stay within limits."""
        members = max(1, len(schedule.members[1]))
        taken = max(1, min(wanted, KEPT, self._parts_left // members))
        self._parts_left -= taken * members
        return taken

    def _convert_entry(
        self, number: int, rows: dict[int, dict[str, Any]], joined: set[int], state: str
    ) -> DumpedCollective:
        known = next(iter(rows.values()))
        more = f" and {known['tensors'] - 1} more" if known["tensors"] > 1 else ""
        parts = {}
        for rank in joined:
            row = rows.get(rank)
            times = (row["started"], row["started"], row["ended"]) if row is not None else (None, None, None)
            parts[rank] = RankPart(known["kind"], [known["bytes"]], "Byte", *times)
        return DumpedCollective(number, f"{known['name']}{more}", parts, state)

    def _convert_disagreement(self, disagreement: Disagreement) -> DumpedCollective:
        rows = disagreement.parts.items()
        sent = {rank: row for rank, row in rows if not row["failed_call"] and row["kind"] in TYPES}
        return DumpedCollective(disagreement.entry, disagreement.name, _make_parts(sent), "scheduled")

    def _convert_waits(self, schedule: Schedule, flights: dict[int, Flight]) -> Iterator[DumpedCollective]:
        """Yield operations that have been submitted and are in no entry yet, the likely cause first."""
        absent = missing_ranks(flights, schedule.members[1])
        members, blamed = set(schedule.members[1]), self._blamed_ranks(schedule)
        submitted: dict[str, dict[int, dict[str, Any]]] = {}
        for rank, flight in flights.items():
            for row in flight.pending:
                if row["kind"] in TYPES:
                    submitted.setdefault(row["name"], {})[rank] = row
        missing = {
            name: ({*absent.get(name, [])} | (blamed - set(flights))) & members - set(rows)
            for name, rows in submitted.items()
        }
        culprits = self._find_culprits(schedule)

        def make_sort_key(name: str) -> tuple[bool, bool, float]:
            seconds = max(row["seconds"] for row in submitted[name].values())
            return missing[name] != culprits, not missing[name], -seconds

        last = max((each.number for each in (*schedule.done, *schedule.open)), default=0)
        for number, name in enumerate(
            sorted(submitted, key=make_sort_key)[: self._take_share(schedule, len(submitted))], last + 1
        ):
            rows = submitted[name]
            known = next(iter(rows.values()))
            joined = {rank: rows.get(rank, known) for rank in members - missing[name]}
            yield DumpedCollective(number, name, _make_parts(joined), "scheduled")

    def _find_culprits(self, schedule: Schedule) -> set[int]:
        """Return the ranks that the engine's own judgement names in a schedule."""
        if self._cause is not None and (self._cause[0] or ("", tuple(range(self._size)))) == schedule.members:
            return self._cause[1].culprits
        return self._blamed_ranks(schedule)

    def _blamed_ranks(self, schedule: Schedule) -> set[int]:
        blamed = self._blamed
        return {blamed.rank} if blamed is not None and blamed.rank in schedule.members[1] else set()

    # ---- dumps of ranks

    def _find_causing(self, schedules: list[Schedule]) -> Schedule:
        """Return the schedule that the engine's judgement names; otherwise one in which the blamed rank is missing."""
        if self._cause is not None and self._cause[1].culprits:
            members = self._cause[0] or ("", tuple(range(self._size)))
            return next((each for each in schedules if each.members == members), schedules[0])

        def lacks_blamed(schedule: Schedule) -> bool:
            blamed = self._blamed_ranks(schedule)
            return bool(blamed and schedule.open and not blamed & schedule.open[0].parts.keys())

        return max(schedules, key=lambda each: (lacks_blamed(each), bool(each.open)))

    def _choose_ranks(self, schedules: list[Schedule]) -> list[int]:
        """Return the ranks of which something is known: by their own records, or because others wait for them."""
        waited = {rank for each in schedules for one in each.open for rank in set(each.members[1]) - one.parts.keys()}
        unknown = [rank for rank in range(self._size) if rank not in self._flights and rank not in waited]
        if unknown:
            self._notes.append(
                f"no dump for {format_ranks(unknown)}, which left no record and which nobody waits for: "
                "give torchfrtrace --allow-incomplete-ranks"
            )
        return sorted(self._flights.keys() | waited)

    def _choose_first(self, causing: Schedule, ranks: list[int]) -> int:
        """Return the rank with which the reader shall compare the others: one that is not to blame."""
        cause = self._cause[1] if self._cause is not None else None
        if isinstance(cause, Disagreement) and cause.groups:
            return cause.groups[0][0]
        joined = causing.open[0].parts.keys() if causing.open else set()
        return next((rank for rank in ranks if rank in joined), ranks[0])

    def _make_dump(self, rank: int, schedules: list[Schedule]) -> dict[str, Any]:
        mine = [schedule for schedule in schedules if rank in schedule.members[1]]
        flight = self._flights.get(rank)
        offset = flight.time - flight.monotonic if flight is not None and flight.monotonic is not None else 0.0
        done = [(schedule, each) for schedule in mine for each in schedule.done if rank in each.parts]
        done.sort(key=lambda pair: (pair[1].parts[rank].created or 0.0, int(pair[0].name), pair[1].number))
        rest = [(schedule, each) for schedule in mine for each in schedule.open if rank in each.parts]
        entries = [
            _make_entry(record, schedule, each, each.parts[rank], offset)
            for record, (schedule, each) in enumerate(done + rest)
        ]
        return {
            "version": VERSION,
            "pg_config": {
                each.name: {"name": each.name, "desc": each.description, "ranks": str(list(each.members[1]))}
                for each in mine
            },
            "pg_status": {each.name: _make_status(each, rank) for each in mine},
            "entries": entries,
            "engine_record": flight is not None,  # False: what the other ranks know about this one
        }


def _make_parts(rows: dict[int, dict[str, Any]]) -> dict[int, RankPart]:
    """Convert what ranks submitted; what the reader cannot tell apart by type, shape and dtype, it can by the dtype."""
    bare = all(not row["dims"] for row in rows.values())  # scalars or groups: the reader skips the dtype of no shape
    parts = {}
    for rank, row in rows.items():
        dims = [row["bytes"]] if bare else row["dims"]
        dtype = DTYPES.get(row["dtype"], row["dtype"])
        parts[rank] = RankPart(row["kind"], dims, dtype, row.get("submitted"))
    seen: dict[str, set[str]] = {}
    for rank, row in rows.items():
        part = parts[rank]
        seen.setdefault(repr((part.kind, part.dims, part.dtype)), set()).add(make_signature(row))
    if any(len(signatures) > 1 for signatures in seen.values()):
        for rank, row in rows.items():
            parts[rank].dtype += f" ({row['described']})"
    return parts


def _make_entry(
    record: int, schedule: Schedule, each: DumpedCollective, part: RankPart, offset: float
) -> dict[str, Any]:
    """Make a row of a dump. The stack trace, which the engine does not record, is the operation's name and number."""

    def to_unix_time(at: float | None) -> int | None:
        return None if at is None else int((at + offset) * 1e9)

    return {
        "frames": [{"name": f"tensor {each.label!r}", "filename": "schedule entry", "line": each.number}],
        "record_id": record,
        "pg_id": int(schedule.name),
        "process_group": (schedule.name, schedule.description),
        "collective_seq_id": each.number,
        "p2p_seq_id": 0,
        "op_id": each.number,
        "profiling_name": f"{BACKEND}:{TYPES[part.kind]}",
        "time_created_ns": to_unix_time(part.created) or 0,
        "input_sizes": [part.dims],
        "input_dtypes": [part.dtype],
        "output_sizes": [part.dims],
        "output_dtypes": [part.dtype],
        "state": each.state,
        "time_discovered_started_ns": to_unix_time(part.started),
        "time_discovered_completed_ns": to_unix_time(part.ended),
        "retired": each.state == "completed",
        "timeout_ms": 0,
        "is_p2p": False,
    }


def _make_status(schedule: Schedule, rank: int) -> dict[str, int]:
    """Make the numbers of the last operations of a rank in a schedule; -1 if there is none."""
    done = max((each.number for each in schedule.done), default=-1)
    mine = [each for each in schedule.open if rank in each.parts]
    started = max((each.number for each in mine if each.state == "started"), default=done)
    return {
        "last_enqueued_collective": max((each.number for each in mine), default=done),
        "last_started_collective": started,
        "last_completed_collective": done,
    }
